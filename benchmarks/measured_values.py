"""Read the figures of docs/reports/measured.md from records of benchmarks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from megavlm.planner.hardware import peak_tflops

Value = Callable[[dict[str, Any]], float | None]
FROZEN = "PP2, frozen encoder, two micro-batches"


def at(*path: str) -> Value:
    """Return a function that follows `path` into a record; an entry of a list is found by its `question`."""

    def value(record: dict[str, Any]) -> float | None:
        found: Any = record
        for key in path:
            if isinstance(found, list):
                found = next((entry for entry in found if entry["question"] == key), {})
            else:
                found = found.get(key, {})
        return found if found != {} else None

    return value


def vision_time_saved(record: dict[str, Any]) -> float | None:
    """Return the share of the encoder's processor time that the cache saves."""
    before, after = (at("results", FROZEN, side, "vision")(record) for side in ("colocated", "cache, later epochs"))
    return None if before is None or after is None else 1 - after / before


def errors(record: dict[str, Any]) -> list[float]:
    """Return the relative errors of the planner's step times."""
    return [abs(each["predicted"] / each["measured"] - 1) for each in record["seconds"].values()]


def kept_throughput(record: dict[str, Any]) -> float | None:
    """Return the iterations per second of a run with faults over those of one without."""
    run = record.get("run")
    return run and run["iterations_per_second"] / run["undisturbed_iterations_per_second"]


def images(side: str) -> Value:
    return lambda record: statistics.median(each["jpeg"][f"{side}_ratio"] for each in record["results"])


def clips(scope: str) -> Value:
    return lambda record: statistics.median(each[scope]["ratio"] for each in record["results"])


def grown(name: str, ranks: int) -> Value:
    """Return a function that reads a quantity of `benchmarks/scale.py` at a number of ranks."""
    return lambda record: record["rows"][name]["at"][str(ranks)]


def started(*, cold: bool) -> Value:
    """Return a function that reads the seconds of a start of the demo's two processes."""
    return lambda record: record["seconds"]["whole"] if (record["world"], record["cold"]) == (2, cold) else None


def of_1024(record: dict[str, Any]) -> float | None:
    return record["processor_seconds"] if record["gpus"] == 1024 else None


def loss_time(share: str) -> Value:
    """Return a function that reads the time with this share of trained tokens over that of all logits at once."""
    return lambda record: record["seconds"][f"chunked, {share} trained"] / record["seconds"]["whole"]


def with_processes(processes: int, key: str) -> Value:
    return lambda record: record.get(key) if record["processes"] == processes else None


def context(tokens: int, cp: int, key: str) -> Value:
    """Return a function that reads a rank's memory ("bytes") or time ("seconds") under `cp`, over one process's."""

    def value(record: dict[str, Any]) -> float | None:
        found = record.get(str(tokens))
        return found and found[str(cp)][key] / found["1"][key]

    return value


def gpu(
    shape: str, side: str, figure: Callable[[dict[str, Any], float], float | None], micro_batches: int = 1
) -> Value:
    """Return a function that reads a figure of one side of `gpu_vlm.py`, from its result and its median step time."""

    def value(record: dict[str, Any]) -> float | None:
        device = record["machine"]["device"]
        alike = (shape, micro_batches)
        same = [each for each in record["results"] if (each["shape"], each.get("micro_batches", 1)) == alike]
        found = next(({**each, "device": device} for each in same if not each.get("ablation")), None)
        seconds = None if found is None else _median(found, side, "step_seconds")
        return None if found is None or seconds is None else figure(found, seconds)

    return value


def against(theirs: str) -> Callable[[dict[str, Any], float], float | None]:
    """Return a function of a result and a side's step time: how many times as fast it is as another side."""

    def gain(found: dict[str, Any], seconds: float) -> float | None:
        other = _median(found, theirs, "step_seconds")
        return None if other is None else other / seconds

    return gain


def step_time(found: dict[str, Any], seconds: float) -> float:
    """Return the seconds of a step."""
    return seconds


def step_rate(found: dict[str, Any], seconds: float) -> float:
    """Return the TFLOP/s of a whole step."""
    return float(found["step_flops"] / seconds / 1e12)


def step_share(precision: str) -> Callable[[dict[str, Any], float], float | None]:
    """Return a function of a result and a side's step time: the share of the peak that a whole step reaches."""

    def share(found: dict[str, Any], seconds: float) -> float | None:
        peak = peak_tflops(found["device"], precision)
        return None if peak is None else step_rate(found, seconds) / peak

    return share


def language_rate(side: str) -> Callable[[dict[str, Any], float], float | None]:
    """Return a function of a result: the TFLOP/s of a side's language part."""
    return lambda found, _: found["language_flops"] / (_median(found, side, "language_seconds") or math.inf) / 1e12


def memory_predicted(side: str) -> Callable[[dict[str, Any], float], float | None]:
    """Return a function of a result: the planner's peak memory over that of a side."""

    def share(found: dict[str, Any], _: float) -> float:
        measured = max(answer.get("peak_bytes", 0) for answer in found["answers"][side])
        return found["predicted_bytes"][side] / measured

    return share


def _median(found: dict[str, Any], side: str, key: str) -> float | None:
    values = [value for answer in found["answers"].get(side, []) for value in answer.get(key, [])]
    return statistics.median(values) if values else None


def experts(case: str, base: str, key: str) -> Value:
    """Return a function that reads a figure of one case of `experts.py` over that of another."""
    return lambda record: record[case][key] / record[base][key]
