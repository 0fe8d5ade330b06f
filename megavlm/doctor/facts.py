"""What is known of a machine: plain data, so that findings can be judged on machines that are not at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Package:
    """An installed package. `error` is why it cannot be imported, where that was tried."""

    version: str
    error: str | None = None


@dataclass(frozen=True)
class Device:
    """A GPU that torch sees; bytes."""

    name: str
    memory: int
    used: int  # by anybody, before the doctor takes any
    capability: tuple[int, int]


@dataclass(frozen=True)
class Rate:
    """What was measured beside what the data sheet says; None where that is not known."""

    what: str
    measured: float
    peak: float | None
    unit: str


@dataclass(frozen=True)
class Facts:
    python: tuple[int, int, int]
    packages: Mapping[str, Package]  # by the name that pip knows; what is not installed is left out
    torch_cuda: str | None = None  # CUDA that torch was built for; None: a CPU build
    cudnn: str | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None  # newest CUDA that the driver runs
    driver_devices: int = 0  # GPUs that the driver lists
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    max_connections: str | None = None  # CUDA_DEVICE_MAX_CONNECTIONS
    devices: tuple[Device, ...] = ()
    apex_is_nvidias: bool = True
    apex_adds_gradients: bool = True  # it was built with its CUDA extensions
    disk_free: int | None = None  # bytes where runs are written
    shared_memory: int | None = None  # bytes of /dev/shm
    communication: Mapping[str, str | None] = field(default_factory=dict)  # backend → what is wrong with it
    rates: tuple[Rate, ...] = ()
