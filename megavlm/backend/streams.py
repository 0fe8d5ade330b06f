"""A second CUDA stream for work that fills what the computing stream leaves idle."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class SideStream(Protocol):
    """Fork, run, join. The computing stream waits for nothing that runs between a fork and its join."""

    def fork(self) -> None:
        """Order the work after everything that the computing stream has queued so far, and after nothing later."""

    def run(self, inputs: Iterable[Tensor] = ()) -> AbstractContextManager[Any]:
        """Return a context that queues its operations on this stream; the caller may free `inputs` afterwards."""

    def join(self, outputs: Iterable[Tensor]) -> None:
        """Let the computing stream wait for the work, and use its `outputs`."""


def side_stream(device: torch.device) -> SideStream:
    """Return the side stream of a device: on a CPU, one that runs everything at once."""
    return CudaStream(device) if device.type == "cuda" else InlineStream()


class InlineStream:
    """A CPU has no streams: work runs where it is queued."""

    def fork(self) -> None: ...

    def run(self, inputs: Iterable[Tensor] = ()) -> AbstractContextManager[Any]:
        return nullcontext()

    def join(self, outputs: Iterable[Tensor]) -> None: ...


class CudaStream:
    """A CUDA stream. One thread queues work on it and on the computing stream, so global state (FP8's switch, random
    generators) is never used by two threads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        give_each_stream_a_workspace()

    def fork(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def run(self, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield
        _record_stream(self._stream, inputs)

    def join(self, outputs: Iterable[Tensor]) -> None:
        computing = torch.cuda.current_stream(self._device)
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
    would write into the same memory.
    """
    try:
        gemm: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
    except ImportError:
        return
    allocate = getattr(gemm.get_cublas_workspace, "__wrapped__", None)  # below its cache, which knows no streams
    if allocate is None:
        return

    @cache
    def of_stream(stream: int, *which: Any) -> Any:
        return allocate(*which)

    def get_cublas_workspace(device: int, ub: bool, grouped_gemm: bool) -> Any:
        return of_stream(torch.cuda.current_stream(device).cuda_stream, device, ub, grouped_gemm)

    gemm.get_cublas_workspace = get_cublas_workspace
