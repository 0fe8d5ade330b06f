"""Measure how fast the first device multiplies and copies, and compare with its data sheet. Takes some seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from megavlm.planner.devices import peak_tflops
from megavlm.planner.hardware import profile_of_device
from megavlm.programs.doctor.facts import Rate

_REPEATS = 10
# Width of the square matrices, and bytes that are copied. On a CPU this only shows that both work.
_GPU_SIZES, _CPU_SIZES = (8192, 2**30), (512, 2**24)


def rates_of(device_name: str, *, on_gpu: bool, index: int = 0) -> tuple[Rate, ...]:
    """Return the rates of a matrix product (bf16 on a GPU, fp32 on a CPU) and of a copy within the device's memory."""
    import torch

    device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
    width, size = _GPU_SIZES if on_gpu else _CPU_SIZES
    precision = "bf16" if on_gpu else "fp32"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    settle: Callable[[], None] = (lambda: torch.cuda.synchronize(device)) if on_gpu else lambda: None
    multiplied = _seconds(lambda: torch.mm(left, right, out=product), settle)
    copied = _seconds(lambda: target.copy_(source), settle)
    return (
        Rate(
            f"matrix product, {precision}",
            2 * width**3 / multiplied / 1e12,
            peak_tflops(device_name, precision),
            "TFLOP/s",
        ),
        Rate("copy, bytes read and written", 2 * size / copied / 1e9, _bandwidth(device_name), "GB/s"),
    )


def _seconds(call: Callable[[], object], settle: Callable[[], None]) -> float:
    """Return the median seconds of single calls, after three that are not counted."""
    times = []
    for _ in range(_REPEATS + 3):
        settle()
        began = time.perf_counter()
        call()
        settle()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def _bandwidth(device_name: str) -> float | None:
    """Return the data sheet's GB/s of a device that the planner knows; else None."""
    known = profile_of_device(device_name)
    return None if known is None else known.data_sheet_bandwidth / 1e9
