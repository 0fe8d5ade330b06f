"""Samples in their order, from loaders, through training and validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, DataConfig, TrainConfig
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import ComputedCollator, all_images
from megavlm.data.loader import DataLoader, RankLoader, checksum
from megavlm.data.sample_order import BLOCK, Order, RecordRef, apportioned, permuted, spread
from megavlm.data.sampler import (
    PackedBatchSampler,
    SequentialBatchSampler,
    ValidationBatchSampler,
    Window,
    Windows,
    window_of,
)
from megavlm.data.survey import validation_line
from megavlm.data.synthetic import SyntheticSource
from megavlm.data.types import (
    EncodedRecord,
    EncodedSample,
    GlobalBatch,
    HeldOut,
    LoaderState,
    Sample,
    SampleCost,
    Segment,
    StepData,
)
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import Reason, Skipped
from megavlm.inputs.batch import MicroBatch
from megavlm.resilience.signals import StopRequest
from megavlm.train.hooks.held_out import ValidationHook, fields
from megavlm.train.hooks.stops import Stops
from megavlm.train.step_result import Counts, counts_of

GLOBAL_BATCH = 24
CONFIG = Config(
    train=TrainConfig(seq_length=40, global_batch_size=GLOBAL_BATCH),
    data=DataConfig(images_per_sample=(1, 2, 0), image_sizes=(16, 32, 8), imageless_share=0.2),
)


def loader(
    *,
    source: SyntheticSource | None = None,
    dp_rank: int = 0,
    dp_size: int = 1,
    micro_batch_size: int = 2,
    with_patches: bool = True,
    seq_length: int = CONFIG.train.seq_length,
) -> RankLoader:
    source = source or SyntheticSource(CONFIG)
    return RankLoader(
        SequentialBatchSampler(count=GLOBAL_BATCH),
        ComputedCollator(
            source,
            CollateSpec.of(CONFIG, source, seq_length=seq_length),
            own_images=all_images if with_patches else None,
        ),
        dp_rank=dp_rank,
        dp_size=dp_size,
        micro_batch_size=micro_batch_size,
    )


def steps(given: RankLoader, count: int) -> list[list[MicroBatch]]:
    try:
        return [given.next_step().batches for _ in range(count)]
    finally:
        given.close()


def rows_in_global_order(per_rank: list[list[MicroBatch]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and patches of a global batch: micro-batch by micro-batch, rank by rank."""
    batches = [batch for of_one_micro_batch in zip(*per_rank, strict=True) for batch in of_one_micro_batch]
    patches = [batch.images.patches for batch in batches if batch.images is not None]
    return torch.cat([batch.text.tokens for batch in batches]), torch.cat(patches)


