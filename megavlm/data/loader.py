"""From the endless stream of samples to the micro-batches of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from megavlm.data.batch import PackedBatch
from megavlm.data.source import Source, batch_of


class Loader:
    """Hands out, step by step, this rank's share of consecutive global batches.

    Global batch k is samples k·G … (k+1)·G−1 of the source for every layout. Sample j of it goes to micro-batch
    j // (D·M) of data-parallel rank (j // M) % D, where M is the micro-batch size and D the data-parallel size, so the
    number of consumed samples is all the state there is, and a run may resume with any other layout.

    One thread prepares the next step while the current one trains. What it holds is not part of the state.
    """

    def __init__(
        self,
        source: Source,
        *,
        dp_rank: int,
        dp_size: int,
        micro_batch_size: int,
        global_batch_size: int,
        seq_length: int,
        with_patches: bool,
    ) -> None:
        assert 0 <= dp_rank < dp_size
        assert global_batch_size % (micro_batch_size * dp_size) == 0, "the configuration rules refuse this"
        self.num_microbatches = global_batch_size // (micro_batch_size * dp_size)
        self._source = source
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._seq_length = seq_length
        self._with_patches = with_patches
        self._consumed_samples = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._prefetched: Future[list[PackedBatch]] | None = None

    def next_batches(self) -> list[PackedBatch]:
        """The micro-batches of the next optimizer step. Errors of the source are raised here."""
        pending = self._prefetched or self._thread.submit(self._make, self._consumed_samples)
        self._prefetched = None
        batches = pending.result()
        self._consumed_samples += self._global_batch_size
        self._prefetched = self._thread.submit(self._make, self._consumed_samples)
        return batches

    def state_dict(self) -> dict[str, int]:
        """Samples handed out so far, over all ranks."""
        return {"consumed_samples": self._consumed_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._drop_prefetched()
        self._consumed_samples = state["consumed_samples"]

    def close(self) -> None:
        """Stop the thread; a step in preparation is finished and dropped."""
        self._drop_prefetched()
        self._thread.shutdown(wait=True)

    def _drop_prefetched(self) -> None:
        if self._prefetched is not None:
            self._prefetched.cancel()
        self._prefetched = None

    def _make(self, first_sample: int) -> list[PackedBatch]:
        stride = self._dp_size * self._micro_batch_size
        starts = range(
            first_sample + self._dp_rank * self._micro_batch_size, first_sample + self._global_batch_size, stride
        )
        return [self._micro_batch(start) for start in starts]

    def _micro_batch(self, start: int) -> PackedBatch:
        samples = [self._source.sample(index) for index in range(start, start + self._micro_batch_size)]
        return batch_of(self._source, samples, seq_length=self._seq_length, with_patches=self._with_patches)


@dataclass(frozen=True)
class BatchStats:
    """What was in a rank's micro-batches; sums over data-parallel ranks give the global batch."""

    tokens: int  # language positions, image tokens included, padding not
    image_tokens: int
    images: int
    patches: int


def stats(batches: Sequence[PackedBatch]) -> BatchStats:
    """Count the contents of micro-batches (from shapes: nothing is read back from a device)."""
    return BatchStats(
        tokens=sum(batch.num_tokens for batch in batches),
        image_tokens=sum(batch.feature_positions.numel() for batch in batches),
        images=sum(batch.num_images for batch in batches),
        patches=sum(batch.num_patches for batch in batches),
    )
