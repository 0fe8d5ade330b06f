"""megavlm: train vision-language models on any TP × PP × VPP × DP layout with the same numbers."""

import os as _os
import re as _re
import sys as _sys

__version__ = "0.1.0"


def _leave_out_the_working_directory() -> None:
    """Remove the working directory from `sys.path`, where Python puts it for `python -m megavlm…`: a `torch.py` next to
    a user's data would be imported instead of torch. The directory stays if it is the clone that runs.
    """
    words = iter(_sys.orig_argv[1:])
    named = next((next(words, "") for word in words if _re.fullmatch(r"-[A-Za-z]*m", word)), "")
    is_starting = _sys.argv[:1] == ["-m"]  # until Python has found the module
    if not is_starting or named.partition(".")[0] != "megavlm" or _sys.flags.safe_path:
        return
    home = _os.path.dirname(_os.path.dirname(_os.path.realpath(__file__)))
    if _sys.path and _os.path.realpath(_sys.path[0]) != home:
        del _sys.path[0]


_leave_out_the_working_directory()
