"""Every layout reads the same global batches, and the state is one integer, which no look ahead moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.config.schema import Config, DataConfig, TrainConfig
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import ComputedCollator, all_images
from megavlm.data.loader import DataLoader, RankLoader, stats
from megavlm.data.sampler import PackedBatchSampler, SequentialBatchSampler, Window, Windows, window_of
from megavlm.data.synthetic import SyntheticSource
from megavlm.data.types import EncodedRecord, LoaderState, Sample
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import Reason, Skipped
from megavlm.inputs.batch import MicroBatch
from tests.support.encoded import LENGTH, encoded

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


def test_stats_sum_to_the_global_batch() -> None:
    whole = stats(steps(loader(micro_batch_size=GLOBAL_BATCH), 1)[0])
    parts = [stats(steps(loader(dp_rank=rank, dp_size=3), 1)[0]) for rank in range(3)]
    for name, total in vars(whole).items():
        assert sum(getattr(part, name) for part in parts) == total
    assert whole.tokens == GLOBAL_BATCH * 40
    source = SyntheticSource(CONFIG)
    samples = [source.sample(index) for index in range(GLOBAL_BATCH)]
    assert whole.images == sum(len(sample.images) for sample in samples)
    assert whole.image_tokens == sum(int(np.sum(sample.tokens == source.image_token)) for sample in samples)
    assert whole.patches == whole.image_tokens, "without pixel shuffle a patch is a token"


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
