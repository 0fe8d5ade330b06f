"""Copies on streams, with stand-ins for CUDA's that write down what is asked of them: which waits for which."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megavlm.backend.host_copies import DirectCopies, StreamCopies, empty_on_host, host_copies_of
from tests.support.host_copies import Streams


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: found.stream_of(next(found.names)))
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.entered)
    plain = torch.Tensor.copy_

    def copy(self: Any, source: Any, non_blocking: bool = False) -> Any:
        assert non_blocking, "the processor must not wait for a copy"
        found.log.append((str(found.current), "copies"))
        return plain(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    return found


def test_copies_wait_for_what_was_computed_and_are_waited_for(streams: Streams) -> None:
    copies = StreamCopies(torch.device("cpu"))
    sources = [torch.arange(4.0), torch.arange(3)]
    hosts, sent = copies.to_host(sources)
    copied = [("copies",)] * 2
    assert streams.log == [("out", "waits for", "computing"), *[("out", *each) for each in copied], ("out", "records")]
    streams.log.clear()
    copies.wait(sent)
    assert streams.log == [("computing", "waits for", "copies of out")]
    streams.log.clear()
    tensors, fetched = copies.to_device(hosts)
    copies.wait(fetched)
    assert streams.log == [
        ("back", "waits for", "computing"),
        *[("back", *each) for each in copied],
        ("back", "records"),
        ("computing", "waits for", "copies of back"),
    ]
    for tensor, host, source in zip(tensors, hosts, sources, strict=True):
        assert torch.equal(tensor, source)
        assert len({tensor.data_ptr(), host.data_ptr(), source.data_ptr()}) == 3


def test_each_device_has_its_own_kind_of_copies(streams: Streams) -> None:
    assert isinstance(host_copies_of(torch.device("cpu")), DirectCopies)
    found = host_copies_of(torch.device("cuda", 0))
    assert isinstance(found, StreamCopies)
    assert found.kind == "cuda"


def test_host_memory_of_a_cpu_is_not_pinned() -> None:
    host = empty_on_host(torch.zeros(3, 2, dtype=torch.bfloat16))
    assert (host.shape, host.dtype, host.is_pinned()) == ((3, 2), torch.bfloat16, False)
