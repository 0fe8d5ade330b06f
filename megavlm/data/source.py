"""Define `Source`, the interface of the samples of a run and of everything that depends on their origin.

Samples have numbers, and any rank of any layout can make any sample. Samples are computed (`ComputedSource`) or read
(`FilesSource`). Callers do not distinguish the two; they use the methods of `Source`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from megavlm.config.schema import Config
from megavlm.data.collate import CollateSpec
from megavlm.data.collator import Collator, ComputedCollator, OwnImages
from megavlm.data.sample_order import in_turn, spread
from megavlm.data.sampler import BatchSampler, SequentialBatchSampler, Windows
from megavlm.data.types import EncodedRecord, HeldOut, Sample, SampleId, Segment
from megavlm.data.workers import WorkerPool
from megavlm.inputs.bad_sample import BadSample, Skipped

_WORD = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class HeldOutPrompt:
    """A prompt of a validation sample, which ends before an answer, and that answer as the `reference`."""

    sample: Sample  # the tokens that the model continues, with their images
    label: str  # as in `chat.jsonl:18`
    question: str  # the question as text, for readers
    reference: str
    pictures: tuple[NDArray[np.uint8], ...]  # [height, width, 3] each, reduced in size, for readers
    kind: str = ""  # for questions scored by exact match, the group whose score it counts for


@dataclass(frozen=True)
class DataSetShare:
    """A data set of a blend: its name, its number of records and its share of the samples."""

    name: str
    records: int
    share: float


class Source(ABC):
    """The samples of a run, its vocabulary size, and its image and padding tokens."""

    names: tuple[str, ...] = ()  # data sets whose losses are reported separately; empty if there is only one
    validation_names: tuple[str, ...] = ()  # data sets of the validation samples, whose losses are measured
    vocab_size: int
    image_token: int
    pad_token: int
    max_answer_tokens = 0  # most tokens of an answer to `questions`, including the end token
    # Whether the first rank of each replica reads the samples and broadcasts them. Else each rank makes its own.
    is_read = False

    @abstractmethod
    def load(self, segment: Segment) -> Sample:
        """Return the sample of a segment with its pixels. Raises BadSample if an image cannot be decoded."""

    @abstractmethod
    def skipped(self, sample_id: SampleId, error: BadSample) -> Skipped:
        """Return the report of a skipped sample."""

    def name(self, sample_id: SampleId) -> tuple[str, str]:
        """Return, for messages, the name of a sample's data set and the label of its record."""
        raise AssertionError("computed samples have no names")

    def worker_pool(self, device: torch.device) -> WorkerPool | None:
        """Return the worker processes of `--num-workers`, if the source uses any; micro-batches are for `device`."""
        return None

    @abstractmethod
    def collator(
        self, spec: CollateSpec, *, own_images: OwnImages | None = None, pool: WorkerPool | None = None
    ) -> Collator:
        """Return the collator. A computed source renders the images that `own_images` chooses, or none without it; a
        source that is read loads all images, in the worker processes of `pool`.
        """

    @abstractmethod
    def sampler(self, config: Config, collator: Collator) -> BatchSampler:
        """Return the batch sampler, which composes global batches."""

    @abstractmethod
    def validation_samples(self, config: Config) -> tuple[HeldOut, ...]:
        """Return the validation samples in reading order. Only one rank calls it, since it may read all data.

        Raises UserError if there are no validation samples, or if none of the first ones can be used.
        """

    @abstractmethod
    def prompts(self, config: Config, samples: Sequence[HeldOut]) -> tuple[HeldOutPrompt, ...]:
        """Return `evaluation.sample_count` prompts from these validation samples, or fewer if there are no more.

        Raises UserError if none of the first samples can be used.
        """

    def questions(self, per_kind: int) -> list[HeldOutPrompt]:
        """Return `per_kind` held-out questions of each kind that is scored by exact match; the same at every call."""
        return []

    def with_shuffled_images(self, questions: Sequence[HeldOutPrompt]) -> list[HeldOutPrompt]:
        """Return the questions with their images exchanged: each has the images of another question."""
        raise AssertionError("this source has no questions")

    @property
    def answer_ends(self) -> tuple[int, ...]:
        """Return the tokens that end an answer."""
        raise AssertionError("this source has no prompts")

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of the generated tokens of an answer."""
        raise AssertionError("this source has no prompts")

    def warnings(self) -> list[str]:
        """Return the warnings to print before a run."""
        return []

    def data_sets(self) -> list[DataSetShare]:
        """Return the data sets of the blend; [] for a source without data sets."""
        return []

    def first_records(self, number: int) -> list[tuple[tuple[int, int], EncodedRecord]]:
        """Return the encoded records of the first `number` samples, each with its (data set, record number)."""
        return []

    def windows(self, config: Config) -> Windows:
        """Return the division of samples into packing windows, with the number of samples of an epoch."""
        raise AssertionError("computed samples have neither windows nor epochs")

    def window_lengths(self, windows: Windows) -> Iterator[tuple[int, list[int]]]:
        """Yield, for the first packing windows, the number of samples and the lengths of the usable samples."""
        raise AssertionError("computed samples have neither windows nor epochs")


class ComputedSource(Source):
    """A map-style source whose samples are computed as a pure function of their number."""

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """Return sample `index`."""

    def validation_sample(self, held_out: HeldOut) -> Sample:
        """Compute a validation sample."""
        raise AssertionError("this source has none")

    def held_out_prompt(self, held_out: HeldOut) -> HeldOutPrompt:
        """Return a validation sample as a prompt."""
        raise AssertionError("this source has none")

    def load(self, segment: Segment) -> Sample:
        if isinstance(segment.sample_id, HeldOut):
            return self.validation_sample(segment.sample_id)
        assert isinstance(segment.sample_id, int)
        return self.sample(segment.sample_id)

    def skipped(self, sample_id: SampleId, error: BadSample) -> NoReturn:
        raise AssertionError("a computed sample cannot be bad")

    def collator(
        self, spec: CollateSpec, *, own_images: OwnImages | None = None, pool: WorkerPool | None = None
    ) -> Collator:
        assert pool is None, "computed samples need no workers"
        return ComputedCollator(self, spec, own_images=own_images)

    def sampler(self, config: Config, collator: Collator) -> BatchSampler:
        return SequentialBatchSampler(count=config.train.global_batch_size)

    def validation_samples(self, config: Config) -> tuple[HeldOut, ...]:
        return spread([range(config.evaluation.eval_samples)] * len(self.validation_names))

    def prompts(self, config: Config, samples: Sequence[HeldOut]) -> tuple[HeldOutPrompt, ...]:
        chosen = islice(in_turn(samples), config.evaluation.sample_count)
        return tuple(self.held_out_prompt(sample) for sample in chosen)


def generator(*, seed: int, index: int, stream: int = 0) -> np.random.Generator:
    """Return the random generator of a sample: the same for the same (seed, index, stream), wherever it is called.

    Philox is counter-based (Salmon et al., 2011): (seed, index) is its key, and streams start at counters that are
    2^192 draws apart, so generators of different addresses never overlap.
    """
    key = np.array([seed & _WORD, index & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
