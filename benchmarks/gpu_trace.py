"""Trace steps of `gpu_vlm.py`, and say which thread worked, what waited, and when the device had nothing to do."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

_STEPS = 2
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
_MOST = 8  # entries of a list


def traced(step: Callable[[], Any], settle: Callable[[], None], file: Path, *, on_gpu: bool) -> dict[str, Any]:
    """Return the threads' processor time in two steps, and the summary of two more whose trace goes to `file`."""
    from torch.profiler import ProfilerActivity, profile

    before, began = _thread_seconds(), time.perf_counter()
    for _ in range(_STEPS):
        step()
    settle()
    took, after = time.perf_counter() - began, _thread_seconds()
    used = Counter({name: round(after[name] - before.get(name, 0.0), 3) for name in after})
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as recorded:
        for _ in range(_STEPS):
            step()
        settle()
    file.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(file))
    with gzip.open(file, "rt") as text:
        summary = summary_of(json.load(text)["traceEvents"])
    return {
        "steps": _STEPS,
        "seconds": took,
        "processor_seconds_of_threads": {name: seconds for name, seconds in used.most_common(_MOST) if seconds},
        "traced": summary,
    }


def _thread_seconds() -> dict[str, float]:
    """Return the processor time of each thread by its name and number; threads of libraries have the process's name."""
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name, fields = (task / "comm").read_text().strip(), (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        ticks = int(fields[11]) + int(fields[12])  # user and system
        found[f"{known.get(int(task.name), name)} {task.name}"] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def summary_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return milliseconds of a trace: by thread of the host, on the device, and in the device's longest pauses."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    device = _merged((e["ts"], e["ts"] + e["dur"]) for e in whole if e.get("cat") in _ON_DEVICE)
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in whole:
        if event.get("cat") in _ON_HOST:
            threads[event["tid"]].append(event)
    pauses = sorted(((end - begin, begin, end) for (_, begin), (end, _) in pairwise(device)), reverse=True)
    return {
        "device_busy_ms": _ms(sum(end - begin for begin, end in device)),
        "device_span_ms": _ms(device[-1][1] - device[0][0]) if device else 0.0,
        "threads": {str(thread): _thread(own) for thread, own in threads.items()},
        "longest_pauses_of_the_device": [
            {"ms": _ms(length), "at_ms": _ms(begin - device[0][0]), "host": _at((begin + end) / 2, threads)}
            for length, begin, end in pauses[:_MOST]
        ],
    }


def _thread(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how long a thread was in operators and calls of CUDA, and in which of them longest."""
    named: Counter[str] = Counter()
    for event in events:
        named[event["name"]] += event["dur"]
    waits = Counter({name: took for name, took in named.items() if "Synchronize" in name or "Alloc" in name})
    spans = _merged((event["ts"], event["ts"] + event["dur"]) for event in events)
    return {
        "busy_ms": _ms(sum(end - begin for begin, end in spans)),
        "calls": len(events),
        "longest_ms": {name: _ms(took) for name, took in named.most_common(_MOST)},
        "waits_ms": {name: _ms(took) for name, took in waits.most_common(_MOST)},
    }


def _at(moment: float, threads: dict[Any, list[dict[str, Any]]]) -> dict[str, str]:
    """Return the innermost call of each thread at a moment."""
    found = {}
    for thread, events in threads.items():
        around = [event for event in events if event["ts"] <= moment <= event["ts"] + event["dur"]]
        if around:
            found[str(thread)] = min(around, key=lambda event: float(event["dur"]))["name"]
    return found


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of spans."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _ms(microseconds: float) -> float:
    return round(microseconds / 1e3, 3)
