"""Facts about a machine as plain data, so that tests can describe machines that they do not run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Package:
    """An installed package. `error` says why it cannot be imported; None if it can or was not tried."""

    version: str
    error: str | None = None


@dataclass(frozen=True)
class GPU:
    """A GPU that torch sees; memory in bytes."""

    name: str
    memory: int
    used: int  # by all processes, before the doctor allocates any
    capability: tuple[int, int]


@dataclass(frozen=True)
class Rate:
    """A measured rate and that of the data sheet; None if the data sheet is not known."""

    what: str
    measured: float
    peak: float | None
    unit: str


@dataclass(frozen=True)
class Facts:
    """All facts; None where something is missing or could not be found out."""

    python: tuple[int, int, int]
    packages: Mapping[str, Package]  # by the name that pip uses; only installed ones
    torch_cuda: str | None = None  # CUDA that torch was built for; None: a CPU build
    cudnn: str | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None  # newest CUDA that the driver runs
    driver_devices: int = 0  # GPUs that the driver lists
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    max_connections: str | None = None  # CUDA_DEVICE_MAX_CONNECTIONS
    devices: tuple[GPU, ...] = ()
    apex_is_nvidias: bool = True
    apex_adds_gradients: bool = True  # it was built with its CUDA extensions
    disk_free: int | None = None  # bytes where runs are written
    shared_memory: int | None = None  # bytes of /dev/shm
    communication: Mapping[str, str | None] = field(default_factory=dict)  # backend → its error
    rates: tuple[Rate, ...] = ()
