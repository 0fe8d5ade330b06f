"""Start the demo on CPUs several times, and print what each part of a start takes.

    python benchmarks/start.py --times 5
    python benchmarks/start.py --cold       # without compiled modules, as after an installation
    python benchmarks/start.py --world 64 --layout tp8,pp2,dp4 --times 1

Other programs on the machine only add to a part, so that its shortest time counts. More than two processes are started
only if memory suffices, by what two of them take in a start before.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without an installed package, too

import record

from megavlm.resilience.events import events
from megavlm.resilience.phases import PARTS

ROOT = Path(__file__).resolve().parents[1]
PAIR = "tp2"  # the layout of two processes
LOOK = 0.5  # seconds between two looks at memory
MARGIN = 1.1  # groups of more ranks have more buffers
GIB = 2**30


def layout_of(text: str) -> dict[str, int]:
    """Return the degrees of a layout, "tp8,pp2,dp4". Raises ValueError for anything else."""
    found = {}
    for word in text.split(","):
        if not (match := re.fullmatch(r"(tp|cp|pp|vpp|dp)([1-9]\d*)", word)):
            raise ValueError(f"--layout {text}: {word!r} is no degree: write tp8,pp2,dp4")
        found[match[1]] = int(match[2])
    return found


def flags(layout: Mapping[str, int]) -> str:
    """Return the flags of a layout. Beyond two ranks, each replica has two micro-batches for each pipeline stage, and
    no rank has a writer of checkpoints beside it, which would take half as much memory again.
    """
    degrees = " ".join(f"--{name} {degree}" for name, degree in layout.items() if name != "dp")
    batch = f"--mbs 1 --gbs {2 * layout.get('dp', 1) * layout.get('pp', 1)}"
    return degrees if ranks_of(layout) == 2 else f"{degrees} --no-save {batch}"


def ranks_of(layout: Mapping[str, int]) -> int:
    """Return the number of processes of a layout."""
    return math.prod(degree for name, degree in layout.items() if name != "vpp")


def memory_of(process: int) -> int:
    """Return the bytes of all processes below this one, each with its share of what several have, without files, such
    as libraries, that are in memory once for all.
    """
    total = 0
    for number in below(process):
        with suppress(OSError):  # it has ended
            shares = Path(f"/proc/{number}/smaps_rollup").read_text()
            total += 1024 * sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", shares, re.MULTILINE)))
    return total


def below(process: int) -> list[int]:
    """Return the processes that this one has started, and those that they have."""
    found = [process]
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda each: int(each.name)):
        with suppress(OSError, IndexError, ValueError):  # it has ended
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) in found:
                found.append(int(folder.name))
    return found[1:]


def free_memory() -> int:
    """Return the bytes that further processes may take, of this machine and of this container."""
    free = int(re.findall(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = int(re.findall(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)[0])
        free = min(free, most - used + cached)
    return free


def refusal(world: int, pair: int, free: int) -> str | None:
    """Return why so many processes cannot be started, where two of them take `pair` bytes."""
    needed = MARGIN * pair * world / 2
    if needed <= free:
        return None
    return (
        f"{world} processes would take {needed / GIB:.1f} GiB, by the {pair / GIB:.1f} of two, and {free / GIB:.1f} "
        f"GiB are free: use --world {2 * int(free / (MARGIN * pair))}"
    )


def parts_of_a_start(world: int, layout: str, *, cold: bool = False, weighed: bool = False) -> Mapping[str, float]:
    """Return the seconds of each part of one start, and of the whole; if it is `weighed`, the most bytes of all
    processes as well, which takes processor time. The run is ended after its first step: many processes on few cores
    would answer questions for minutes.
    """

    def known() -> list[dict[str, Any]]:
        return [each for each in events(run_dir) if each["kind"] == "started"]

    with tempfile.TemporaryDirectory() as folder:
        run_dir, output, most = Path(folder, "run"), Path(folder, "output"), 0
        argv = f"--nproc-per-node {world} {ROOT / 'pretrain_vlm.py'} --recipe demo {layout} --train-iters 1"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if cold:
            environment["PYTHONPYCACHEPREFIX"] = folder
        torchrun = [sys.executable, "-m", "torch.distributed.run", *argv.split(), "--run-dir", str(run_dir)]
        with output.open("w") as file:
            started = subprocess.Popen(torchrun, cwd=ROOT, env=environment, stdout=file, stderr=file)
            while started.poll() is None and not known():
                time.sleep(LOOK)
                most = max(most, memory_of(started.pid) if weighed else 0)
            for process in (started.pid, *below(started.pid)):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            started.wait()
        if not (found := known()):
            raise SystemExit(output.read_text()[-3000:])
        (event,) = found
    return {**event["phases"], "whole": event["seconds"], "bytes": most}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--times", type=int, default=5, help="Starts; default: 5.")
    parser.add_argument("--cold", action="store_true", help="Compile all modules of Python in each start.")
    parser.add_argument("--world", type=int, help="Processes; default: those of --layout.")
    parser.add_argument("--layout", default=PAIR, help=f"Degrees of parallelism, as tp8,pp2,dp4; default: {PAIR}.")
    parser.add_argument("--write", action="store_true", help="Add the result to benchmarks/records/start.jsonl.")
    args = parser.parse_args(argv)
    try:
        layout = layout_of(args.layout)
    except ValueError as error:
        parser.error(str(error))
    world = ranks_of(layout)
    if args.world not in (None, world):
        parser.error(f"--layout {args.layout} is of {world} processes, and --world is {args.world}: change one")
    if world > 2:
        pair = int(parts_of_a_start(2, f"{flags(layout_of(PAIR))} --no-save", weighed=True)["bytes"])
        if reason := refusal(world, pair, free_memory()):
            parser.error(reason)
        print(
            f"{world} processes take some {pair * world / 2 / GIB:.1f} GiB, of {free_memory() / GIB:.1f} that are free"
        )
    starts = [parts_of_a_start(world, flags(layout), cold=args.cold) for _ in range(args.times)]
    shortest = {part: min(start[part] for start in starts) for part in (*PARTS, "whole")}
    for part, seconds in shortest.items():
        print(f"{PARTS.get(part, part):36} {seconds:7.3f} s")
    if args.write:
        measured = {"world": world, "layout": args.layout, "cold": args.cold, "seconds": shortest}
        record.append("start", {**record.circumstances(), "starts": args.times, **measured})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
