"""`Hardware`: what a device and its links can do. Profiles of NVIDIA GPUs from published figures, others measured.

Rates are what well-shaped work reaches, not peaks: those, which MFU is measured against, are in `peaks.py`.
`tools/calibrate.py` measures a profile on the machine at hand and writes it as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megavlm.config.messages import did_you_mean, plain
from megavlm.errors import UserError
from megavlm.json_files import FLAG, TEXT, Expected, check, number, read_json, whole
from megavlm.planner.peaks import peak_tflops


@dataclass(frozen=True)
class Rates:
    """A layer's pass takes products / `matmul` + attention / `attention` + bytes / `bandwidth` + calls · `overhead`."""

    matmul: float  # FLOP/s of matrix products
    attention: float  # FLOP/s of attention's two products, causal ones counted half
    bandwidth: float  # bytes/s of what lies between: norms, activations, residuals
    overhead: float  # of a CPU: seconds per call (`terms.calls_of`); a GPU's host is apart (`terms.HostTime`)


@dataclass(frozen=True)
class Link:
    """A transfer of n bytes takes `latency` + n / `bandwidth`."""

    bandwidth: float  # bytes/s per device and direction
    latency: float  # seconds

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Host:
    """What `--offload` takes of a device's host."""

    link: Link  # between pinned memory and the device
    bandwidth: float  # bytes/s of an elementwise pass over host memory, each device's share of a node's
    memory: float  # bytes of a node


@dataclass(frozen=True)
class Hardware:
    name: str
    source: str
    on_gpu: bool
    memory: float  # bytes of a device that tensors may take
    forward: Rates
    backward: Rates
    memory_bandwidth: float  # bytes/s of an optimizer step
    near: Link  # between devices of a node
    far: Link  # between nodes, per device
    devices_per_node: int
    peak: float | None = None  # FLOP/s that MFU is a share of; None: unknown
    host: Host | None = None  # None: unknown, or the host is the device

    @property
    def own_host(self) -> Host:
        """Return the host; where none is known, the device's own memory plays it."""
        return self.host or Host(Link(self.memory_bandwidth / 2, 0.0), self.memory_bandwidth, float("inf"))

    @property
    def data_sheet_bandwidth(self) -> float:
        """Bytes/s of a GPU's memory as its data sheet has it."""
        assert self.on_gpu, "others are measured"
        return self.memory_bandwidth / _MEMORY_SHARE

    def link(self, span: int) -> Link:
        """Return the slowest link of a group whose ranks lie within `span` neighbouring ranks."""
        return self.near if span <= self.devices_per_node else self.far


_GB, _TFLOP = 1e9, 1e12
_USABLE = 0.92  # of a GPU's memory: the rest is CUDA's context, NCCL's buffers and fragmentation
_LINK_SHARE = 0.8  # of a link's data-sheet rate that NCCL's collectives reach
_MEMORY_SHARE = 0.85  # of the memory's data-sheet rate that elementwise kernels reach
_SHAPE_SHARE = 0.82  # of the best square product's rate that products of layers' shapes reach: 650 of 794, estimate
_BUS_SHARE = 0.8  # of a bus's rate that copies of pinned memory reach: assumed, headers and flow control take the rest
_HOST_SHARE = 0.7  # of a processor's memory rate that elementwise passes of all its cores reach: assumed
HOST_USABLE = 0.75  # of a node's memory: the rest is the system, data loaders and the page cache

# GB/s per direction. PCI Express 4.0 and 5.0: 16 lanes of 16 and 32 GT/s, 128 of 130 bits data (PCI-SIG); NVLink-C2C:
# 900 GB/s in both directions together (GH200 data sheet).
_PCIE4, _PCIE5, _C2C = 31.5, 63.0, 450.0


def _gpu(
    name: str,
    *,
    products: float,
    attention: tuple[float, float],
    gigabytes: float,
    memory_rate: float,
    nvlink: float,
    network: float,
    host: tuple[float, float, float],
    devices: int = 8,
    source: str,
) -> Hardware:
    """A profile from TFLOP/s (`products`: of the best square one), gigabytes and GB/s; `nvlink` and `network` are per
    direction. `host`: of a node the link to each of its `devices`, and of all together the memory's rate and gigabytes.
    """
    link, host_rate, host_gigabytes = host
    bandwidth, peak = memory_rate * _GB * _MEMORY_SHARE, peak_tflops(name, "bf16")
    matmul = products * _TFLOP * _SHAPE_SHARE
    return Hardware(
        name=name,
        source=source,
        on_gpu=True,
        memory=gigabytes * _GB * _USABLE,
        forward=Rates(matmul, attention[0] * _TFLOP, bandwidth, 0.0),
        backward=Rates(matmul, attention[1] * _TFLOP, bandwidth, 0.0),
        memory_bandwidth=bandwidth,
        near=Link(nvlink * _GB * _LINK_SHARE, 10e-6),
        far=Link(network * _GB * _LINK_SHARE, 20e-6),
        devices_per_node=devices,
        peak=None if peak is None else peak * _TFLOP,
        host=Host(
            Link(link * _GB * _BUS_SHARE, 10e-6),
            host_rate * _GB * _HOST_SHARE / devices,
            host_gigabytes * _GB * HOST_USABLE,
        ),
    )


