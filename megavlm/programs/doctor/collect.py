"""Collect facts about this machine. Imports and collectives, which may crash or hang, run in other processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megavlm.programs.doctor.device_rates import rates_of
from megavlm.programs.doctor.facts import GPU, Facts, Package

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


def collect(names: Iterable[str], *, folder: Path, timeout: float, measure: bool = True) -> Facts:
    """Return the facts about this machine; `names` are packages to look for, `folder` is where runs would be written.

    `timeout` is in seconds, for each import and each collective. `measure` takes some seconds.
    """
    known = [*names, *OTHERS]
    with ThreadPoolExecutor() as threads:  # imports take seconds each, in processes of their own
        apex = threads.submit(_answer, "import apex.multi_tensor_apply", timeout=timeout)
        kernel = threads.submit(_answer, "import torch, fused_weight_gradient_mlp_cuda", timeout=timeout)
        packages = dict(zip(known, threads.map(partial(_package, timeout=timeout), known), strict=True))
    facts = Facts(
        python=sys.version_info[:3],
        packages={name: package for name, package in packages.items() if package is not None},
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        apex_is_nvidias=apex.result() is None,
        apex_adds_gradients=kernel.result() is None,
        disk_free=shutil.disk_usage(folder).free,
        shared_memory=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None,
    )
    facts = _with_driver(facts)
    torch_there = facts.packages.get("torch")
    if torch_there is None or torch_there.error is not None:
        return facts
    return _with_torch(facts, measure=measure, timeout=timeout)


def _package(name: str, *, timeout: float) -> Package | None:
    try:
        found = version(name)
    except PackageNotFoundError:
        return None
    return Package(found, _answer(f"import {_IMPORTED[name]}", timeout=timeout) if name in _IMPORTED else None)


def _answer(program: str, *arguments: str, timeout: float) -> str | None:
    """Return the last line of a Python program's errors; None if it succeeds."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1][:200] if lines else f"ended with status {done.returncode}"


def _with_driver(facts: Facts) -> Facts:
    """Return the facts with the driver and GPUs that nvidia-smi reports, if it is installed."""
    listed = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if listed is None:
        return facts
    drivers = [line.strip() for line in listed.splitlines() if line.strip()]
    newest = re.search(r"CUDA Version:\s*([\d.]+)", said("nvidia-smi") or "")
    return replace(
        facts,
        driver=drivers[0] if drivers else None,
        driver_devices=len(drivers),
        driver_cuda=newest[1] if newest else None,
    )


def said(*command: str) -> str | None:
    """Return what a command prints; None if it is not there, fails or takes half a minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _with_torch(facts: Facts, *, measure: bool, timeout: float) -> Facts:
    import torch

    cudnn = torch.backends.cudnn.version()
    there = torch.cuda.is_available()
    found = []
    for index in range(torch.cuda.device_count() if there else 0):
        free, total = torch.cuda.mem_get_info(index)
        device = torch.cuda.get_device_properties(index)
        found.append(GPU(device.name, device.total_memory, total - free, (device.major, device.minor)))
    backends = ("nccl", "gloo") if there else ("gloo",)
    with ThreadPoolExecutor() as threads:
        communication = dict(zip(backends, threads.map(partial(_loopback, timeout=timeout), backends), strict=True))
    return replace(
        facts,
        torch_cuda=torch.version.cuda,
        cudnn=None if cudnn is None else str(cudnn),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if there else None,
        devices=tuple(found),
        communication=communication,
        rates=rates_of(found[0].name if found else "CPU", on_gpu=there) if measure else (),
    )


def _loopback(backend: str, *, timeout: float) -> str | None:
    """Return the error of a collective with one process; None if it works."""
    with tempfile.TemporaryDirectory() as folder:
        return _answer(_LOOPBACK, backend, f"{folder}/store", timeout=timeout)
