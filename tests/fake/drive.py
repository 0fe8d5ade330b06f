"""Runs cases in one process: `python -m tests.fake.drive LIBRARY FOLDER < cases.json`, a line of JSON out for each."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    library, folder = sys.argv[1:]
    cases = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    from tests.fake import device, world

    device.pretend(library)
    world.pretend()
    for number, case in enumerate(cases):
        mode = device.NoDevice()
        result: dict[str, Any] = {"name": case["name"], "error": None}
        try:
            world.enter(case.get("rank", 0), case.get("size", 1))
            with mode:
                run(case, Path(folder) / str(number))
        except BaseException as error:
            result["error"] = f"{type(error).__name__}: {error}"
            result["trace"] = "".join(traceback.format_tb(error.__traceback__))
        result.update(waits=dict(mode.waits), fetched=mode.fetched)
        print(json.dumps(result), file=out, flush=True)


def run(case: dict[str, Any], folder: Path) -> None:
    from megavlm.programs.train import train

    folder.mkdir(parents=True)  # as rank 0 does, which may not be there
    train([*case["argv"], "--run-dir", str(folder)])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
