"""Device services of a training step, for GPU and CPU: timing, peak memory, profiler ranges and a second stream."""

from __future__ import annotations

import importlib
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megavlm.errors import UserError
from megavlm.resilience.phases import Clock


class DeviceClock(Clock):
    """Clock of a GPU: moments are CUDA events on the computing stream."""

    def moment(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        return bool(moment.query())

    def seconds(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device: CUDA events on a GPU, host time on a CPU."""
    return DeviceClock() if device.type == "cuda" else Clock()


_UNIT = 1024  # of `ru_maxrss` on Linux, in bytes


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: of tensors on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _UNIT * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def energy_meter(device: torch.device) -> Callable[[], float | None]:
    """Return a function that returns the joules that a GPU has used since its driver was loaded, or None if NVML
    (`pip install nvidia-ml-py`) does not tell.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        # By its identity: NVML does not know CUDA_VISIBLE_DEVICES.
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # not installed, or no driver
        return lambda: None

    def joules() -> float | None:
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except nvml.NVMLError:  # a GPU of before 2017
            return None

    return joules


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that appears as a range called `name` in a trace of `torch.profiler`."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(name)


class SideStream:
    """A second stream with fork, run and join. The computing stream does not wait for its work before the join.

    One thread queues work on both streams, so global state (FP8's switch, random generators) is never used by two
    threads. On a CPU, torch's streams are stand-ins: work runs as soon as it is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on: Any = torch.get_device_module(device)
        self._stream = self._on.Stream(device)
        give_each_stream_a_workspace()

    def fork(self) -> None:
        """Let this stream wait for the work that is queued on the computing stream so far."""
        self._stream.wait_stream(self._on.current_stream(self._device))

    @contextmanager
    def run(self, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
        """Return a context whose operations are queued on this stream; the caller may free `inputs` afterwards."""
        with self._on.stream(self._stream):
            yield
        _record_stream(self._stream, inputs)

    def join(self, outputs: Iterable[Tensor]) -> None:
        """Let the computing stream wait for this stream's work, so that it can use the `outputs`."""
        computing = self._on.current_stream(self._device)
        computing.wait_stream(self._stream)
        _record_stream(computing, outputs)


def _record_stream(stream: Any, tensors: Iterable[Tensor]) -> None:
    """Keep the memory of GPU tensors allocated on another stream until the work queued on `stream` so far is done."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


def give_each_stream_a_workspace() -> None:
    """Give each stream its own cuBLAS workspace in Transformer Engine (32 MiB from Hopper on). Idempotent.

    Transformer Engine keeps one workspace per device for all streams: two matrix products that run at the same time
    would write into the same memory. Raises UserError if Transformer Engine has no such function to replace: results
    would be wrong.
    """
    try:
        gemm: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
    except ImportError:
        return
    kept = getattr(gemm, "get_cublas_workspace", None)
    if getattr(kept, "of_each_stream", False):
        return
    allocate = getattr(kept, "__wrapped__", None)  # without its cache, which does not distinguish streams
    if allocate is None:
        raise UserError(
            "--encode-ahead: this Transformer Engine keeps cuBLAS' workspace in a way that megavlm does not know, so "
            "that two streams would share it: leave it out, or install the version of requirements/gpu.txt"
        )

    @cache
    def of_stream(stream: int, *which: Any) -> Any:
        return allocate(*which)

    def get_cublas_workspace(device: int, ub: bool, grouped_gemm: bool) -> Any:
        return of_stream(torch.cuda.current_stream(device).cuda_stream, device, ub, grouped_gemm)

    get_cublas_workspace.of_each_stream = True  # type: ignore[attr-defined]
    gemm.get_cublas_workspace = get_cublas_workspace
