"""Start the demo with two processes on CPUs several times, and print what each part of a start takes.

    python benchmarks/start.py --times 5
    python benchmarks/start.py --cold       # without compiled modules, as after an installation

Other programs on the machine only add to a part, so that its shortest time counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without an installed package, too

import record

from megavlm.resilience.events import events
from megavlm.resilience.phases import PARTS

ROOT = Path(__file__).resolve().parents[1]


def parts_of_a_start(*, cold: bool) -> Mapping[str, float]:
    """Return the seconds of each part of one start, and of the whole."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        argv = f"--nproc-per-node 2 {ROOT / 'pretrain_vlm.py'} --recipe demo --tp 2 --train-iters 1 --run-dir {run_dir}"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if cold:
            environment["PYTHONPYCACHEPREFIX"] = folder
        torchrun = [sys.executable, "-m", "torch.distributed.run", *argv.split()]
        subprocess.run(torchrun, cwd=ROOT, env=environment, check=True, capture_output=True)
        (event,) = [each for each in events(run_dir) if each["kind"] == "started"]
    return {**event["phases"], "whole": event["seconds"]}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--times", type=int, default=5, help="Starts; default: 5.")
    parser.add_argument("--cold", action="store_true", help="Compile all modules of Python in each start.")
    parser.add_argument("--write", action="store_true", help="Add the result to benchmarks/records/start.jsonl.")
    args = parser.parse_args(argv)
    starts = [parts_of_a_start(cold=args.cold) for _ in range(args.times)]
    shortest = {part: min(start[part] for start in starts) for part in (*PARTS, "whole")}
    for part, seconds in shortest.items():
        print(f"{PARTS.get(part, part):36} {seconds:7.3f} s")
    if args.write:
        record.append("start", {**record.circumstances(), "starts": args.times, "cold": args.cold, "seconds": shortest})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
