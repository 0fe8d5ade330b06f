"""`Hardware`: rates and memory of a device and its links. Profiles of NVIDIA GPUs use published figures.

Rates are those that well-shaped work reaches. Peaks, by which MFU is computed, data sheets and prices of the clouds'
machines are in `devices.toml`. `megavlm calibrate` measures a profile of the local machine and writes it as JSON.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megavlm.config.messages import did_you_mean, plain
from megavlm.config.option import Count, NotNegative, Positive
from megavlm.errors import UserError
from megavlm.json_files import read_json
from megavlm.program import output_of, program
from megavlm.rules.fields import record_of


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


@dataclass(frozen=True)
class Rates:
    """Rates of a device for one direction. A layer's pass takes products / `matmul` + attention / `attention` + bytes /
    `bandwidth` + calls · `overhead` seconds.
    """

    matmul: Positive  # FLOP/s of matrix products
    attention: Positive  # FLOP/s of attention's two products, causal ones counted half
    bandwidth: Positive  # bytes/s of operations between products: norms, activations, residuals
    overhead: NotNegative  # of a CPU: seconds per call (`LayerKind.calls`); launches on a GPU are in `terms.HostTime`


@dataclass(frozen=True)
class Link:
    """A link between devices. A transfer of n bytes takes `latency` + n / `bandwidth` seconds."""

    bandwidth: Positive  # bytes/s per device and direction
    latency: NotNegative  # seconds

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Host:
    """Rates and memory of a device's host, for `--offload`."""

    link: Link  # between pinned memory and the device
    bandwidth: Positive  # bytes/s of an elementwise pass over host memory, each device's share of a node's
    memory: Positive  # bytes of a node
    disk: Positive = 3e9  # bytes/s read, and as many written, of a local disk, each device's share: assumed


@dataclass(frozen=True)
class Hardware:
    name: str
    source: str
    on_gpu: bool
    memory: Positive  # bytes of a device that tensors may take
    forward: Rates
    backward: Rates
    memory_bandwidth: Positive  # bytes/s of an optimizer step
    near: Link  # between devices of a node
    far: Link  # between nodes, per device
    devices_per_node: Count
    peak: Positive | None = None  # peak FLOP/s, for MFU; None: unknown
    host: Host | None = None  # None: unknown, or the host is the device
    row_tile: Positive | None = None  # rows that a grouped product computes together; None: `rows_together` says

    @property
    def rows_together(self) -> float:
        """Return the rows of a grouped product's tile: `row_tile`, else the usual one of a GPU's tensor cores, or 1."""
        return self.row_tile or (_ROW_TILE if self.on_gpu else 1.0)

    @property
    def own_host(self) -> Host:
        """Return the host; if it is unknown, a host with the device's own memory bandwidth and no memory limit."""
        return self.host or Host(Link(self.memory_bandwidth / 2, 0.0), self.memory_bandwidth, float("inf"))

    @property
    def data_sheet_bandwidth(self) -> float:
        """Return the bytes/s of a GPU's memory by its data sheet."""
        assert self.on_gpu, "others are measured"
        return self.memory_bandwidth / _MEMORY_SHARE

    def link(self, span: int) -> Link:
        """Return the slowest link of a group that spans `span` consecutive ranks."""
        return self.near if span <= self.devices_per_node else self.far


_GB, _TFLOP = 1e9, 1e12
_USABLE = 0.92  # of a GPU's memory: the rest is fragmentation, workspaces, and CONTEXT and WORLD: assumed in all
# Measured on an H200 with NCCL (`benchmarks/gpu_memory.py`): bytes of a process, and of the world's communicator.
CONTEXT, WORLD = 0.54 * 2**30, 0.49 * 2**30
_LINK_SHARE = 0.8  # of a link's data-sheet rate that NCCL's collectives reach
_MEMORY_SHARE = 0.85  # of the memory's data-sheet rate that elementwise kernels reach
_SHAPE_SHARE = 0.82  # of the best square product's rate that products of layers' shapes reach: 650 of 794, estimate
_BUS_SHARE = 0.8  # of a bus's rate that copies of pinned memory reach: assumed, headers and flow control take the rest
_HOST_SHARE = 0.7  # of a processor's memory rate that elementwise passes of all its cores reach: assumed
_LARGEST = 2**20  # bytes of a profile's file
_ROW_TILE = 128.0  # of CUTLASS's and cuBLAS's usual tiles for bf16
HOST_USABLE = 0.75  # of a node's memory: the rest is the system, data loaders and the page cache