@settings(max_examples=25, deadline=None)
@given(dp_size=st.sampled_from([1, 2, 3, 4]), micro_batch_size=st.sampled_from([1, 2, 3, 6]))
def test_every_layout_reads_the_same_global_batches(dp_size: int, micro_batch_size: int) -> None:
    if GLOBAL_BATCH % (dp_size * micro_batch_size):
        return
    expected = steps(loader(micro_batch_size=GLOBAL_BATCH), 2)
    ranks = [steps(loader(dp_rank=r, dp_size=dp_size, micro_batch_size=micro_batch_size), 2) for r in range(dp_size)]
    for step in range(2):
        tokens, patches = rows_in_global_order([rank[step] for rank in ranks])
        assert torch.equal(tokens, expected[step][0].text.tokens)
        assert torch.equal(patches, expected[step][0].images.patches)
        assert all(len(rank[step]) == GLOBAL_BATCH // (dp_size * micro_batch_size) for rank in ranks)


def test_resume_with_another_layout_continues_the_stream() -> None:
    straight = steps(loader(micro_batch_size=GLOBAL_BATCH), 5)
    before = loader(dp_size=2, dp_rank=1, micro_batch_size=3)
    for _ in range(3):
        before.next_step()
    state = before.state_dict()
    before.close()
    assert state == {"consumed_samples": 3 * GLOBAL_BATCH}, "prefetched samples are not consumed"

    resumed = [loader(dp_rank=rank, dp_size=4, micro_batch_size=1) for rank in range(4)]
    for each in resumed:
        each.load_state_dict(state)
    ranks = [steps(each, 2) for each in resumed]
    for step in range(2):
        tokens, _ = rows_in_global_order([rank[step] for rank in ranks])
        assert torch.equal(tokens, straight[3 + step][0].text.tokens)


def test_ranks_without_vision_render_nothing_and_agree_on_the_rest() -> None:
    seeing, blind = steps(loader(), 1)[0], steps(loader(with_patches=False), 1)[0]
    for ours, theirs in zip(seeing, blind, strict=True):
        assert theirs.images is None
        assert ours.image_sizes == theirs.image_sizes
        assert torch.equal(ours.text.tokens, theirs.text.tokens)
        assert torch.equal(ours.text.feature_positions, theirs.text.feature_positions)


class FailingSource(SyntheticSource):
    """Fails at one sample of the second global batch."""

    def sample(self, index: int) -> Sample:
        if index == GLOBAL_BATCH + 1:
            raise OSError("unreadable")
        return super().sample(index)


def test_an_error_in_the_thread_surfaces_at_the_step_it_belongs_to() -> None:
    given = loader(source=FailingSource(CONFIG))
    given.next_step()
    with pytest.raises(OSError, match="unreadable"):
        given.next_step()
    assert given.state_dict() == {"consumed_samples": GLOBAL_BATCH}
    given.close()


def test_counts_sum_to_the_global_batch() -> None:
    alone, reader = steps(loader(micro_batch_size=GLOBAL_BATCH), 1), SimpleNamespace(is_reader=True)
    read = [*alone, *(steps(loader(dp_rank=rank, dp_size=3), 1)[0] for rank in range(3))]
    whole, *parts = [counts_of(StepData(each, 0, (), None), reader, CONFIG.model) for each in read]
    for name, total in vars(whole).items():
        assert sum(getattr(part, name) for part in parts) == total
    assert whole.tokens == GLOBAL_BATCH * 40
    source = SyntheticSource(CONFIG)
    samples = [source.sample(index) for index in range(GLOBAL_BATCH)]
    assert whole.images == sum(len(sample.images) for sample in samples)
    assert whole.image_tokens == sum(int(np.sum(sample.tokens == source.image_token)) for sample in samples)
    assert whole.patches == whole.image_tokens, "without pixel shuffle a patch is a token"
    cached = [
        counts_of(StepData(alone[0], 0, (), None), SimpleNamespace(is_reader=each), CONFIG.model, [(2, 3)])
        for each in (True, False)
    ]
    assert [(each.patches, each.tokens) for each in cached] == [(6, whole.tokens), (6, 0)]


def test_peek_shows_the_next_step_and_leaves_the_place():
    plain, peeking = DataLoader(loader()), DataLoader(loader())
    for _ in range(3):
        assert peeking.next_step().batches[0].text.tokens.equal(plain.next_step().batches[0].text.tokens)
        ahead = peeking.peek()
        assert peeking.peek() is ahead
        assert peeking.state_dict() == plain.state_dict()
    plain.close()
    peeking.close()


def test_a_loaded_place_forgets_what_was_seen():
    first = DataLoader(loader())
    start = first.state_dict()
    expected = first.next_step().batches[0].text.tokens
    first.peek()
    first.load_state_dict(start)
    assert first.next_step().batches[0].text.tokens.equal(expected)
    first.close()


WINDOW = 20
LENGTH = 100  # tokens of the longest sample, and of a sequence


def encoded(item: Any, number: int, length: int) -> EncodedRecord:
    """A record whose tokens are the numbers of its pieces; every fifth is bad, every seventh in two pieces."""
    skipped = (Skipped(f"t:{number}", "t", Reason.EMPTY, "nothing"),) if number % 5 == 0 else ()
    pieces = 0 if skipped else 2 if number % 7 == 0 else 1
    trained = np.ones(length, dtype=np.bool_)
    cost = SampleCost(length=length, patches=0, images=0, vision=0.0, language=float(length))
    samples = [EncodedSample(np.full(length, piece), trained, (), (), 0, cost) for piece in range(pieces)]
    return EncodedRecord(tuple(samples), skipped, item)


def records_of(number: int) -> Sequence[EncodedRecord]:
    """Samples of random lengths."""
    items = range(number * WINDOW, (number + 1) * WINDOW)
    return [encoded(item, item, int(np.random.default_rng(item).integers(1, LENGTH + 1))) for item in items]


def sampler(
    *, count: int = 4, packing: bool = True, window: int = WINDOW, epoch: int | None = None
) -> PackedBatchSampler:
    return PackedBatchSampler(
        lambda number: window_of(records_of(number), seq_length=LENGTH, packing=packing),
        count=count,
        windows=Windows(window, epoch, within_epochs=epoch is not None),
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


@pytest.mark.parametrize("lost", [False, True])
def test_replicas_that_lost_other_samples_disagree(lost: bool) -> None:
    rows = [tuple(map(Segment, numbers)) for numbers in ((3, 4), (5,))]
    found = [checksum(rows), checksum(rows), checksum([rows[0][:1], rows[1]] if lost else rows)]
    counts = Counts(checksum=sum(found), squared_checksum=sum(each * each for each in found))
    assert counts.agree(3) is not lost


BAD = Skipped("train.jsonl:3", "train", Reason.MISSING, "no cat.jpg")


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        ((BAD,), r"none of the first 1 record .* 1 × missing_file, as train.jsonl:3"),
        ((), "--validation-split holds out all records of 4 windows"),
    ],
)
def test_data_without_a_usable_sample_says_why(skipped: tuple[Skipped, ...], said: str) -> None:
    given_sampler = PackedBatchSampler(lambda number: Window((), 1, skipped), count=1, windows=Windows(1), seq_length=8)
    with pytest.raises(UserError, match=said):
        given_sampler.batch_at(given_sampler.start)
    given_sampler.close()


