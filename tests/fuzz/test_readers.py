"""Each reader of other people's files, on damaged ones: success, one line, or a bad sample; in bounded time and memory.

The fast set tries the corpus and a few damaged files of each with fixed seeds. What failed once is in
tests/fuzz/corpus/READER: put the `input` of a failing attempt's folder there, once its cause is mended.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.child import attempt
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import READERS

CORPUS = Path(__file__).parent / "corpus"


def check(name: str, inputs: list[bytes], folder: Path) -> None:
    how = attempt(READERS[name], inputs, folder)
    assert not how, f"{(folder / 'input').read_bytes()[:200]!r}\n{how}"


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_answered(name: str, tmp_path: Path) -> None:
    reader, random = READERS[name], Random(name)
    seeds = reader.seeds()
    few = [mutated(random.choice(seeds), random, others=seeds) for _ in range(reader.few)]
    known = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    check(name, [*known, seeds[0], *few], tmp_path / "attempts")


def test_the_corpus_belongs_to_readers() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= READERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_every_seed_is_answered(name: str, tmp_path: Path) -> None:
    check(name, READERS[name].seeds(), tmp_path / "attempts")


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_answered_for_long(name: str, tmp_path: Path) -> None:
    end, random = time.monotonic() + float(os.environ.get("MEGAVLM_FUZZ_SECONDS", "5")), Random(time.time_ns())
    seeds, number = READERS[name].seeds(), 0
    while time.monotonic() < end:
        number += 1
        check(name, [mutated(random.choice(seeds), random, others=seeds) for _ in range(64)], tmp_path / str(number))
