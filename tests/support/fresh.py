"""Programs as a user starts them, at the price of one start: forks of a process that has imported torch and
Transformers, but neither megatron-core nor anything of megavlm.

Where the order of imports does not matter, `tests/support/forked.py` is cheaper still.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_programs(commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """Run `python COMMAND…` for each command, in order, up to the first that fails; a command is a file and its
    arguments, or "-c" and code.

    Returns:
        (exit status, output) of each that ran.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fresh"],
        input=json.dumps([list(command) for command in commands]),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(status, output) for status, output in json.loads(done.stdout)]


def _main() -> None:
    commands = json.load(sys.stdin)
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    assert not any(name.partition(".")[0] in ("megatron", "megavlm") for name in sys.modules)
    results: list[tuple[int, str]] = []
    for command in commands:
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                os._exit(_run(command))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            results.append((status, output.read()))
        if status != 0:
            break
    json.dump(results, sys.stdout)


def _run(command: Sequence[str]) -> int:
    """Be `python COMMAND…`; returns its exit status."""
    status = 0
    try:
        if command[0] == "-c":
            exec(command[1], {"__name__": "__main__"})
        else:
            sys.argv = list(command)
            sys.path[0] = str(Path(command[0]).resolve().parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    _main()
