"""Peaks of NVIDIA's data-centre GPUs by precision: the one table that MFU, the planner and the doctor read. Pure data.

Dense tensor-core rates. NVIDIA prints most of them with 2:4 sparsity, which is twice that; the figures here are half of
what is printed, cut to whole TFLOP/s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Precision = Literal["tf32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class Peaks:
    """TFLOP/s of one device; bf16 and fp16 are equal. `words` must all occur in a device's name."""

    words: frozenset[str]
    tf32: float
    half: float
    fp8: float | None  # None: the device has no FP8 units
    source: str

    def of(self, precision: str) -> float | None:
        """None for a precision that the device has not, or that has no single peak (fp32)."""
        return {"tf32": self.tf32, "bf16": self.half, "fp16": self.half, "fp8": self.fp8}.get(precision)


def _row(words: str, tf32: float, half: float, fp8: float | None, source: str) -> Peaks:
    return Peaks(frozenset(words.split()), tf32, half, fp8, source)


_HOPPER_100, _HOPPER_200 = '"NVIDIA H100 Tensor Core GPU" data sheet', '"NVIDIA H200 Tensor Core GPU" data sheet'

# The first row whose words all occur counts, so variants stand above their family.
TABLE: tuple[Peaks, ...] = (
    _row("A100", 156, 312, None, '"NVIDIA A100 Tensor Core GPU" data sheet, PCIe and SXM alike'),
    _row("H100 PCIE", 378, 756, 1513, f"{_HOPPER_100}, PCIe: 756, 1,513 and 3,026 with sparsity"),
    _row("H100 NVL", 417, 835, 1670, f"{_HOPPER_100}, NVL: 835, 1,671 and 3,341 with sparsity"),
    _row("H100", 494, 989, 1979, f"{_HOPPER_100}, SXM: 989, 1,979 and 3,958 with sparsity"),
    _row(
        "GH200", 494, 989, 1979, '"NVIDIA GH200 Grace Hopper Superchip" data sheet: 989, 1,979 and 3,958 with sparsity'
    ),
    _row("H200 NVL", 417, 835, 1670, f"{_HOPPER_200}, NVL: 835, 1,671 and 3,341 with sparsity"),
    _row("H200", 494, 989, 1979, f"{_HOPPER_200}, SXM: 989, 1,979 and 3,958 with sparsity"),
    _row(
        "B200",
        1100,
        2250,
        4500,
        '"NVIDIA Blackwell" data sheet, a GPU of HGX B200: 2.2, 4.5 and 9 PFLOP/s with sparsity',
    ),
    _row("L40S", 183, 366, 733, '"NVIDIA L40S" data sheet: 366, 733 and 1,466 with sparsity'),
)


def peaks_of(device_name: str) -> Peaks | None:
    """Return the row of a device (`torch.cuda.get_device_name()`); None for CPUs, slices of a GPU (MIG) and others."""
    words = frozenset(re.findall(r"[A-Z0-9]+", device_name.upper()))
    return None if "MIG" in words else next((row for row in TABLE if row.words <= words), None)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense peak in TFLOP/s; None where it is unknown.

    fp32 has none: which units it runs on depends on TF32 switches of each library. Ask for tf32 where they are on.
    """
    row = peaks_of(device_name)
    return None if row is None else row.of(precision)
