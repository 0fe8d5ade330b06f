"""Collect what must be alike on all nodes of a run, in comparable words: versions, GPUs, adapters, settings."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megavlm.programs.doctor.collect import said

PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy", "transformers")
# Variables that change how ranks talk, beside all of NCCL's.
_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "FI_PROVIDER",
    "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
)


def facts_of_node(
    package: Path, *, environment: Mapping[str, str] | None = None, sys_dir: Path = Path("/sys")
) -> dict[str, str]:
    """Return the facts of this machine by name. `package` is the folder of the code that is to run."""
    import torch

    environment = os.environ if environment is None else environment
    facts = {"python": ".".join(map(str, sys.version_info[:3])), "Linux": platform.release()}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    facts["code"] = code_of(package)
    facts["CUDA of torch"] = str(torch.version.cuda)
    if torch.cuda.is_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    facts["driver"] = "none" if not driver else driver.splitlines()[0].strip()
    facts["GPUs"] = counted(_gpus())
    facts["adapters"] = counted(adapters(sys_dir))
    for name, value in environment.items():
        if name.startswith("NCCL_") or name in _VARIABLES:
            facts[f"${name}"] = value
    return facts


def code_of(package: Path) -> str:
    """Return a checksum of the Python sources of a folder, which are to be the same everywhere."""
    found = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        found.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def counted(things: Iterator[str]) -> str:
    """Return `8 × NVIDIA H200, 1 × …`, in an order that does not depend on that of the machine; `none` without any."""
    return ", ".join(f"{number} × {thing}" for thing, number in sorted(Counter(things).items())) or "none"


def _gpus() -> Iterator[str]:
    import torch

    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"{device.name} ({device.total_memory / 2**30:.0f} GiB)"


def adapters(sys_dir: Path) -> Iterator[str]:
    """Yield each port of an RDMA adapter and each network card, with speed and state, as Linux tells them in /sys."""
    for port in sorted(sys_dir.glob("class/infiniband/*/ports/*")):
        kind = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}.get(_read(port / "link_layer"), "RDMA")
        state = _read(port / "state").partition(": ")[2] or "unknown state"
        yield f"{kind} {_read(port / 'rate') or 'unknown rate'} {state}"
    for card in sorted(sys_dir.glob("class/net/*")):
        if not (card / "device").exists():  # loopback, bridges, containers' ends
            continue
        speed = _read(card / "speed")
        rate = f"{int(speed) / 1000:g} Gb/s" if speed.isdecimal() else "unknown rate"
        yield f"Ethernet {rate} {_read(card / 'operstate') or 'unknown state'}, MTU {_read(card / 'mtu')}"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the speed of a card that is down cannot be read
        return ""
