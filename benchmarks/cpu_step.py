"""Compare a training step of one VLM in megavlm and in Transformers on one CPU, and megavlm's layouts with one process.

    .venv/bin/python benchmarks/cpu_step.py [--quick] [--steps N]

Steps of both sides alternate, each side in a process of its own, so that other work on the machine slows both. Figures
are medians; ratios are medians of ratios of neighbouring steps. The result is printed and, unless `--quick`,
appended to `benchmarks/records/cpu_step.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import append, circumstances

HERE = Path(__file__).parent
ROOT = HERE.parent
PARTS = ("forward", "backward", "optimizer", "step", "cpu")
Step = dict[str, float]


@dataclass(frozen=True)
class Layout:
    name: str
    processes: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1

    def ideal_bubble(self, micro_batches: int) -> float:
        """Return the idle share of a rank, (p−1)/(v·m+p−1), for stages of equal cost and free transfers."""
        return (self.pp - 1) / (self.vpp * micro_batches + self.pp - 1)


LAYOUTS = (
    Layout("one process", 1),
    Layout("TP2", 2, tp=2),
    Layout("PP2", 2, pp=2),
    Layout("PP2·VPP2", 2, pp=2, vpp=2),
    Layout("DP2", 2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each side")
    parser.add_argument("--layout-steps", type=int, default=2, help="measured steps of each layout and round")
    parser.add_argument("--rounds", type=int, default=2, help="how often all layouts are measured in turn")
    parser.add_argument("--layers", type=int, default=12, help="layers of the vision tower, and of the language model")
    parser.add_argument(
        "--micro-batches", type=int, default=4, help="micro-batches of a step in the comparison of layouts"
    )
    parser.add_argument("--quick", action="store_true", help="two layers, few steps, nothing recorded")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.layers, arguments.steps, arguments.layout_steps, arguments.rounds = 2, 3, 1, 1

    record: dict[str, Any] = {**circumstances(), "arguments": vars(arguments)}
    record["against_transformers"] = compare_sides(layers=arguments.layers, steps=arguments.steps)
    print_sides(record["against_transformers"])
    record["layouts"] = compare_layouts(
        layers=arguments.layers,
        micro_batches=arguments.micro_batches,
        steps=arguments.layout_steps,
        rounds=arguments.rounds,
    )
    print_layouts(record["layouts"])
    if not arguments.quick:
        append("cpu_step", record)


class Worker:
    """A side in its own process, which runs a step on request."""

    def __init__(self, side: str, *, layers: int, threads: int, weights: Path) -> None:
        command = [sys.executable, "-W", "ignore", str(HERE / "cpu_worker.py"), side]
        command += ["--layers", str(layers), "--threads", str(threads), "--weights", str(weights)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(threads)
        )
        self.ready = self._answer()

    def ask(self, question: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended with status {self.process.wait()}")
        return json.loads(line)


def environment(threads: int) -> dict[str, str]:
    """Return the environment of child processes. Waiting threads sleep, so that other work slows both sides alike."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ROOT),
        "TORCH_COMPILE_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def compare_sides(*, layers: int, steps: int) -> dict[str, Any]:
    """Alternate steps from the same weights on the same batch; the losses must agree at every step."""
    threads = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        theirs = Worker("transformers", layers=layers, threads=threads, weights=weights)
        ours = Worker("megavlm", layers=layers, threads=threads, weights=weights)
    assert ours.ready["parameters"] == theirs.ready["parameters"]
    pairs: list[tuple[Step, Step]] = []
    for index in range(steps + 1):
        pair = (ours.ask("step"), theirs.ask("step"))
        assert abs(pair[0]["loss"] - pair[1]["loss"]) < 1e-5 * pair[1]["loss"], "the two sides compute different things"
        if index:  # the first step allocates the optimizer's state
            pairs.append(pair)
    result = {
        "threads": threads,
        "parameters": ours.ready["parameters"],
        "megavlm": summary([a for a, _ in pairs]) | {"peak_mib": ours.ask("memory")},
        "transformers": summary([b for _, b in pairs]) | {"peak_mib": theirs.ask("memory")},
        "throughput_ratio": median_ratio(pairs, "step"),
        "cpu_time_ratio": median_ratio(pairs, "cpu"),
        "interception": ours.ask("interception"),
    }
    result["interception"]["share_of_step"] = result["interception"]["seconds"] / result["megavlm"]["step"]
    ours.close()
    theirs.close()
    return result


