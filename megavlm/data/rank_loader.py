"""From global batches to the micro-batches of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megavlm.data.balance import assign, imbalance
from megavlm.data.batch import MicroBatch
from megavlm.data.batch_sampler import BatchSampler, LoaderState, Segments, Skipped
from megavlm.data.collator import Collator
from megavlm.errors import UserError


@dataclass(frozen=True)
class Imbalance:
    """Largest load over the mean load of the data-parallel ranks, before and after balancing."""

    vision: float
    language: float
    vision_before: float
    language_before: float


@dataclass(frozen=True)
class StepData:
    """What one optimizer step trains on, on this rank."""

    batches: list[MicroBatch]
    read: int  # samples that were looked at for it, counted by data-parallel rank 0
    skipped: tuple[Skipped, ...]  # counted by the rank that made them, or 0 where they were never dealt out
    imbalance: Imbalance | None  # None where nothing is measured


class RankLoader:
    """Hands out, step by step, this rank's share of consecutive global batches.

    Global batch k is the same for every layout, and the place in the data is plain data that knows no layout, so a run
    may resume with any other. Sequence j of a global batch goes to micro-batch j // (D·M) of data-parallel rank
    (j // M) % D, where M is the micro-batch size and D the data-parallel size; with `balance`, to where its cost fits.

    One thread prepares the next step while the current one trains. What it holds is not part of the state.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        collator: Collator,
        *,
        dp_rank: int,
        dp_size: int,
        micro_batch_size: int,
        global_batch_size: int,
        balance: bool = False,
        alone: bool = False,
        stage: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
    ) -> None:
        """`alone`: the data of other ranks is not known here, so loads cannot be compared with theirs. `stage` makes
        micro-batches ready for the device, in the thread.
        """
        assert 0 <= dp_rank < dp_size
        assert global_batch_size % (micro_batch_size * dp_size) == 0, "the configuration rules refuse this"
        self.num_microbatches = global_batch_size // (micro_batch_size * dp_size)
        self._sampler = sampler
        self._collator = collator
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._micro_batch_size = micro_batch_size
        self._balance = balance
        self._alone = alone
        self._stage = stage
        self._place = sampler.start
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._prefetched: Future[tuple[StepData, LoaderState]] | None = None

    def next_step(self) -> StepData:
        """What the next optimizer step trains on. Errors of the source are raised here."""
        pending = self._prefetched or self._thread.submit(self._make, self._place)
        self._prefetched = None
        step, self._place = pending.result()
        self._prefetched = self._thread.submit(self._make, self._place)
        return step

    def next_batches(self) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step."""
        return self.next_step().batches

    def state_dict(self) -> LoaderState:
        """Where the next step begins."""
        return dict(self._place)

    def load_state_dict(self, state: LoaderState) -> None:
        """Raises UserError for the place in data of another kind."""
        if state.keys() != self._sampler.start.keys():
            raise UserError(
                "the checkpoint is of a run on other data, whose place cannot be taken up: begin a new run with --load "
                "and another --run-dir, or go on with the data (--data, --datasets) that it had"
            )
        self._drop_prefetched()
        self._place = dict(state)

    def close(self) -> None:
        """Stop the thread and the workers; a step in preparation is finished and dropped."""
        self._drop_prefetched()
        self._thread.shutdown(wait=True)
        self._sampler.close()
        self._collator.close()

    def _drop_prefetched(self) -> None:
        if self._prefetched is not None:
            self._prefetched.cancel()
        self._prefetched = None

    def _make(self, place: LoaderState) -> tuple[StepData, LoaderState]:
        batch = self._sampler.batch_at(place)
        dealt, evenness = self._dealt(batch.sequences)
        made = self._collator.make(dealt)
        found = tuple(skip for each in made for skip in each.skipped)
        first = self._dp_rank == 0
        step = StepData(
            batches=[self._stage(each.batch) for each in made],
            read=batch.read if first else 0,
            skipped=(*batch.skipped, *found) if first else found,
            imbalance=evenness,
        )
        return step, batch.after

    def _dealt(self, sequences: Sequence[Segments]) -> tuple[list[list[Segments]], Imbalance | None]:
        """This rank's micro-batches."""
        size, ranks = self._micro_batch_size, self._dp_size
        in_turn = [
            [start + place for start in range(rank * size, len(sequences), ranks * size) for place in range(size)]
            for rank in range(ranks)
        ]
        costs = costs_of(sequences)
        if costs is None:
            mine = in_turn[self._dp_rank]
            return [[sequences[j] for j in mine[i : i + size]] for i in range(0, len(mine), size)], None
        ranked = assign(costs, ranks) if self._balance else in_turn
        evenness = Imbalance(
            vision=imbalance(costs[:, 0], ranked),
            language=imbalance(costs[:, 1], ranked),
            vision_before=imbalance(costs[:, 0], in_turn),
            language_before=imbalance(costs[:, 1], in_turn),
        )
        mine = ranked[self._dp_rank]
        groups = [list(range(i, i + size)) for i in range(0, len(mine), size)]
        if self._balance:
            groups = assign(costs[mine], self.num_microbatches)
        dealt = [[sequences[mine[place]] for place in group] for group in groups]
        return dealt, None if self._alone else evenness


def costs_of(sequences: Sequence[Segments]) -> NDArray[np.float64] | None:
    """[sequences, 2]: forward FLOPs of vision and of language; None where samples were not measured."""
    measures = [[member.measure for member in members] for members in sequences]
    known = [[measure for measure in row if measure is not None] for row in measures]
    if any(len(row) < len(all_) for row, all_ in zip(known, measures, strict=True)):
        return None
    return np.array([[sum(m.vision for m in row), sum(m.language for m in row)] for row in known])


@dataclass(frozen=True)
class BatchStats:
    """What was in a rank's micro-batches; sums over data-parallel ranks give the global batch."""

    tokens: int  # language positions, image tokens included, padding not
    places: int  # the same with padding
    image_tokens: int
    images: int
    patches: int


def stats(batches: Sequence[MicroBatch]) -> BatchStats:
    """Count the contents of micro-batches (from shapes: nothing is read back from a device)."""
    return BatchStats(
        tokens=sum(batch.num_tokens for batch in batches),
        places=sum(batch.tokens.numel() for batch in batches),
        image_tokens=sum(batch.feature_positions.numel() for batch in batches),
        images=sum(batch.num_images for batch in batches),
        patches=sum(batch.num_patches for batch in batches),
    )
