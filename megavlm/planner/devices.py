"""Published facts of GPUs and of the clouds' machines: peaks, data sheets, prices, read from `devices.toml`."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Precision = Literal["tf32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class Peaks:
    """Peak TFLOP/s of one device type; bf16 and fp16 are equal. A device's name must contain all `words`."""

    words: str
    tf32: float
    half: float
    source: str
    fp8: float | None = None  # None: the device has no FP8 units

    def of(self, precision: str) -> float | None:
        """Return the peak of a precision; None if the device lacks it, or if it has no single peak (fp32)."""
        return {"tf32": self.tf32, "bf16": self.half, "fp16": self.half, "fp8": self.fp8}.get(precision)


@dataclass(frozen=True)
class DataSheet:
    """Rates and sizes of a GPU in TFLOP/s, gigabytes and GB/s. `products` is the rate of the best square matrix
    product; `nvlink` and `network` are per direction.
    """

    products: float
    attention: tuple[float, float]  # forward and backward pass
    gigabytes: float
    memory_rate: float
    nvlink: float  # between devices of a node: PCI Express where there is no NVLink
    network: float
    host: tuple[float, float, float]  # of a node the link to each device, and of all together memory rate and gigabytes
    source: str
    devices: int = 8  # of a node


@dataclass(frozen=True)
class Machine:
    """A machine type of a cloud. Prices are dollars per hour; None: not sold on such terms, or unknown."""

    name: str
    gpu: str  # a profile of `hardware.PROFILES`
    gpus: int
    network_gbit: float  # per direction, of all GPUs of a machine
    memory_gb: float  # of the host
    source: str
    on_demand: float | None = None
    spot: float | None = None
    priced: str = "no price is known"  # where, when and by whom the prices were stated


_FACTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
PEAKS = tuple(Peaks(**row) for row in _FACTS["peaks"])
SHEETS = {name: DataSheet(**row) for name, row in _FACTS["gpus"].items()}
MACHINES = {name: Machine(name, **row) for name, row in _FACTS["machines"].items()}


def peaks_of(device_name: str) -> Peaks | None:
    """Return the peaks of a GPU by `torch.cuda.get_device_name()`; None for CPUs, MIG slices and unknown devices."""
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    return None if "MIG" in words else next((row for row in PEAKS if words.issuperset(row.words.split())), None)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return a device's dense peak in TFLOP/s for a precision; None if it is unknown.

    fp32 has none: which units it runs on depends on TF32 switches of each library. Ask for tf32 where they are on.
    """
    row = peaks_of(device_name)
    return None if row is None else row.of(precision)


def find_machine(name: str) -> Machine | None:
    """Return the machine type of this name, in any case, with or without Azure's `Standard_`; None if unknown."""
    wanted = name.lower().removeprefix("standard_")
    return next((machine for machine in MACHINES.values() if machine.name.lower() == wanted), None)
