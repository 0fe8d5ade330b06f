"""What a step asks of its device: moments, peak memory, ranges in a trace, a second stream.

Each has an answer for a GPU and one for a CPU.
"""

from __future__ import annotations

import importlib
import resource
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megavlm.errors import UserError
from megavlm.resilience.phases import Clock


class DeviceClock(Clock):
    """CUDA events on the computing stream."""

    def moment(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        return bool(moment.query())

    def seconds(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return DeviceClock() if device.type == "cuda" else Clock()


_UNIT = 1024  # of `ru_maxrss` on Linux, in bytes


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors have taken on a GPU so far, or that this process has taken on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _UNIT * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows as a range called `name` in a trace of `torch.profiler`."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(name)


class SideStream:
    """A second stream: fork, run, join. The computing stream waits for nothing that runs between a fork and its join.

    One thread queues work on it and on the computing stream, so global state (FP8's switch, random generators) is never
    used by two threads. A CPU's streams are torch's stand-ins: work runs where it is queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on: Any = torch.get_device_module(device)
        self._stream = self._on.Stream(device)
        give_each_stream_a_workspace()

    def fork(self) -> None:
        """Order the work after everything that the computing stream has queued so far, and after nothing later."""
        self._stream.wait_stream(self._on.current_stream(self._device))

    @contextmanager
    def run(self, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
        """Return a context that queues its operations on this stream; the caller may free `inputs` afterwards."""
        with self._on.stream(self._stream):
            yield
        _record_stream(self._stream, inputs)

    def join(self, outputs: Iterable[Tensor]) -> None:
        """Let the computing stream wait for the work, and use its `outputs`."""
        computing = self._on.current_stream(self._device)
        computing.wait_stream(self._stream)
        _record_stream(computing, outputs)


def _record_stream(stream: Any, tensors: Iterable[Tensor]) -> None:
    """Keep the memory of tensors that another stream allocated until the present work of `stream` is done."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


def give_each_stream_a_workspace() -> None:
    """Give each stream its own cuBLAS workspace in Transformer Engine (32 MiB from Hopper on). Idempotent.

    Transformer Engine keeps one workspace per device for all streams: two matrix products that run at the same time
    would write into the same memory. Raises UserError where it keeps it under another name: numbers would be wrong.
    """
    try:
        gemm: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
    except ImportError:
        return
    kept = getattr(gemm, "get_cublas_workspace", None)
    if getattr(kept, "of_each_stream", False):
        return
    allocate = getattr(kept, "__wrapped__", None)  # below its cache, which knows no streams
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