def _gpu(name: str, sheet: DataSheet) -> Hardware:
    """Return the profile of a GPU whose data sheet is known."""
    link, host_rate, host_gigabytes = sheet.host
    bandwidth, peak = sheet.memory_rate * _GB * _MEMORY_SHARE, peak_tflops(name, "bf16")
    matmul = sheet.products * _TFLOP * _SHAPE_SHARE
    return Hardware(
        name=name,
        source=sheet.source,
        on_gpu=True,
        memory=sheet.gigabytes * _GB * _USABLE + CONTEXT + WORLD,  # which `memory.communicator_bytes` counts
        forward=Rates(matmul, sheet.attention[0] * _TFLOP, bandwidth, 0.0),
        backward=Rates(matmul, sheet.attention[1] * _TFLOP, bandwidth, 0.0),
        memory_bandwidth=bandwidth,
        near=Link(sheet.nvlink * _GB * _LINK_SHARE, 10e-6),
        far=Link(sheet.network * _GB * _LINK_SHARE, 20e-6),
        devices_per_node=sheet.devices,
        peak=None if peak is None else peak * _TFLOP,
        host=Host(
            Link(link * _GB * _BUS_SHARE, 10e-6),
            host_rate * _GB * _HOST_SHARE / sheet.devices,
            host_gigabytes * _GB * HOST_USABLE,
        ),
    )


PROFILES: dict[str, Hardware] = {
    **{name: _gpu(name, sheet) for name, sheet in SHEETS.items()},
    # One core of a server processor and gloo on one machine: enough to compare layouts, no more. Calibrate yours.
    "cpu": Hardware(
        name="cpu",
        source="an order of magnitude for one core; `megavlm calibrate` measures yours",
        on_gpu=False,
        memory=8e9,
        forward=Rates(6e10, 4e10, 4e9, 1e-4),
        backward=Rates(6e10, 4e10, 4e9, 1e-4),
        memory_bandwidth=5e9,
        near=Link(1e9, 3e-4),
        far=Link(1e9, 3e-4),
        devices_per_node=1 << 20,
    ),
}


def fp8_speed(hardware: Hardware) -> float:
    """Return the ratio of FP8 to bf16 peaks by the data sheet, not measured; 1 without known FP8 units."""
    fp8, half = peak_tflops(hardware.name, "fp8"), peak_tflops(hardware.name, "bf16")
    return fp8 / half if hardware.on_gpu and fp8 and half else 1.0


def for_precision(hardware: Hardware, precision: str) -> Hardware:
    """Return the hardware with the rates of a precision. GPU profiles are for bf16: fp32 products are assumed to run on
    TF32 units, half as fast.
    """
    if not hardware.on_gpu or precision != "fp32":
        return hardware
    sides = {side: getattr(hardware, side) for side in ("forward", "backward")}
    return replace(hardware, **{side: replace(rates, matmul=rates.matmul / 2) for side, rates in sides.items()})


def of_machine(machine: Machine) -> Hardware:
    """Return the profile of a cloud's machine type: its GPU's profile with the machine's network, GPUs and memory."""
    base = PROFILES[machine.gpu]
    network = machine.network_gbit / 8 * _GB / machine.gpus * _LINK_SHARE
    host = base.host and replace(base.host, memory=machine.memory_gb * _GB * HOST_USABLE)
    return replace(
        base,
        source=f"{base.source}; {machine.name}: {machine.source}",
        far=replace(base.far, bandwidth=network),
        devices_per_node=machine.gpus,
        host=host,
    )


def profile_of_device(device_name: str) -> Hardware | None:
    """Return the built-in profile that matches most words of a device's name (`NVIDIA A100-SXM4-40GB`), or None."""
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    fitting = [name for name, hardware in PROFILES.items() if hardware.on_gpu and set(name.split("-")) <= words]
    if not fitting or "mig" in words:
        return None
    return PROFILES[max(fitting, key=lambda name: len(name.split("-")))]


@cache
def device_here() -> str | None:
    """Return the name of this machine's first NVIDIA GPU, without starting CUDA; None if there is none to be seen."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    return (output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").partition("\n")[0] or None


def profile(name: str) -> Hardware:
    """Return the profile of a GPU (`h100`), of a cloud's machine type (`a3-megagpu-8g`), or from a JSON file that
    `megavlm calibrate` wrote. Raise UserError if there is none.
    """
    if name.lower() in PROFILES:
        return PROFILES[name.lower()]
    if (machine := find_machine(name)) is not None:
        return of_machine(machine)
    path = Path(name)
    if not path.is_file():
        hint = (
            did_you_mean(name, [*PROFILES, *MACHINES])
            or f": choose {', '.join(PROFILES)} or a file of {program('calibrate')}"
        )
        raise UserError(f"--gpu/--profile {plain(name)} is neither a known device nor a file{hint}")
    try:
        return record_of(Hardware, read_json(path, at_most=_LARGEST), name="its")
    except (UserError, TypeError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise UserError(
            f"--profile {plain(name)} is no hardware profile ({reason}): write one with {program('calibrate')}"
        ) from error
