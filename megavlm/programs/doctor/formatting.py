"""Write facts and problems as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megavlm.planner.devices import peaks_of
from megavlm.programs.doctor.facts import Facts
from megavlm.programs.doctor.problems import Problem

_GIB = 2**30
_SIGNS = {"error": "✗", "warning": "!", "note": "·"}


def as_text(facts: Facts, found: Sequence[Problem]) -> str:
    """Return a table of facts, then each problem with its remedy on the next line."""
    rows = list(_rows(facts))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += ["", "nothing is missing" if not found else "problems"]
    for each in found:
        lines += [f"{_SIGNS[each.level]} {each.level}: {each.what}", f"    {each.remedy}"]
    return "\n".join(lines)


def as_json(facts: Facts, found: Sequence[Problem]) -> str:
    return json.dumps({"facts": asdict(facts), "problems": [asdict(each) for each in found]}, indent=2)


def as_lines(found: Sequence[Problem]) -> list[str]:
    """Return each problem with its remedy in one line."""
    return [f"{_SIGNS[each.level]} {each.level}: {each.what}: {each.remedy}" for each in found]


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "python", ".".join(map(str, facts.python))
    for name, package in facts.packages.items():
        yield name, package.version + ("" if package.error is None else f"  ({package.error})")
    yield from _known({"CUDA of torch": facts.torch_cuda, "cuDNN": facts.cudnn, "NCCL": facts.nccl})
    yield from _known({"driver": facts.driver, "CUDA of the driver": facts.driver_cuda})
    for index, device in enumerate(facts.devices):
        capability = ".".join(map(str, device.capability))
        yield f"GPU {index}", f"{device.name}, {device.memory / _GIB:.0f} GiB, compute capability {capability}"
        peaks = peaks_of(device.name)
        if peaks is not None:
            fp8 = "none" if peaks.fp8 is None else f"{peaks.fp8:.0f}"
            yield "  peaks", f"TF32 {peaks.tf32:.0f}, bf16 {peaks.half:.0f}, FP8 {fp8} TFLOP/s, dense"
    if not facts.devices:
        yield "GPU", "none"
    for rate in facts.rates:
        share = "" if rate.peak is None else f", {rate.measured / rate.peak:.0%} of {rate.peak:.0f}"
        yield rate.what, f"{rate.measured:.3g} {rate.unit}{share}"
    for backend, error in facts.communication.items():
        yield f"{backend} loopback", "works" if error is None else error
    for name, size in {"free disk": facts.disk_free, "/dev/shm": facts.shared_memory}.items():
        if size is not None:
            yield name, f"{size / _GIB:.1f} GiB"


def _known(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in values.items() if value is not None)
