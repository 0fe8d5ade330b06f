"""Global batches of packed windows: every sample once, the same from any place on, and nothing usable is lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.sampler import PackedBatchSampler, Window, Windows, window_of
from megavlm.data.types import EncodedRecord, LoaderState
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import Reason, Skipped
from tests.support.encoded import LENGTH, encoded

WINDOW = 20


def records_of(number: int) -> Sequence[EncodedRecord]:
    """Samples of random lengths; every fifth is bad, every seventh in two pieces."""
    samples = []
    for item in range(number * WINDOW, (number + 1) * WINDOW):
        length = int(np.random.default_rng(item).integers(1, LENGTH + 1))
        skipped = (Skipped(f"t:{item}", "t", Reason.EMPTY, "nothing"),) if item % 5 == 0 else ()
        pieces = 0 if skipped else 2 if item % 7 == 0 else 1
        samples.append(EncodedRecord(tuple(encoded(length, piece=piece) for piece in range(pieces)), skipped, item))
    return samples


def sampler(*, count: int = 4, packing: bool = True, window: int = WINDOW) -> PackedBatchSampler:
    return PackedBatchSampler(
        lambda number: window_of(records_of(number), seq_length=LENGTH, packing=packing),
        count=count,
        windows=Windows(window),
        seq_length=LENGTH,
    )


def taken(
    given_sampler: PackedBatchSampler, place: LoaderState, steps: int
) -> tuple[list[tuple[tuple[int, int], ...]], list[LoaderState]]:
    sequences, places = [], []
    for _ in range(steps):
        composed = given_sampler.batch_at(place)
        place = composed.after
        places.append(place)
        sequences += [tuple((s.sample_id, int(s.encoded.tokens[0])) for s in row) for row in composed.sequences]
    return sequences, places


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.booleans())
def test_every_usable_piece_comes_once_and_fits(count: int, packing: bool) -> None:
    given_sampler = sampler(count=count, packing=packing)
    sequences, places = taken(given_sampler, given_sampler.start, 12)
    given_sampler.close()
    flat = [member for row in sequences for member in row]
    assert len(flat) == len(set(flat))
    whole = places[-1]["window"]
    expected = {(s.sample_id, piece) for n in range(whole) for s in records_of(n) for piece in range(len(s.samples))}
    assert expected <= set(flat)
    lengths = {s.sample_id: s.samples[0].cost.length for n in range(whole + 1) for s in records_of(n) if s.samples}
    assert all(sum(lengths[item] for item, _ in row) <= LENGTH for row in sequences)
    assert packing or all(len(row) == 1 for row in sequences)


def test_any_place_goes_on_as_if_nothing_had_been() -> None:
    first = sampler()
    whole, places = taken(first, first.start, 9)
    first.close()
    for done in (1, 4, 7):
        resumed = sampler(count=2)
        again, _ = taken(resumed, places[done - 1], 4)
        resumed.close()
        assert again == whole[done * 4 : done * 4 + 8]


def test_a_window_is_counted_once_when_it_is_opened() -> None:
    given_sampler = sampler(count=3)
    place, read, skipped = given_sampler.start, 0, []
    for _ in range(30):
        composed = given_sampler.batch_at(place)
        place = composed.after
        read += composed.read
        skipped += [skip.label for skip in composed.skipped]
    given_sampler.close()
    assert read == (place["window"] + (place["taken"] > 0)) * WINDOW
    assert len(skipped) == len(set(skipped)) == read // 5


def test_data_without_a_usable_sample_says_why() -> None:
    bad = Skipped("train.jsonl:3", "train", Reason.MISSING, "no cat.jpg")
    given_sampler = PackedBatchSampler(lambda number: Window((), 1, (bad,)), count=1, windows=Windows(1), seq_length=8)
    with pytest.raises(UserError, match=r"none of the first 1 record .* 1 × missing_file, as train.jsonl:3"):
        given_sampler.batch_at(given_sampler.start)
    given_sampler.close()


def test_a_place_in_other_windows_is_refused() -> None:
    place = sampler(window=10).start
    with pytest.raises(UserError, match="--packing-window 10"):
        sampler().batch_at(place)
