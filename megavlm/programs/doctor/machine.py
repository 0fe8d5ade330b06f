"""Collect facts about this machine as plain data.

Imports and collectives may crash or hang, and so run in other processes.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megavlm.planner.hardware import peak_tflops, profile_of_device
from megavlm.program import output_of

# Optional packages that are not in pyproject.toml.
OTHERS = ("apex", "flash-attn", "triton")
_IMPORTED = {
    "torch": "torch",
    "transformer-engine": "torch, transformer_engine.pytorch",
    "megatron-core": "megatron.core",
}
_LOOPBACK = """
import os, sys, torch, torch.distributed as dist
backend, file = sys.argv[1:]
device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
dist.init_process_group(backend, init_method="file://" + file, rank=0, world_size=1)
values = torch.ones(1 << 20, device=device)
dist.all_reduce(values)
assert float(values.sum()) == 1 << 20
os._exit(0)  # gloo's threads now and then abort the interpreter's teardown
"""
_REPEATS = 10
# Width of the square matrices, and bytes to copy. The CPU sizes only show that both operations work.
_GPU_SIZES, _CPU_SIZES = (8192, 2**30), (512, 2**24)


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
    """A measured rate, and the peak of the data sheet; None if no data sheet is known."""

    what: str
    measured: float
    peak: float | None
    unit: str


@dataclass(frozen=True)
class Facts:
    """All facts about a machine; None for a fact that is missing or could not be determined."""

    python: tuple[int, int, int]
    packages: Mapping[str, Package]  # by the name that pip uses; only installed ones
    torch_cuda: str | None = None  # CUDA that torch was built for; None: a CPU build
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None  # newest CUDA that the driver runs
    driver_devices: int = 0  # GPUs that the driver lists
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    max_connections: str | None = None  # CUDA_DEVICE_MAX_CONNECTIONS
    devices: tuple[GPU, ...] = ()
    apex_is_nvidias: bool = True
    disk_free: int | None = None  # bytes where runs are written
    shared_memory: int | None = None  # bytes of /dev/shm
    communication: Mapping[str, str | None] = field(default_factory=dict)  # backend → its error
    rates: tuple[Rate, ...] = ()


def collect(names: Iterable[str], *, folder: Path, timeout: float, measure: bool = True) -> Facts:
    """Return the facts about this machine; `names` are packages to look for, `folder` is where runs would be written.

    `timeout` is in seconds, for each import and each collective. With `measure`, rates are measured for some seconds.
    """
    known = [*names, *OTHERS]
    with ThreadPoolExecutor() as threads:  # imports take seconds each, in processes of their own
        apex = threads.submit(_error_of, "import apex.multi_tensor_apply", timeout=timeout)
        packages = dict(zip(known, threads.map(partial(_package, timeout=timeout), known), strict=True))
    drivers = (output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split()
    newest = re.search(r"CUDA Version:\s*([\d.]+)", output_of("nvidia-smi") or "")
    facts = Facts(
        python=sys.version_info[:3],
        packages={name: package for name, package in packages.items() if package is not None},
        driver=drivers[0] if drivers else None,
        driver_devices=len(drivers),
        driver_cuda=newest[1] if newest else None,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        apex_is_nvidias=apex.result() is None,
        disk_free=shutil.disk_usage(folder).free,
        shared_memory=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None,
    )
    torch_there = facts.packages.get("torch")
    if torch_there is None or torch_there.error is not None:
        return facts
    return _with_torch(facts, measure=measure, timeout=timeout)


def _package(name: str, *, timeout: float) -> Package | None:
    try:
        found = version(name)
    except PackageNotFoundError:
        return None
    return Package(found, _error_of(f"import {_IMPORTED[name]}", timeout=timeout) if name in _IMPORTED else None)


def _error_of(program: str, *arguments: str, timeout: float) -> str | None:
    """Run a Python program in a new process; return the last line of its stderr, None if it succeeds."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1][:200] if lines else f"ended with status {done.returncode}"


def gpus_here() -> list[str]:
    """Return the GPUs that this program may use, in the form of CUDA_VISIBLE_DEVICES; empty without GPUs."""
    listed = output_of("nvidia-smi", "--list-gpus") or ""
    every = [str(number) for number, line in enumerate(listed.splitlines()) if line.startswith("GPU")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return every if visible is None or not every else [each for each in visible.split(",") if each]


def _with_torch(facts: Facts, *, measure: bool, timeout: float) -> Facts:
    import torch

    there = torch.cuda.is_available()
    found = []
    for index in range(torch.cuda.device_count() if there else 0):
        free, total = torch.cuda.mem_get_info(index)
        device = torch.cuda.get_device_properties(index)
        found.append(GPU(device.name, device.total_memory, total - free, (device.major, device.minor)))
    backends = ("nccl", "gloo") if there else ("gloo",)
    return replace(
        facts,
        torch_cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if there else None,
        devices=tuple(found),
        communication={backend: _loopback(backend, timeout=timeout) for backend in backends},
        rates=rates_of(found[0].name if found else "CPU", on_gpu=there) if measure else (),
    )


def _loopback(backend: str, *, timeout: float) -> str | None:
    """Return the error of an all-reduce with one process; None if it works."""
    with tempfile.TemporaryDirectory() as folder:
        return _error_of(_LOOPBACK, backend, f"{folder}/store", timeout=timeout)


def rates_of(device_name: str, *, on_gpu: bool, index: int = 0) -> tuple[Rate, ...]:
    """Measure a matrix product (TFLOP/s; bf16 on a GPU, fp32 on a CPU) and a copy within device memory (GB/s)."""
    import torch

    device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
    width, size = _GPU_SIZES if on_gpu else _CPU_SIZES
    precision, dtype = ("bf16", torch.bfloat16) if on_gpu else ("fp32", torch.float32)
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiplied = statistics.median(times_of(lambda: torch.mm(left, right, out=product), device))
    copied = statistics.median(times_of(lambda: target.copy_(source), device))
    known = profile_of_device(device_name)
    peak, bandwidth = peak_tflops(device_name, precision), None if known is None else known.data_sheet_bandwidth / 1e9
    return (
        Rate(f"matrix product, {precision}", 2 * width**3 / multiplied / 1e12, peak, "TFLOP/s"),
        Rate("copy, bytes read and written", 2 * size / copied / 1e9, bandwidth, "GB/s"),
    )


def times_of(call: Callable[[], object], device: Any) -> list[float]:
    """Return the seconds of each of ten calls on a torch device, after three warm-up calls."""
    import torch

    times = []
    for _ in range(_REPEATS + 3):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return times[3:]
