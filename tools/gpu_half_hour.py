"""Run the checks that fit in half an hour on one GPU, one by one; `tools/gpu_check.sh --minutes 30` starts it.

Each item has its own time limit. When an item ends, a line is added to FOLDER/record.jsonl with its figures, the failed
tests, and the last lines of its output. An item already recorded for this commit is not run again, so that the same
command resumes after an interruption. The variable OUT names a folder to which results are copied after each item.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))  # is there already if this file is the program

from gpu_items import ITEMS, Item  # noqa: E402
from gpu_summary import cases_of  # noqa: E402

MOST_MINUTES = 29  # of all limits together
_LOG_BYTES = 200_000  # of an item's output, at most
_ENDED = ("ok", "FAILED", "FAILED: out of time")
NEEDED = "hypothesis megatron.core numpy PIL psutil pytest safetensors tokenizers torch transformers yaml".split()


class Check:
    """A run of the items on one commit, with its folder of results and its record."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + 60 * options.minutes - options.spent
        self.commit = _git("rev-parse", "HEAD")
        self.folder = Path(options.out or ROOT / f"runs/gpu-check-{self.commit[:12] or 'unknown'}").resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.record = self.folder / "record.jsonl"

    def known(self) -> dict[str, str]:
        """Return the recorded result of each item that ended on this commit, by name."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        found = [each for each in map(_parsed, lines) if each.get("commit") == self.commit]
        same = [each for each in found if each["rehearsed"] == self.options.rehearse and each["result"] in _ENDED]
        return {each["item"]: each["result"] for each in same}

    def run(self, items: Sequence[Item]) -> int:
        """Run the items that are not recorded yet and fit in the remaining time; return 1 if any has failed, else 0."""
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            refusal = "" if self.options.rehearse else _cannot_share(self.options.nccl)
            for number, item in enumerate(items, 1):
                left, known = self.deadline - time.monotonic(), self.known()
                if item.name in known:
                    continue
                failed = known.get(item.instead_of, "").startswith("FAILED")
                if item.instead_of and not failed and not self.options.items:
                    continue
                if item.ranks and refusal:
                    print(f"== {number} {item.name}: skipped: {refusal}", flush=True)
                elif left < 60 * item.minutes:
                    print(f"== {number} {item.name}: {item.minutes:g} minutes do not fit: start again", flush=True)
                else:
                    print(f"== {number} {item.name}: {item.decides}", flush=True)
                    self.note(self.measured(item, scratch / item.name))
        self.summarize(items)
        return int(any(result.startswith("FAILED") for result in self.known().values()))

    def measured(self, item: Item, scratch: Path) -> dict[str, Any]:
        """Run an item within its time limit; return its line for the record."""
        scratch.mkdir()
        log = scratch / "tests.log"
        limit = 60 * item.minutes * (10 if self.options.rehearse else 1)  # longer on a CPU, which may be shared
        rehearsed = self.options.rehearse
        words = item.words(sys.executable, scratch=scratch, kept=self.folder, rehearsed=rehearsed)
        began = time.monotonic()
        with _environment(item, scratch, self.options) as env, log.open("wb") as output:
            ended = subprocess.run(
                ["timeout", "--signal=INT", "--kill-after=10", str(limit), *words],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        text = log.read_text(errors="replace")[-_LOG_BYTES:]
        with (self.folder / "log.txt").open("a") as whole:
            whole.write(f"\n== {item.name}, {shlex.join(words)}\n{text}")
        out_of_time = ended.returncode in (124, 137, -9)
        line = {
            "item": item.name,
            "decides": item.decides,
            "command": shlex.join(words).replace(str(scratch), "SCRATCH").replace(str(ROOT) + "/", ""),
            "commit": self.commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rehearsed": rehearsed,
            "seconds": round(time.monotonic() - began, 1),
            "limit": limit,
            "status": ended.returncode,
            "result": "ok" if ended.returncode == 0 else "FAILED: out of time" if out_of_time else "FAILED",
        }
        if "pytest" in words:
            line["tests"] = _told(log)
        figures = {file.stem: _parsed(file.read_text()) for file in sorted(scratch.glob("*.json"))}
        return {**line, "figures": figures, "last_lines": text.splitlines()[-(10 if line["result"] == "ok" else 60) :]}

    def note(self, line: dict[str, Any]) -> None:
        """Add a line to the record, print it, and copy the results to the folder named by the variable OUT."""
        with self.record.open("a") as record:
            record.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(f"   {line['result']}, {line['seconds']} s {json.dumps(line.get('tests', ''))[:300]}", flush=True)
        if line["result"] != "ok":
            print("\n".join(line["last_lines"]), flush=True)
        copies = os.environ.get("OUT")
        if copies and Path(copies).is_dir():
            for file in self.folder.iterdir():
                shutil.copy(file, copies)

    def summarize(self, items: Sequence[Item]) -> None:
        """Print the recorded result of each item."""
        known = self.known()
        print(f"\n{self.record}")
        for number, item in enumerate(items, 1):
            if not item.instead_of or item.name in known or self.options.items:
                print(f"{number:3} {item.name:20} {known.get(item.name, 'not run'):20} {item.decides}")


@contextmanager
def _environment(item: Item, scratch: Path, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield the environment of an item; NVIDIA's MPS, if installed, runs meanwhile for ranks that share a GPU."""
    env = {**os.environ, **item.env}
    paths = [str(ROOT), env.get("PYTHONPATH", "")]
    if item.hides_engine:
        hiding = scratch / "hiding"
        hiding.mkdir()
        (hiding / "transformer_engine.py").write_text('raise ImportError("hidden from these tests")\n')
        paths.insert(0, str(hiding))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if options.rehearse:
        env |= {"CUDA_VISIBLE_DEVICES": "", "MEGAVLM_GPU_TESTS": "cpu"}
    if options.rehearse or not item.ranks:
        yield env
        return
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # unset, as in the tests' own runs
    first = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    env |= {"CUDA_VISIBLE_DEVICES": first, "LD_PRELOAD": " ".join(filter(None, [options.nccl, env.get("LD_PRELOAD")]))}
    mps = shutil.which("nvidia-cuda-mps-control", path=env.get("PATH", "") + ":/usr/local/nvidia/bin")
    if mps is None:  # ranks take turns, and collectives are slow
        yield env
        return
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(scratch / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(scratch / "mps")}
    for path in pipes.values():
        Path(path).mkdir()
    served = {**env, **pipes}
    alone = {name: value for name, value in served.items() if name not in ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES")}
    started = subprocess.run([mps, "-d"], env=alone, check=False).returncode == 0
    try:
        yield served if started else env
    finally:
        if started:
            subprocess.run([mps], env=alone, input="quit\n", text=True, timeout=20, check=False)


# Asks the NCCL that is loaded for its version: torch.cuda.nccl.version() is what torch was compiled with.
_DEVICES_AND_NCCL = """
import ctypes, torch
found = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
print(torch.cuda.device_count(), found.value)"""


def _cannot_share(nccl: str) -> str:
    """Return why several ranks cannot share the first GPU; "" if they can."""
    env = {**os.environ, "LD_PRELOAD": " ".join(filter(None, [nccl, os.environ.get("LD_PRELOAD")]))}
    done = subprocess.run(
        [sys.executable, "-c", _DEVICES_AND_NCCL], env=env, capture_output=True, text=True, check=False
    )
    devices, version = (int(word) for word in (done.stdout.split() or ["0", "0"])[-2:])
    if devices == 0:
        return "needs a CUDA device, and a torch with NCCL as a library of its own"
    if version < 23000:
        return f"ranks share a GPU from NCCL 2.30 (23000) on, this is {version}: name a newer one with --nccl"
    return ""


def _told(log: Path) -> dict[str, Any]:
    """Summarize the tests of a log: number passed, names failed, reasons of skips, seconds of each."""
    rows = cases_of(log)
    return {
        "passed": sum(row.result == "ok" for row in rows),
        "failed": [row.what for row in rows if row.result.startswith("FAILED")],
        "skipped": Counter(row.figure for row in rows if row.result == "skipped"),
        "seconds": {row.what: row.figure for row in rows if row.result == "ok" and row.figure},
    }


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # a machine without git
        return ""


def _parsed(text: str) -> Any:
    """Parse JSON; return {"not whole": text} for incomplete JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return {"not whole": text[:200]}


def _missing(names: Sequence[str]) -> list[str]:
    """Return the modules of a list that are not installed."""

    def found(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:  # the package that should contain it
            return False

    return [name for name in names if not found(name)]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="no item begins that could end after this time")
    parser.add_argument("--spent", type=float, default=0.0, help="seconds of these that have passed already")
    parser.add_argument("--items", default="", metavar="A,B", help="run these alone, in this order")
    parser.add_argument("--out", metavar="FOLDER", help="of the results; default: runs/gpu-check-COMMIT")
    parser.add_argument("--nccl", default="", metavar="FILE", help="a libnccl.so.2 of 2.30 or newer, to be preloaded")
    parser.add_argument("--rehearse", action="store_true", help="run each item in miniature on a CPU, over gloo")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parsed(argv)
    if missing := _missing(NEEDED + ([] if options.rehearse else ["transformer_engine"])):
        print(f"gpu_check.sh: Python lacks {', '.join(missing)}: name a folder of wheels by --wheels", file=sys.stderr)
        return 2
    by_name = {item.name: item for item in ITEMS}
    names = options.items.split(",") if options.items else list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        print(f"gpu_check.sh: --items {unknown[0]} is none of {', '.join(by_name)}", file=sys.stderr)
        return 2
    return Check(options).run([by_name[name] for name in names])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