# Products: the "maximum achievable matmul FLOPS" of S. Bekman's ML Engineering book for bf16, except H200, which has
# H100's arithmetic. Attention: FlashAttention-2 (Dao 2023) on A100, FlashAttention-3 (Shah et al. 2024) on Hopper, head
# width 128; on B200 an assumption, Hopper's shares of the peak. Memory, links and peaks: NVIDIA's data sheets; network:
# 200 Gbit/s per GPU on DGX A100, 400 on DGX H100, H200 and B200. Hosts are those of the DGX systems, 2 TB each: two
# EPYC 7742 with 8 channels of DDR4-3200; two Xeon 8480C or 8570 with 8 of DDR5, which two modules per channel slow to
# 4400. A bus of its own for each GPU is assumed; where two share a switch's link to the processor, each has half.
PROFILES: dict[str, Hardware] = {
    "a100": _gpu(
        "a100",
        products=271,
        attention=(220, 185),
        gigabytes=80,
        memory_rate=2039,
        nvlink=300,
        network=25,
        host=(_PCIE4, 410, 2048),
        source="A100 80GB SXM data sheet; MAMF 271 TFLOP/s; FlashAttention-2",
    ),
    "h100": _gpu(
        "h100",
        products=794,
        attention=(600, 500),
        gigabytes=80,
        memory_rate=3350,
        nvlink=450,
        network=50,
        host=(_PCIE5, 563, 2048),
        source="H100 SXM data sheet; MAMF 794 TFLOP/s; FlashAttention-3",
    ),
    "h200": _gpu(
        "h200",
        products=794,
        attention=(600, 500),
        gigabytes=141,
        memory_rate=4800,
        nvlink=450,
        network=50,
        host=(_PCIE5, 563, 2048),
        source="H200 SXM data sheet; arithmetic as H100",
    ),
    "b200": _gpu(
        "b200",
        products=1745,
        attention=(1360, 1140),
        gigabytes=180,
        memory_rate=8000,
        nvlink=900,
        network=50,
        host=(_PCIE5, 563, 2048),
        source="HGX B200 data sheet; MAMF 1745 TFLOP/s; attention assumed at Hopper's share of the peak",
    ),
    "gh200": _gpu(
        "gh200",
        products=794,
        attention=(600, 500),
        gigabytes=96,
        memory_rate=4000,
        nvlink=50,
        network=50,
        host=(_C2C, 384, 480),
        devices=1,
        source="GH200 data sheet (96 GB HBM3, 480 GB LPDDR5X, NVLink-C2C); arithmetic as H100; one GPU per node",
    ),
    # One core of a server processor and gloo on one machine: enough to compare layouts, no more. Calibrate yours.
    "cpu": Hardware(
        name="cpu",
        source="an order of magnitude for one core; tools/calibrate.py measures yours",
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


def scaled(hardware: Hardware, *, products: float) -> Hardware:
    """Return the same device with matrix products so many times as fast (FP8: 2), attention as it is."""
    forward, backward = hardware.forward, hardware.backward
    return replace(
        hardware,
        forward=replace(forward, matmul=forward.matmul * products),
        backward=replace(backward, matmul=backward.matmul * products),
    )


def fp8_speed(hardware: Hardware) -> float:
    """Return how many times as fast products are in FP8 as in bf16, by the data sheets' peaks; nothing is measured.

    1 where there are no FP8 units, or none are known of.
    """
    fp8, half = peak_tflops(hardware.name, "fp8"), peak_tflops(hardware.name, "bf16")
    return fp8 / half if hardware.on_gpu and fp8 and half else 1.0


def for_precision(hardware: Hardware, precision: str) -> Hardware:
    """GPU profiles are in bf16: fp32 runs its products on TF32 units at best, half as fast."""
    return scaled(hardware, products=0.5) if hardware.on_gpu and precision == "fp32" else hardware


def profile(name: str) -> Hardware:
    """Return a profile by name (`h100`) or out of a JSON file that `tools/calibrate.py` wrote. Raises UserError."""
    if name.lower() in PROFILES:
        return PROFILES[name.lower()]
    path = Path(name)
    if not path.is_file():
        hint = did_you_mean(name, PROFILES) or f": choose {', '.join(PROFILES)} or a file of tools/calibrate.py"
        raise UserError(f"--gpu/--profile {plain(name)} is neither a known device nor a file{hint}")
    try:
        return from_json(read_json(path, at_most=_LARGEST))
    except (UserError, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise UserError(
            f"--profile {plain(name)} is no hardware profile ({reason}): write one with tools/calibrate.py"
        ) from error


def to_json(hardware: Hardware) -> dict[str, Any]:
    return asdict(hardware)


_LARGEST = 2**20  # bytes of a profile
_RATE, _TIME = number(1e-3, 1e30), number(0, 1e6)
_NUMBERS: dict[str, Expected] = {
    **dict.fromkeys(("memory", "memory_bandwidth", "matmul", "attention", "bandwidth", "peak"), _RATE),
    **dict.fromkeys(("overhead", "latency"), _TIME),
    "devices_per_node": whole(1, 2**31),
    "name": TEXT,
    "source": TEXT,
    "on_gpu": FLAG,
}


def from_json(data: Mapping[str, Any]) -> Hardware:
    """Return the inverse. Raises UserError, ValueError, KeyError or TypeError if a value is missing or out of range."""
    fields: dict[str, Any] = dict(data)
    rates = {side: _part(Rates, fields.pop(side), side) for side in ("forward", "backward")}
    links = {side: _part(Link, fields.pop(side), side) for side in ("near", "far")}
    host = fields.pop("host", None)  # profiles of earlier versions have none
    if host is not None:
        host = _part(Host, {**host, "link": _part(Link, host["link"], "host's link")}, "host")
    hardware: Hardware = _part(Hardware, {**fields, **rates, **links, "host": host}, "the profile")
    return hardware


def _part(made: Any, values: Mapping[str, Any], where: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is no object")
    check(values, _NUMBERS, where)
    if none := [name for name in _NUMBERS if name != "peak" and name in values and values[name] is None]:
        raise ValueError(f"{where} has no {none[0]}")
    return made(**values)