def summary(steps: Sequence[Step]) -> dict[str, float]:
    return {part: statistics.median(step[part] for step in steps) for part in PARTS} | {"loss": steps[-1]["loss"]}


def median_ratio(pairs: Sequence[tuple[Step, Step]], part: str) -> float:
    """Return the median of Transformers' value over megavlm's: more than 1 means that megavlm is faster."""
    return statistics.median(theirs[part] / ours[part] for ours, theirs in pairs)


def compare_layouts(*, layers: int, micro_batches: int, steps: int, rounds: int) -> dict[str, Any]:
    """Measure every layout in turn, with one thread per process and the same global batch."""
    measured: dict[str, list[Step]] = {layout.name: [] for layout in LAYOUTS}
    for _ in range(rounds):
        for layout in LAYOUTS:
            measured[layout.name] += run_layout(layout, layers=layers, micro_batches=micro_batches, steps=steps)
    baseline = statistics.median(step["step"] for step in measured["one process"])
    results = {}
    for layout in LAYOUTS:
        step = {
            part: statistics.median(step[part] for step in measured[layout.name])
            for part in ("step", "bubble", "balance", "loss")
        }
        results[layout.name] = step | {
            "speed_up": baseline / step["step"],
            "ideal_bubble": layout.ideal_bubble(micro_batches),
        }
    return results


def run_layout(layout: Layout, *, layers: int, micro_batches: int, steps: int) -> list[Step]:
    """Return for each step the slowest rank's time, the idle share of the schedule, and the balance.

    Balance is the mean computing time of the ranks over the busiest one's; what is missing to 100 % adds to the bubble.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(layout.processes), str(HERE / "cpu_layout.py")]
    options = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "layers": layers, "steps": steps}
    for name, value in (options | {"micro-batches": micro_batches}).items():
        command += [f"--{name}", str(value)]
    ended = subprocess.run(command, env=environment(1), capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{layout.name} failed:\n{ended.stderr}")
    ranks = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("[[")))
    return [
        {
            "step": max(rank["step"] for rank in step),
            "bubble": 1 - sum(rank["busy"] for rank in step) / sum(rank["schedule"] for rank in step),
            "balance": statistics.mean(rank["busy"] for rank in step) / max(rank["busy"] for rank in step),
            "loss": step[0]["loss"],
        }
        for step in zip(*ranks, strict=True)
    ]


def print_sides(result: dict[str, Any]) -> None:
    print(f"\n{result['parameters']:,} parameters, fp32, micro-batch 2 × (256 image + 256 text tokens), ", end="")
    print(f"{result['threads']} threads, medians in seconds\n")
    print(f"{'':<14}" + "".join(f"{part:>11}" for part in PARTS) + f"{'peak MiB':>11}{'loss':>12}")
    for side in ("megavlm", "transformers"):
        row = result[side]
        cells = "".join(f"{row[part]:>11.3f}" for part in PARTS)
        print(f"{side:<14}{cells}{row['peak_mib']:>11.0f}{row['loss']:>12.6f}")
    print(f"\nthroughput, megavlm / Transformers   {result['throughput_ratio']:.3f} by the clock (target ≥ 1.0)")
    print(f"{'':<37}{result['cpu_time_ratio']:.3f} by processor time")
    cost = result["interception"]
    print(
        f"interception of the CPU backend      {cost['share_of_step']:.4%} of a step (target < 3 %): "
        f"{cost['calls']:.0f} calls × {cost['microseconds_per_call']:.1f} µs"
    )


def print_layouts(results: dict[str, Any]) -> None:
    print("\nthe same global batch on one thread per process\n")
    print(f"{'':<14}{'step s':>11}{'speed-up':>11}{'bubble':>11}{'ideal':>11}{'balance':>11}{'loss':>12}")
    for name, row in results.items():
        bubbles = f"{'':>33}"
        if row["ideal_bubble"]:
            bubbles = f"{row['bubble']:>11.1%}{row['ideal_bubble']:>11.1%}{row['balance']:>11.1%}"
        print(f"{name:<14}{row['step']:>11.3f}{row['speed_up']:>11.2f}{bubbles}{row['loss']:>12.6f}")


if __name__ == "__main__":
    main()
