"""Start and ask the processes in which `gpu_vlm.py` measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT_OF_MEMORY = "out of memory"
_MOST_LEFT = 2**30  # bytes that a process may keep on the device while others measure
Answer = dict[str, Any]


class Workers:
    """A process for each program, started on first use, and restarted if it kept memory or died."""

    def __init__(self, device: str, folder: Path) -> None:
        self.folder = folder
        self._device = device
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._machines: dict[str, Any] = {}

    def machine(self, program: str) -> dict[str, Any]:
        """Return the device that a program reports. Raises SystemExit if the program does not start."""
        process = self._process(program)
        found: dict[str, Any] | None = self._machines[program]
        if found is None:
            raise SystemExit(f"{program} does not start: status {process.wait()}")
        return found

    def ask(self, program: str, task: Mapping[str, Any]) -> Answer:
        """Return a program's measurement; `error` says why there is none."""
        answer, process = self.folder / "answer.json", self._process(program)
        answer.unlink(missing_ok=True)
        assert process.stdin is not None
        if self._machines[program] is not None:
            process.stdin.write(json.dumps({**task, "answer": str(answer)}) + "\n")
            process.stdin.flush()
        if self._machines[program] is None or _said(process) is None or not answer.exists():
            del self._processes[program]
            return {"error": f"ended with status {process.wait()}"}
        found: Answer = json.loads(answer.read_text())
        failed = found.get("error", OUT_OF_MEMORY) != OUT_OF_MEMORY  # and may have left the device unusable
        if failed or "release_error" in found or found.get("left_bytes", 0) > _MOST_LEFT:
            self._end(self._processes.pop(program))
        return found

    def close(self) -> None:
        while self._processes:
            self._end(self._processes.popitem()[1])

    def _process(self, program: str) -> subprocess.Popen[str]:
        if program not in self._processes:
            command = [sys.executable, "-W", "ignore", str(HERE / "gpu_worker.py"), program, self._device]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
            )
            self._processes[program], self._machines[program] = process, _said(process)
        return self._processes[program]

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def environment() -> dict[str, str]:
    """Return the environment of workers: this repository first on the path, no network, few messages."""
    paths = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    # As megavlm's own default, for both sides.
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {**os.environ, **quiet, **allocator, "PYTHONPATH": os.pathsep.join(paths)}


def _said(process: subprocess.Popen[str]) -> Any:
    """Return the next line of JSON, ignoring other output; None if the process ends first."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            return json.loads(line)
        except ValueError:
            sys.stderr.write(line)
    return None
