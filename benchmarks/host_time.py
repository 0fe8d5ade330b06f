"""Count the host's work in a training step, by layer: launched operations, bytes they move, Python calls, time.

    python benchmarks/host_time.py [--only LLaVA] [--keep]

The script runs the step of `gpu_vlm.py`, megavlm's and Transformers', at published widths on fake tensors
(`tests/fake/count.py`): without a GPU and without values, but with exact counts. megavlm runs with torch's layers,
because Transformer Engine cannot run there. Processor time is that of small models on a CPU, the smallest of several
steps: the time of Python and torch's dispatch, with little arithmetic. `--keep` appends to
`benchmarks/records/host_time.jsonl`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
SIDES = {"megavlm": "bf16", "transformers": "autocast"}
STEPS = 8  # of toys on a CPU
_COLUMNS = ("launches", "MB moved", "Python calls", "CPU µs")
_HEADER = f"{'forward / backward':<44}" + "".join(f"{column:>19}" for column in _COLUMNS)
Found = dict[str, dict[str, Any]]  # of each model: `stretches` by name, and `waits`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="count only models whose name contains this")
    parser.add_argument("--keep", action="store_true", help="append the counts to the records")
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--cpu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        side, file = options.child
        found = timed(side, options.only) if options.cpu else counted(side, options.only, Path(file).parent)
        Path(file).write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # a device that is not there is not left in order
    from record import append, circumstances

    record: dict[str, Any] = {**circumstances(), "sides": {}}
    for side in SIDES:
        found, seconds = child(side, options.only), child(side, options.only, cpu=True)
        record["sides"][side] = {"counted": found, "toy_cpu_seconds": seconds}
        for shape, counts in found.items():
            toy = next(times for name, times in seconds.items() if shape.startswith(name.removesuffix(" toy")))
            print(f"\n{shape}, {side} {SIDES[side]}", *table(counts, toy), sep="\n")
    if options.keep:
        append("host_time", record)


def child(side: str, only: str = "", *, cpu: bool = False, folder: Path = ROOT / ".pytest_cache") -> Found:
    """Count (or with `cpu`, time) both models in a process of its own, which has fake tensors from the start."""
    folder.mkdir(exist_ok=True)
    file = folder / f"host_time-{os.getpid()}.json"
    command = [sys.executable, "-W", "ignore", __file__, "--child", side, str(file), "--only", only]
    environment = {"PYTHONPATH": f"{ROOT}:{HERE}", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *["--cpu"] * cpu], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: Found = json.loads(file.read_text())
    file.unlink()
    return found


def counted(side: str, only: str, folder: Path) -> Found:
    """Return launches, bytes and calls of each layer range on fake tensors, with two language layers."""
    from tests.fake.build import shim

    library = shim(folder)
    if library is None:
        raise SystemExit("no C++ compiler: autograd cannot follow a device that torch was not built for")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from torch.utils._device import _device_constructors

    from tests.fake import count, device, world

    _device_constructors()  # remembered now: `with device:` must know torch's own functions, which are replaced next
    device.pretend(str(library))
    world.pretend()
    count.like_a_cuda_build()
    import gpu_model

    found: Found = {}
    for shape in (shape for of_model in gpu_model.models(small=False) for shape in of_model):
        if only not in shape.name or shape.model.language.linear_attention_layers:  # its kernels need a real GPU
            continue
        world.enter(0, 1)
        mode = count.Counting()
        with mode:
            step = followed(side, cut(shape), "cuda", mode.enter)
            stretches = count.counted(mode, step)
        found[shape.name] = {
            "stretches": {name: stretch.to_json() for name, stretch in stretches.items()},
            "waits": dict(mode.waits),
        }
    return found


def cut(shape: Any) -> Any:
    """The shape with two language layers and three that see, of which the last attends to whole images: one of each
    kind, and a first one, which makes what all of them share.
    """
    vision = shape.model.vision
    full = {"full_attention_layers": (2,)} if vision.window_size else {}
    vision = replace(vision, num_layers=2 - vision.feature_layer, **full)
    return replace(shape, model=replace(shape.model, vision=vision)).with_layers(2)


def timed(side: str, only: str) -> Found:
    """Return the processor seconds of each layer range of small models on a CPU, the smallest of several steps."""
    import gpu_model

    found: Found = {}
    for shape in gpu_model.shapes(small=True):
        if only not in shape.name:
            continue
        spent: dict[str, list[float]] = defaultdict(list)
        clock = _Clock()
        step = followed(side, shape, "cpu", clock.enter)
        for number in range(STEPS + 2):
            clock.begin()
            step()
            clock.enter("end")
            for name, value in clock.spent.items():
                spent[name] += [value] * (number > 1)
        found[shape.name] = {name: min(values) for name, values in spent.items()}
    return found


class _Clock:
    def begin(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.name, self.since = "before", time.thread_time()

    def enter(self, name: str) -> None:
        now = time.thread_time()
        self.spent[self.name] += now - self.since
        self.name, self.since = name, now


def followed(side: str, shape: Any, device: str, enter: Callable[[str], None]) -> Callable[[], Any]:
    """Return a step of `gpu_vlm.py` that calls `enter` where a layer range begins."""
    import gpu_sides
    import layer_ranges
    from gpu_side import Watch

    step: Callable[[], Any]
    watch = Watch(device == "cuda")
    task = {
        **gpu_sides.Side(side, SIDES[side] if device == "cuda" else "fp32").task,
        "micro_batches": 1,
        "weights": None,
    }
    if side == "megavlm":
        from gpu_megavlm import Ours

        ours = Ours(device)
        step = ours.build(shape, task, watch)
        layer_ranges.follow_ours(ours.engine, enter)
        return step
    from gpu_transformers import Theirs

    theirs = Theirs(device)
    step = theirs.build(shape, task, watch)
    layer_ranges.follow_theirs(theirs.model, theirs.optimizer, enter)
    return layer_ranges.their_step_without_values(theirs, shape) if device == "cuda" else step


def table(found: dict[str, Any], toy: dict[str, Any]) -> list[str]:
    """Return one line per kind of layer range: of numbered layers the second, and those whose counts differ from it."""
    lines, seen = [_HEADER], set()
    names = dict.fromkeys(name.removesuffix(" forward").removesuffix(" backward") for name in found["stretches"])
    for name in names:
        sides = [found["stretches"].get(f"{name} {way}") for way in ("forward", "backward")]
        if sides == [None, None]:
            sides = [found["stretches"][name]]
        stem, _, number = name.rpartition(".")
        kind = (stem if number.isdigit() else name, *(side and side["launches"] for side in sides))
        if kind in seen or (number == "0" and f"{stem}.1" in names):
            continue
        seen.add(kind)
        values = [
            [f"{side['launches']}" if side else "–" for side in sides],
            [f"{side['moved_bytes'] / 1e6:,.0f}" if side else "–" for side in sides],
            [f"{side['python_calls']}" if side else "–" for side in sides],
            [f"{1e6 * toy[each]:,.0f}" if each in toy else "–" for each in (f"{name} forward", f"{name} backward")]
            if len(sides) > 1
            else [f"{1e6 * toy[name]:,.0f}" if name in toy else "–"],
        ]
        lines.append(f"{name:<44}" + "".join(f"{' / '.join(pair):>19}" for pair in values))
    launches = sum(stretch["launches"] for stretch in found["stretches"].values())
    waits = sum(found["waits"].values())  # counted inside our engine's step alone
    end = f"in all, with three vision layers and two of language: {launches:,} launches"
    return [*lines, end + f", {waits} waits for the device" * bool(waits)]


if __name__ == "__main__":
    main()
