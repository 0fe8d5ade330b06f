"""Work beside the computing stream: on a CUDA stream of its own, which fills what the computing one leaves idle."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class Beside(Protocol):
    """Work in three acts. What the computing stream queues between the first and the last waits for none of it."""

    def begin(self) -> None:
        """Work comes after what the computing stream has queued so far, and not after what it queues later."""

    def work(self, inputs: Iterable[Tensor] = ()) -> AbstractContextManager[Any]:
        """`with beside.work(inputs):` queues what is computed inside; `inputs` may be let go afterwards."""

    def end(self, outputs: Iterable[Tensor]) -> None:
        """Let the computing stream, from now on, wait for the work and use its `outputs`."""


def beside(device: torch.device) -> Beside:
    """The work beside others that a device can do."""
    return SideStream(device) if device.type == "cuda" else AtOnce()


class AtOnce:
    """On a CPU: work is done where it is asked for."""

    def begin(self) -> None: ...

    def work(self, inputs: Iterable[Tensor] = ()) -> AbstractContextManager[Any]:
        return nullcontext()

    def end(self, outputs: Iterable[Tensor]) -> None: ...


class SideStream:
    """On a GPU. One thread queues for both streams, so no state of the process (FP8's switch, generators) is met by
    two at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        give_each_stream_a_workspace()

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def work(self, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield
        _used_by(self._stream, inputs)

    def end(self, outputs: Iterable[Tensor]) -> None:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        _used_by(computing, outputs)


def _used_by(stream: Any, tensors: Iterable[Tensor]) -> None:
    """Memory that another stream's allocator owns is given out again only after `stream`'s present work."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


def give_each_stream_a_workspace() -> None:
    """Transformer Engine gives all its matrix products of a device one scratch memory, whatever stream they run on:
    two at a time would write into each other's. Afterwards each stream has its own (32 MiB from Hopper on). Idempotent.
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
