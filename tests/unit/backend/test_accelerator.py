"""Streams, events and copies of a GPU, with stand-ins that write down what is asked of them: which waits for which.

A device's clock records events and reads them later: it never lets the host wait. Transformer Engine's shared scratch
memory is one for each stream.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megavlm.backend.accelerator import SideStream, clock_of, energy_meter, give_each_stream_a_workspace
from megavlm.backend.host_copies import HostCopies, empty_on_host
from megavlm.errors import UserError
from megavlm.resilience.phases import COMMUNICATION, COMPUTE, DATA, OTHER, Phases
from tests.support.host_copies import Streams


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr(torch.cpu, "Stream", lambda device: found.stream_of(next(found.names)))
    monkeypatch.setattr(torch.cpu, "Event", found.event)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cpu, "stream", found.entered)
    return found


def _tensor(streams: Streams, name: str) -> Any:
    """What a tensor on the GPU says of its memory."""
    return SimpleNamespace(is_cuda=True, record_stream=lambda by: streams.log.append((name, "is used by", str(by))))


def test_work_waits_for_what_was_queued_before_it_and_is_waited_for_where_told(streams: Streams) -> None:
    side = SideStream(torch.device("cpu"))
    side.fork()
    assert streams.log == [("out", "waits for", "computing")]
    streams.log.clear()
    for _ in range(2):  # what computes meanwhile is waited for by nobody
        with side.run([_tensor(streams, "pixels"), torch.zeros(1)]):
            assert str(streams.current) == "out"
        assert str(streams.current) == "computing"
    assert streams.log == [("pixels", "is used by", "out")] * 2
    streams.log.clear()
    side.join([_tensor(streams, "features")])
    assert streams.log == [("computing", "waits for", "out"), ("features", "is used by", "computing")]


def test_two_streams_do_not_share_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
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
    gemm.get_cublas_workspace = lambda *which: computing
    with pytest.raises(UserError, match="--encode-ahead: this Transformer Engine keeps cuBLAS' workspace in a way"):
        give_each_stream_a_workspace()


class Event:
    """Behaves as CUDA's events do: an event has a time once the device has reached it; asking earlier is an error."""

    made = 0
    passed = 0  # how far the device has got

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing, "an event without timing has no time"
        self.at: int | None = None

    def record(self) -> None:
        Event.made += 1
        self.at = Event.made

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000.0 * (end.at - self.at)

    def query(self) -> bool:
        return self.at is not None and self.at <= Event.passed

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Phases:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Phases(clock_of(torch.device("cuda")))


def step(phases: Phases, iteration: int, *, unfinished: int) -> None:
    """A step of four seconds, at whose end the device has some moments before it."""
    phases.begin_step(iteration)
    for phase in (COMPUTE, COMMUNICATION, COMPUTE, OTHER):
        phases.enter(phase)
    Event.passed = Event.made - unfinished
    phases.end_step()


def test_seconds_are_those_between_events(phases: Phases):
    step(phases, 1, unfinished=0)
    assert [phases.totals.seconds[each] for each in (DATA, COMPUTE, COMMUNICATION)] == [1.0, 2.0, 1.0]


def test_a_step_that_the_device_has_not_ended_is_read_with_a_later_one(phases: Phases):
    counts = []
    for iteration, unfinished in enumerate((1, 6, 2, 0), start=1):
        step(phases, iteration, unfinished=unfinished)
        counts.append(phases.totals.steps)
    assert counts == [0, 0, 2, 4]
    assert [phases.totals.seconds[phase] for phase in (DATA, COMPUTE, COMMUNICATION)] == [4.0, 8.0, 4.0]


@pytest.fixture
def copying(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> Streams:
    plain = torch.Tensor.copy_

    def copy(self: Any, source: Any, non_blocking: bool = False) -> Any:
        assert non_blocking, "the processor must not wait for a copy"
        streams.log.append((str(streams.current), "copies"))
        return plain(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    return streams


def test_copies_wait_for_what_was_computed_and_are_waited_for(copying: Streams) -> None:
    copies = HostCopies(torch.device("cpu"))
    sources = [torch.arange(4.0), torch.arange(3)]
    hosts, sent = copies.to_host(sources)
    copied = [("copies",)] * 2
    assert copying.log == [("out", "waits for", "computing"), *[("out", *each) for each in copied], ("out", "records")]
    copying.log.clear()
    copies.wait(sent)
    assert copying.log == [("computing", "waits for", "copies of out")]
    copying.log.clear()
    tensors, fetched = copies.to_device(hosts)
    copies.wait(fetched)
    assert copying.log == [
        ("back", "waits for", "computing"),
        *[("back", *each) for each in copied],
        ("back", "records"),
        ("computing", "waits for", "copies of back"),
    ]
    for tensor, host, source in zip(tensors, hosts, sources, strict=True):
        assert torch.equal(tensor, source)
        assert len({tensor.data_ptr(), host.data_ptr(), source.data_ptr()}) == 3


def test_host_memory_of_a_cpu_is_not_pinned() -> None:
    host = empty_on_host(torch.zeros(3, 2, dtype=torch.bfloat16))
    assert (host.shape, host.dtype, host.is_pinned()) == ((3, 2), torch.bfloat16, False)


def test_joules_are_those_of_the_device_that_torch_uses(monkeypatch: pytest.MonkeyPatch):
    """NVML is asked by UUID, since it counts all GPUs of a machine, whatever CUDA_VISIBLE_DEVICES says."""
    nvml = ModuleType("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert energy_meter(torch.device("cpu"))() is None  # no driver: nvmlInit fails
    millijoules = {"GPU-b": iter((4_000, 6_500))}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="b"))
    for name, value in {
        "NVMLError": OSError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda name: millijoules[name],
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: next(handle),
    }.items():
        setattr(nvml, name, value)
    joules = energy_meter(torch.device("cuda", 0))
    assert [joules(), joules()] == [4.0, 6.5]
