"""Validation samples: each once, in batches that are the same on every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.command_line.parsing import parse
from megavlm.data.sample_order import spread
from megavlm.data.sampler import ValidationBatchSampler, window_of
from megavlm.data.survey import validation_line
from megavlm.data.types import EncodedRecord, GlobalBatch, HeldOut
from megavlm.inputs.bad_sample import Reason, Skipped
from megavlm.resilience.signals import StopRequest
from megavlm.train.hooks.held_out import ValidationHook, fields
from megavlm.train.hooks.stops import Stops
from tests.support.encoded import LENGTH, encoded


@given(st.lists(st.integers(0, 40), max_size=4))
def test_every_beginning_is_a_fair_sample_of_the_data_sets(sizes: list[int]) -> None:
    samples = spread([range(100, 100 + size) for size in sizes])
    assert sorted((s.source, s.record) for s in samples) == [
        (source, 100 + record) for source, size in enumerate(sizes) for record in range(size)
    ]
    for length in range(len(samples)):
        counts = Counter(sample.source for sample in samples[:length])
        assert all(abs(counts[s] - size * length / len(samples)) <= len(sizes) for s, size in enumerate(sizes))


def encode(samples: Sequence[HeldOut]) -> list[EncodedRecord]:
    """Samples of many lengths; every fifth is bad, every seventh in two pieces."""
    found = []
    for sample in samples:
        number = sample.record
        skipped = (Skipped(f"t:{number}", "t", Reason.EMPTY, "nothing"),) if number % 5 == 0 else ()
        pieces = 0 if skipped else 2 if number % 7 == 0 else 1
        length = number * 37 % LENGTH + 1
        found.append(EncodedRecord(tuple(encoded(length, piece=piece) for piece in range(pieces)), skipped, sample))
    return found


def batches(samples: int, *, multiple: int = 1, most: int | None = None) -> list[GlobalBatch]:
    """All batches of a validation that follows another one."""
    sampler = ValidationBatchSampler(
        [HeldOut(0, number) for number in range(samples)],
        lambda part: window_of(encode(part), seq_length=LENGTH, packing=True),
        count=8,
        multiple=multiple,
        most=most,
        size=20,
        seq_length=LENGTH,
    )
    state, rounds = sampler.start, list[list[GlobalBatch]]()
    for _ in range(2):
        rounds.append([])
        while not (rounds[-1] and rounds[-1][-1].last):
            rounds[-1].append(sampler.batch_at(state))
            state = rounds[-1][-1].after
        assert state == sampler.start
    sampler.close()
    assert rows_of(rounds[0]) == rows_of(rounds[1])
    return rounds[1]


def rows_of(found: Sequence[GlobalBatch]) -> list[list[tuple[int, int]]]:
    """The record and the piece of each segment of each sequence."""
    return [
        [(segment.sample_id.record, int(segment.encoded.tokens[0])) for segment in row]
        for batch in found
        for row in batch.sequences
    ]


@pytest.mark.parametrize(("samples", "multiple"), [(1, 8), (7, 2), (20, 4), (55, 1), (55, 8)])
def test_each_sample_comes_once_whatever_fills_up_the_last_batch(samples: int, multiple: int) -> None:
    found = batches(samples, multiple=multiple)
    rows = rows_of(found)
    expected = [(number, piece) for number in range(samples) if number % 5 for piece in range(1 + (number % 7 == 0))]
    assert sorted(piece for row in rows for piece in row) == expected
    assert sum(batch.read for batch in found) == samples
    assert sum(len(batch.skipped) for batch in found) == len(range(0, samples, 5))
    assert all(len(batch.sequences) == 8 for batch in found[:-1])
    assert len(found[-1].sequences) % multiple == 0 < len(found[-1].sequences)
    assert sum(not row for row in rows) < multiple or not expected
    assert [row for row in rows if row] == [row for row in rows_of(batches(samples)) if row], "as on every layout"


def test_a_limit_takes_the_first_batches() -> None:
    whole, some = batches(55), batches(55, most=2)
    assert rows_of(some) == rows_of(whole[:2])
    assert [batch.last for batch in some] == [False, True]


def test_the_loss_is_that_of_all_tokens() -> None:
    found = fields([30.0, 20.0, 10.0, 20.0, 0.0, 15.0, 5.0, 0.0], ("long", "short", "none"))
    assert found["validation/loss"] == 1.5
    assert found["validation/long/loss"] == pytest.approx(10 / 15)
    assert found["validation/short/perplexity"] == pytest.approx(54.598150)
    assert "validation/none/loss" not in found
    assert found["validation/trained_tokens"] == 20
    assert fields([3.0, 2.0], ("only",)).keys() == {f"validation/{n}" for n in ("loss", "perplexity", "trained_tokens")}


@pytest.mark.parametrize(
    ("interval", "share", "advice"), [(100, 0.1, "an --eval-interval of 360 "), (100, 0.03, None), (0, 0.5, None)]
)
def test_a_dear_validation_says_once_what_makes_it_cheap(interval: int, share: float, advice: str | None) -> None:
    """One that takes a tenth of the time at 100 steps costs 11.1 steps, which are 3 % of 11.1 + 359.3."""
    config = parse(["--validation-split", "0.1", "--eval-interval", str(interval)])
    lines: list[str] = []
    run: Any = SimpleNamespace(config=config, say=lines.append)
    validation = ValidationHook(run, Stops(run, StopRequest()))
    for _ in range(2):
        validation._tell({"validation/loss": 1.0}, 3.0, share)
    hints = [line for line in lines if "makes that 3%" in line]
    assert [advice in line for line in hints] == [True] if advice else not hints
    assert lines[0] == f"validation/loss 1.0000 (3.0 s, {share:.1%} of the time)"


@pytest.mark.parametrize("sets", [2, 20])
def test_a_line_is_short_whatever_the_number_of_data_sets(sets: int) -> None:
    names = tuple(f"r{number:02}" for number in range(sets))
    found = fields([2.0] * (2 + 2 * sets), names)
    lines: list[str] = []
    run: Any = SimpleNamespace(config=parse(["--validation-split", "0.1"]), say=lines.append)
    ValidationHook(run, Stops(run, StopRequest()))._tell(found, 3.0, 0.01)
    assert lines[0].startswith("validation/loss 1.0000, validation/perplexity 2.7183")
    assert ("validation/r01/loss" in lines[0]) == (sets == 2)
    assert len(lines[0]) < 240
    samples = [HeldOut(number % sets, number) for number in range(60)]
    assert validation_line(names, samples) == (
        "validation: 30 samples of r00, 30 samples of r01" if sets == 2 else "validation: 60 samples of 20 data sets"
    )