def test_a_place_in_other_windows_or_data_is_refused_when_it_is_loaded() -> None:
    """With a remedy that is one: `--load` in a new run would go on at the same place."""
    unused: Any = None
    for other, place, said in (
        (sampler(), sampler(window=10).start, "--packing-window 10"),
        (sampler(), {"consumed_samples": 0}, "other data"),
        (sampler(epoch=20), sampler(epoch=10).start, "epochs of 10 samples, now they have 20"),
    ):
        with pytest.raises(UserError, match=rf"{said}.*export the weights and .*\(--init-from\)"):
            RankLoader(other, unused, dp_rank=0, dp_size=1, micro_batch_size=1).load_state_dict(place)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.text(max_size=4))
def test_a_permutation_reaches_every_number_once(length: int, key: str) -> None:
    assert sorted(permuted(place, length, key=key) for place in range(length)) == list(range(length))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20), st.integers(20, 5000))
def test_shares_are_kept(weights: list[float], total: int) -> None:
    counts = apportioned(weights, total)
    assert sum(counts) == total
    assert min(counts) >= 1
    spare = total - len(weights)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - 1 - weight / sum(weights) * spare) <= 1 + 1e-6


def test_each_epoch_of_a_source_has_every_record_in_another_order() -> None:
    order = Order(lengths=(10, 7), weights=(1.0, 3.0), seed=5)
    places = [order.record(index) for index in range(3 * BLOCK)]
    small = [place for place in places if place.source == 0]
    epochs = [[place.record for place in small if place.epoch == epoch] for epoch in range(20)]
    assert all(sorted(records) == list(range(10)) for records in epochs)
    assert len({tuple(records) for records in epochs}) == 20
    shares = Counter(place.source for place in places[:400])
    assert shares[1] == pytest.approx(300, abs=2), "sources are spread evenly, not one after the other"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.booleans())
def test_without_weights_an_epoch_has_every_record_of_all_sets_once(lengths: list[int], shuffle: bool) -> None:
    order, total = Order(lengths=tuple(lengths), weights=None, seed=5, shuffle=shuffle), sum(lengths)
    every = [(source, record) for source, length in enumerate(lengths) for record in range(length)]
    for epoch in range(2):
        places = [order.record(index) for index in range(epoch * total, (epoch + 1) * total)]
        assert {place.epoch for place in places} == {epoch}
        assert sorted((place.source, place.record) for place in places) == every
    assert order.shares == [length / total for length in lengths]


def test_one_data_set_is_read_alike_with_a_weight_and_without() -> None:
    """So that runs on one data set go on as they began."""
    given, none = (Order(lengths=(30,), weights=weights, seed=5) for weights in ((2.0,), None))
    assert [given.record(index) for index in range(100)] == [none.record(index) for index in range(100)]


def test_the_seed_and_the_index_decide() -> None:
    first, again, other = (Order(lengths=(1000,), weights=(1.0,), seed=seed) for seed in (1, 1, 2))
    assert [first.record(index) for index in (5, 3, 5)] == [again.record(index) for index in (5, 3, 5)]
    assert [first.record(index) for index in range(9)] != [other.record(index) for index in range(9)]


def test_unshuffled_is_the_order_of_the_files() -> None:
    order = Order(lengths=(3,), weights=(1.0,), seed=1, shuffle=False)
    assert [order.record(index) for index in range(4)] == [
        RecordRef(0, 0, 0),
        RecordRef(0, 1, 0),
        RecordRef(0, 2, 0),
        RecordRef(0, 0, 1),
    ]


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
    """Samples of many lengths."""
    return [encoded(sample, sample.record, sample.record * 37 % LENGTH + 1) for sample in samples]


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
            sampler.check(state)  # an interrupted `megavlm logprobs` goes on here
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
