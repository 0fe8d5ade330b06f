"""`Source`: the samples of a run, and everything that depends on where they come from.

Samples have numbers, and any rank of any layout can make any of them. They are computed (`ComputedSource`) or read
(`FilesSource`). No caller asks which kind a source is; it asks the source.
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
    """A validation sample up to an answer of it, and that answer, the `reference`."""

    sample: Sample  # the tokens that the model continues, with the images in them
    label: str  # as in `chat.jsonl:18`
    question: str  # what is asked, as a reader sees it
    reference: str
    pictures: tuple[NDArray[np.uint8], ...]  # [height, width, 3] each, for readers: reduced
    kind: str = ""  # the group of its score, of questions that are scored by exact match


@dataclass(frozen=True)
class DataSetShare:
    """A data set of a blend: its name, its number of records and its share of the samples."""

    name: str
    records: int
    share: float


class Source(ABC):
    """The samples of a run, and the tokens that have a meaning to the model."""

    names: tuple[str, ...] = ()  # data sets whose losses are reported separately; empty if there is only one
    validation_names: tuple[str, ...] = ()  # data sets that are not trained on, whose losses are measured
    vocab_size: int
    image_token: int
    pad_token: int
    max_answer_tokens = 0  # of `questions`, the token that ends an answer included
    # Whether the first rank of each replica reads and sends the others what they need. Else each rank makes its own.
    is_read = False

    @abstractmethod
    def load(self, segment: Segment) -> Sample:
        """Return the sample of a segment with its pixels. Raises BadSample if an image cannot be decoded."""

    @abstractmethod
    def skipped(self, sample_id: SampleId, error: BadSample) -> Skipped:
        """Return the report of a sample that is left out."""

    def name(self, sample_id: SampleId) -> tuple[str, str]:
        """Return the names of a sample's data set and of the sample in messages."""
        raise AssertionError("computed samples have no names")

    def worker_pool(self, device: torch.device) -> WorkerPool | None:
        """Return the processes of `--num-workers`, if the source has a use for them; what they make is for `device`."""
        return None

    @abstractmethod
    def collator(
        self, spec: CollateSpec, *, own_images: OwnImages | None = None, pool: WorkerPool | None = None
    ) -> Collator:
        """Return what makes micro-batches. A source that is not read renders the images that `own_images` chooses, and
        none without it; one that is read loads all, in the worker processes of `pool`.
        """

    @abstractmethod
    def sampler(self, config: Config, collator: Collator) -> BatchSampler:
        """Return what chooses the samples of global batches."""

    @abstractmethod
    def validation_samples(self, config: Config) -> tuple[HeldOut, ...]:
        """Return the validation samples in the order in which they are read. One rank calls it: it may read all data.

        Raises UserError if there are none, or none that can be used among the first.
        """

    @abstractmethod
    def prompts(self, config: Config, samples: Sequence[HeldOut]) -> tuple[HeldOutPrompt, ...]:
        """Return `evaluation.sample_count` prompts of these samples, or fewer where there are no more.

        Raises UserError if none of the first samples can be used.
        """

    def questions(self, per_kind: int) -> list[HeldOutPrompt]:
        """Return `per_kind` held-out questions of each kind that a run scores by exact match, always the same ones."""
        return []

    def with_shuffled_images(self, questions: Sequence[HeldOutPrompt]) -> list[HeldOutPrompt]:
        """Return the same questions, each with the images of another one."""
        raise AssertionError("this source has no questions")

    @property
    def answer_ends(self) -> tuple[int, ...]:
        """Return the tokens before which an answer ends."""
        raise AssertionError("this source has no prompts")

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated tokens."""
        raise AssertionError("this source has no prompts")

    def warnings(self) -> list[str]:
        """Return the warnings to print before a run."""
        return []

    def data_sets(self) -> list[DataSetShare]:
        """Return the data sets that the samples come from, if they come from any."""
        return []

    def first_records(self, number: int) -> list[tuple[tuple[int, int], EncodedRecord]]:
        """Return the first samples of data sets, each with its data set and its number there."""
        return []

    def windows(self, config: Config) -> Windows:
        """Return the packing windows of data that are read, with the number of samples of an epoch."""
        raise AssertionError("computed samples have neither windows nor epochs")

    def window_lengths(self, windows: Windows) -> Iterator[tuple[int, list[int]]]:
        """Yield how many samples each of the first windows has, and the lengths of those that can be used."""
        raise AssertionError("computed samples have neither windows nor epochs")


class ComputedSource(Source):
    """A map-style source whose samples are a pure function of their number."""

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """Return sample `index`."""

    def validation_sample(self, held_out: HeldOut) -> Sample:
        """Return a validation sample."""
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
