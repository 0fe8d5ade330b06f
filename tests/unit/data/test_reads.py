"""A read that hangs in the training process is named, and nobody waits for it any longer."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import FileCollator
from megavlm.data.files import FilesSource
from megavlm.data.loader import RankLoader
from megavlm.data.prompts import choose_prompts
from megavlm.data.reads import Reads
from megavlm.data.sampler import Windows
from megavlm.data.streaming import StreamBatchSampler, StreamReader
from megavlm.data.survey import data_table, data_window, with_counted_length
from megavlm.data.types import HeldOut
from megavlm.errors import UserError
from tests.support.data_files import sources_of, write_all
from tests.support.training import SMALL

LONG = 60.0  # seconds: a wait of this length is a failure of the test
WINDOW = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> FilesSource:
    folder = write_all(tmp_path_factory.mktemp("data"), samples=24)
    return FilesSource(parse([*SMALL, *sources_of(folder), "--seq-length", "96", "--packing-window", str(WINDOW)]))


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """What hangs waits for it, until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def loader_of(source: FilesSource, reads: Reads, *, stream: object = None) -> RankLoader:
    spec = CollateSpec.of(source.config, source)
    collator = FileCollator(source, spec, packing=True, reads=reads)
    sampler = source.sampler(source.config, collator)
    if stream is not None:
        reader = StreamReader(source, {0: stream}, rank=0, ranks=1, reads=reads)
        sampler = StreamBatchSampler(reader, collator, count=1, windows=Windows(WINDOW), seq_length=96)
    return RankLoader(sampler, collator, dp_rank=0, dp_size=1, micro_batch_size=1)


def expect_a_name(loader: RankLoader, name: str) -> None:
    """Whoever waits for the next step hears of the sample, and the loader closes without it."""
    began = time.monotonic()
    with pytest.raises(UserError, match="--data-worker-timeout") as raised:
        list(iter(loader.next_step, None))
    failure = loader.failure_ahead(unless=lambda: False)
    assert name in str(raised.value)
    assert str(failure)[:20] == str(raised.value)[:20]
    loader.close()
    assert time.monotonic() - began < LONG


@pytest.mark.parametrize("what", ["encode", "load"])
def test_a_sample_of_files_that_cannot_be_read(
    what: str, source: FilesSource, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    """Its record in the thread that packs, its pixels in the thread that makes micro-batches."""
    original = getattr(source, what)

    def hanging(sample):
        number = sample if isinstance(sample, int) else sample.sample_id
        if number == 6:
            stuck.wait()
        return original(sample)

    monkeypatch.setattr(source, what, hanging)
    monkeypatch.setattr("megavlm.data.loader._CLOSE", 0.2)
    monkeypatch.setattr("megavlm.data.sampler._CLOSE", 0.2)
    expect_a_name(loader_of(source, Reads(1.0)), f"sample {source.label(6)[1]}")


class Stream:
    """Yields samples of files as a stream does, and hangs after the third."""

    name, label = "tars", ""

    def __init__(self, source: FilesSource, stuck: threading.Event) -> None:
        self._source, self._stuck = source, stuck

    def __iter__(self):
        for number in range(3):
            self.label = f"tars/0.tar/{number}"
            yield self._source.conversation(number)[0]
        self._stuck.wait()

    def state_dict(self) -> dict[str, str]:
        return {}


def test_a_tar_that_cannot_be_read(source: FilesSource, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megavlm.data.loader._CLOSE", 0.2)
    monkeypatch.setattr("megavlm.data.sampler._CLOSE", 0.2)
    loader = loader_of(source, Reads(1.0), stream=Stream(source, stuck))
    monkeypatch.setattr(type(source.order), "record", lambda self, number: type("Ref", (), {"source": 0, "record": 0}))
    expect_a_name(loader, "the sample of tars after tars/0.tar/2")


FIRST: dict[str, Callable[[Config, FilesSource], object]] = {
    "shares": data_table,
    "epochs": with_counted_length,
    "validation": lambda config, source: source.validation_samples(config),
    "prompts": lambda config, source: choose_prompts(config, source, [HeldOut(0, 0)]),
    "plan": lambda config, source: data_window(config, source, records=8),
}


@pytest.mark.parametrize("what", FIRST)
def test_a_record_that_cannot_be_read_before_the_run_begins(
    what: str, source: FilesSource, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    """Whatever looks at the first ones: with data workers as well, which have not begun then."""
    config = source.config
    held = replace(config.data, validation=config.data.datasets)
    config = replace(config, data=held, train=replace(config.train, epochs=1.0, train_iters=None))
    monkeypatch.setattr(source, "config", config)
    monkeypatch.setattr(source, "validation_records", list(source.records.values()))
    monkeypatch.setattr(source, "validation_names", source.names)
    monkeypatch.setattr(source, "reads", pickle.loads(pickle.dumps(Reads(1.0))))
    monkeypatch.setattr(source, "conversation", lambda sample: stuck.wait())
    with pytest.raises(UserError, match=r"^reading sample \S+:\d+ has taken \d+ s \(--data-worker-timeout\)"):
        FIRST[what](config, source)


def test_without_a_limit_a_read_may_take_for_ever():
    reads = Reads(0)
    with reads.reading(lambda: "slow"):
        reads._now = {thread: (name, since - 1e9) for thread, (name, since) in reads._now.items()}
        reads.check()
