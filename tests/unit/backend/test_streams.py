"""Work on a stream of its own, with stand-ins for CUDA's streams and for Transformer Engine's shared scratch memory."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megavlm.backend.accelerator import CudaStream, InlineStream, give_each_stream_a_workspace, side_stream
from tests.support.host_copies import Streams


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: found.stream_of("beside"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.entered)
    return found


def _tensor(streams: Streams, name: str) -> Any:
    """What a tensor on the GPU says of its memory."""
    return SimpleNamespace(
        is_cuda=True, record_stream=lambda stream: streams.log.append((name, "is used by", str(stream)))
    )


def test_work_waits_for_what_was_queued_before_it_and_is_waited_for_where_told(streams: Streams) -> None:
    side = side_stream(torch.device("cuda", 0))
    assert isinstance(side, CudaStream)
    side.fork()
    assert streams.log == [("beside", "waits for", "computing")]
    streams.log.clear()
    for _ in range(2):  # what computes meanwhile is waited for by nobody
        with side.run([_tensor(streams, "pixels"), torch.zeros(1)]):
            assert str(streams.current) == "beside"
        assert str(streams.current) == "computing"
    assert streams.log == [("pixels", "is used by", "beside")] * 2
    streams.log.clear()
    side.join([_tensor(streams, "features")])
    assert streams.log == [("computing", "waits for", "beside"), ("features", "is used by", "computing")]


def test_a_cpu_works_at_once() -> None:
    assert isinstance(side_stream(torch.device("cpu")), InlineStream)


def test_two_streams_do_not_share_scratch_memory(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Transformer Engine 2.11: a tensor for each device, in a cache that does not ask for the stream."""
    gemm: Any = ModuleType("transformer_engine.pytorch.cpp_extensions.gemm")

    @functools.cache
    def get_cublas_workspace(device: int, ub: bool, grouped_gemm: bool) -> object:
        return SimpleNamespace(device=device, ub=ub, grouped_gemm=grouped_gemm)

    gemm.get_cublas_workspace = get_cublas_workspace
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.cpp_extensions"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, gemm.__name__, gemm)
    numbers = {"computing": 0, "beside": 7}
    current = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    give_each_stream_a_workspace()
    give_each_stream_a_workspace()
    computing = gemm.get_cublas_workspace(0, False, False)
    current.cuda_stream = numbers["beside"]
    side = gemm.get_cublas_workspace(0, False, False)
    assert side is not computing, "two products at a time would write into each other's memory"
    assert side is gemm.get_cublas_workspace(0, False, False), "a stream keeps its own"
    assert gemm.get_cublas_workspace(0, True, False).ub
    current.cuda_stream = numbers["computing"]
    assert gemm.get_cublas_workspace(0, False, False) is computing
