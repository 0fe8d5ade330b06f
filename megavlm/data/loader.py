"""Load the data of each step, one step ahead of training.

`RankLoader`, on a rank that reads, assigns the sequences of global batches to data-parallel ranks and micro-batches.
`DataLoader` returns the step's data on every rank of a replica: one rank reads, the others receive by broadcast.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megavlm.arch.packing import imbalance, of_micro_batches, of_ranks
from megavlm.data.broadcast import ReplicaBroadcast
from megavlm.data.collator import Collator
from megavlm.data.sampler import BEGIN_WITH_WEIGHTS, BatchSampler
from megavlm.data.types import CollatedBatch, Imbalance, LoaderState, Segments, StepData
from megavlm.errors import UserError
from megavlm.inputs.batch import MicroBatch

_LOOK = 0.1  # seconds between checks of `unless` while the prefetched step is not ready
_CLOSE = 10.0  # seconds that a thread has to end


class RankLoader:
    """Returns, step by step, this rank's micro-batches of consecutive global batches.

    Global batch k and its state are the same for every layout, so that a run may resume with another layout.
    Sequence j of a global batch goes to micro-batch j // (D·M) of data-parallel rank (j // M) % D, where M is the
    micro-batch size and D the data-parallel size; with `balance`, sequences are assigned so that cost is even.

    One thread prefetches the next step while the current one trains. A prefetched step is not part of the state.
    """

    def __init__(
        self,
        sampler: BatchSampler,
        collator: Collator,
        *,
        dp_rank: int,
        dp_size: int,
        micro_batch_size: int,
        balance: bool = False,
        stage: Callable[[CollatedBatch], MicroBatch] = lambda collated: collated.batch,
    ) -> None:
        """Prepare the loader; reading begins at the first `next_step`.

        `stage` prepares micro-batches for the copy to the device, in the loader's thread.
        """
        assert 0 <= dp_rank < dp_size
        self._sampler = sampler
        self._collator = collator
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._micro_batch_size = micro_batch_size
        self._balance = balance
        self._stage = stage
        self._state = sampler.start
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._prefetched: Future[tuple[StepData, LoaderState]] | None = None

    def next_step(self) -> StepData:
        """Return the data of the next optimizer step. Errors of the data are raised here."""
        pending = self._prefetched or self._thread.submit(self._make, self._state)
        self._prefetched = pending  # `close` looks whether it is done
        wait([pending])
        self._prefetched = None
        step, self._state = pending.result()
        self._prefetched = self._thread.submit(self._make, self._state)
        return step

    def is_ahead(self) -> bool:
        """Return whether no prefetch is in progress: the next step is ready, has failed or has not been started."""
        return self._prefetched is None or self._prefetched.done()

    def failure_ahead(self, *, unless: Callable[[], bool]) -> BaseException | None:
        """Wait until the prefetched step is ready or `unless()` is true; return the error that it raised, if any."""
        while (pending := self._prefetched) is not None and not unless():
            if wait([pending], timeout=_LOOK).done:
                return pending.exception()
        return None

    def state_dict(self) -> LoaderState:
        """Return the state (position in the data) at which the next step begins."""
        return dict(self._state)

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue at a saved state. Raises UserError for the state of another kind of data."""
        if state.keys() != self._sampler.start.keys():
            raise UserError(
                "the checkpoint is of a run on other data, or with --epochs in place of --train-iters, whose position "
                f"has no meaning here: go on with what it had (--data, --datasets, --epochs), or {BEGIN_WITH_WEIGHTS}"
            )
        self._sampler.check(state)  # now, before the options of this start replace those in RUN_DIR/config.yaml
        self._drop_prefetched()
        self._state = dict(state)

    def rewind(self) -> None:
        """Go back to the beginning of the data."""
        self._drop_prefetched()
        self._state = self._sampler.start

    def close(self) -> None:
        """Stop the workers and the thread. The step being prefetched is dropped; a hanging read is abandoned after a
        timeout.
        """
        pending = self._prefetched
        self._drop_prefetched()
        self._collator.close()  # first: the thread may wait for a worker that hangs
        self._sampler.close()  # next: it may wait for a window that will not come
        self._thread.shutdown(wait=False)
        if pending is not None and not pending.cancelled():
            wait([pending], timeout=_CLOSE)

    def _drop_prefetched(self) -> None:
        if self._prefetched is not None:
            self._prefetched.cancel()
        self._prefetched = None

    def _make(self, state: LoaderState) -> tuple[StepData, LoaderState]:
        batch = self._sampler.batch_at(state)
        mine, evenness = self._assigned(batch.sequences)
        collated = self._collator.collate(mine)
        found = tuple(skip for each in collated for skip in each.skipped)
        first = self._dp_rank == 0
        step = StepData(
            batches=[self._stage(each) for each in collated],
            read=batch.read if first else 0,
            skipped=(*batch.skipped, *found) if first else found,
            imbalance=evenness,
            samples=tuple(each.samples for each in collated),
            epochs=batch.epochs,
            last=batch.last,
            checksum=checksum(batch.sequences),
        )
        return step, batch.after

    def _assigned(self, sequences: Sequence[Segments]) -> tuple[list[list[Segments]], Imbalance | None]:
        """Return the sequences of each micro-batch of this rank, and the load imbalance if costs are known."""
        size, ranks = self._micro_batch_size, self._dp_size
        assert len(sequences) % (size * ranks) == 0, "the configuration rules refuse this"
        costs, in_turn = costs_of(sequences), of_ranks(len(sequences), ranks, size)
        evened = costs if self._balance else None
        ranked = in_turn if evened is None else of_ranks(len(sequences), ranks, size, evened)
        mine = [[sequences[j] for j in group] for group in of_micro_batches(ranked[self._dp_rank], size, evened)]
        if costs is None:
            return mine, None
        evenness = Imbalance(
            vision=imbalance(costs[:, 0], ranked),
            language=imbalance(costs[:, 1], ranked),
            vision_before=imbalance(costs[:, 0], in_turn),
            language_before=imbalance(costs[:, 1], in_turn),
        )
        return mine, evenness


