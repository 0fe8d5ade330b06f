"""Each reader of other people's files, on damaged ones: success, one line, or a bad sample; in bounded time and memory.

The fast set tries the corpus and a few damaged files of each with fixed seeds. What failed once is in
tests/fuzz/corpus/READER: put the `input` of a failing attempt's folder there. `tests.fuzz.campaign` goes on for hours.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.campaign import CORPUS, corpus_of, fuzz
from tests.fuzz.child import attempts, failing_input
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import READERS
from tests.fuzz.structured import damaged

BINARY = ("distcp", "safetensors", "sentencepiece", "image")
TEXT = ("chat template", "csv", "text", "jsonl", "events.jsonl", "metrics.jsonl", "feature cache")
JSON = [name for name in READERS if name not in (*BINARY, *TEXT)]


def check(name: str, inputs: list[bytes], folder: Path) -> None:
    outcome = attempts(READERS[name], inputs, folder)
    assert not outcome.how, f"{failing_input(folder)[:200]!r}\n{outcome.how}"


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_answered(name: str, tmp_path: Path) -> None:
    reader, random = READERS[name], Random(name)
    seeds = reader.seeds()
    few = [mutated(random.choice(seeds), random, others=seeds) for _ in range(reader.few)]
    check(name, [*corpus_of(name), seeds[0], *few], tmp_path / "attempts")


def test_the_corpus_belongs_to_readers() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= READERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_every_seed_is_answered(name: str, tmp_path: Path) -> None:
    check(name, READERS[name].seeds(), tmp_path / "attempts")


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON)
def test_a_value_of_any_type_depth_and_length_is_answered(name: str, tmp_path: Path) -> None:
    inputs: list[bytes] = []

    @settings(
        max_examples=20 * READERS[name].few,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(READERS[name].seeds()))
    def collect(data: bytes) -> None:
        inputs.append(data)

    collect()
    check(name, inputs, tmp_path / "attempts")


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_answered_for_long(name: str) -> None:
    seconds = float(os.environ.get("MEGAVLM_FUZZ_SECONDS", "5"))
    _, found = fuzz(name, READERS[name], seconds=seconds, seed=time.time_ns())
    assert not found, f"{found[0].data[:200]!r}\n{found[0].how}"