class DataLoader:
    """Returns the data of each step on every rank of a model replica, and the state to resume from."""

    def __init__(self, loader: RankLoader | None, *, broadcast: ReplicaBroadcast | None = None) -> None:
        """Prepare the loader of a rank; `loader` is None on a rank that does not read."""
        assert (loader is not None) == (broadcast is None or broadcast.reads)
        self._loader = loader
        self._broadcast = broadcast
        self._peeked: tuple[LoaderState | None, StepData] | None = None

    def peek(self) -> StepData:
        """Return the data of the next step without advancing. Every rank of a replica must call it."""
        if self._peeked is None:
            state = self._own_state()
            self._peeked = state, self._read()
        return self._peeked[1]

    def share_ahead(self, *, ready: bool) -> None:
        """Broadcast the next step's data now if they are prefetched, so that `next_step` does not wait for other ranks.

        Every rank of a replica calls it while its device computes. `ready` counts on the reading rank only: it says
        that the data are prefetched without an error.
        """
        if self._peeked is None and self._broadcast is not None and self._broadcast.replica.size() > 1:
            state = self._own_state()
            step = self._broadcast.share(lambda: self._own.next_step() if ready else None)
            self._peeked = None if step is None else (state, step)

    def next_step(self) -> StepData:
        """Return the data of the next optimizer step. A UserError of the reader is raised on all ranks of a replica."""
        if self._peeked is None:
            return self._read()
        (_, step), self._peeked = self._peeked, None
        return step

    def rewind(self) -> None:
        """Go back to the beginning of the data."""
        if self._loader is not None:
            self._loader.rewind()

    def is_ahead(self) -> bool:
        """Return whether no prefetch is in progress (see `RankLoader.is_ahead`); True on a rank that does not read."""
        return self._loader is None or self._loader.is_ahead()

    def failure_ahead(self, *, unless: Callable[[], bool]) -> BaseException | None:
        """Wait until the prefetched step is ready or `unless()` is true; return the error that it raised, if any.

        The next step then raises this error on all ranks of the replica; the ranks of other replicas do not know.
        """
        return None if self._loader is None else self._loader.failure_ahead(unless=unless)

    def _read(self) -> StepData:
        if self._broadcast is None:
            return self._own.next_step()
        step = self._broadcast.share(lambda: self._own.next_step())
        assert step is not None, "the reader returns one"
        return step

    def state_dict(self) -> LoaderState:
        """Return the state at which the next step begins. Every rank must call it, since it is broadcast."""
        own = self._own_state() if self._peeked is None else self._peeked[0]
        if self._broadcast is not None:
            own = self._broadcast.share_state(own)
        assert own is not None
        return own

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue at a saved state. Raises UserError for the state of another kind of data."""
        self._peeked = None
        if self._loader is not None:
            self._loader.load_state_dict(state)

    def close(self) -> None:
        """Stop prefetching, and the workers."""
        if self._loader is not None:
            self._loader.close()

    def _own_state(self) -> LoaderState | None:
        """Return the state at which this rank's loader begins its next step; None on a rank that does not read."""
        return None if self._loader is None else self._loader.state_dict()

    @property
    def _own(self) -> RankLoader:
        assert self._loader is not None
        return self._loader


def checksum(sequences: Sequence[Segments]) -> int:
    """Return a number of 20 bits that differs, but for chance, if other samples are in the sequences."""
    samples = repr([[segment.sample_id for segment in segments] for segments in sequences])
    return zlib.crc32(samples.encode()) % 2**20


def costs_of(sequences: Sequence[Segments]) -> NDArray[np.float64] | None:
    """Return the forward FLOPs [sequences, 2] of vision and of language; None if a sample was not encoded."""
    encoded = [[segment.encoded for segment in segments] for segments in sequences]
    known = [[each.cost for each in row if each is not None] for row in encoded]
    if any(len(row) < len(all_) for row, all_ in zip(known, encoded, strict=True)):
        return None
    return np.array([[sum(cost.vision for cost in row), sum(cost.language for cost in row)] for row in known])


def pinned(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return a micro-batch ready for the copy to `device`: for a GPU in pinned memory, so that the copy overlaps with
    computation.
    """
    pins = device.type == "cuda"
    # In a new thread the current device is number 0, and pinning memory would create a CUDA context on it.
    with torch.cuda.device(device) if pins else nullcontext():
        tensors = {
            name: _pinned(each) if pins and not each.is_pinned() else each
            for name, each in batch.host_tensors().items()
        }
    return batch.with_tensors(tensors)


def _pinned(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)
