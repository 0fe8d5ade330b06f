"""Sources of samples: map-style (samples by number) or iterable (samples of a stream).

As in torch.utils.data, there are two styles. The samples of a map-style source (`ComputedSource`, `FilesSource`) are
numbered, and any rank of any layout can make any of them; an iterable source (`StreamSource`) is read in order, each
data-parallel rank a part of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from megavlm.data.types import HeldOut, Sample, SampleId, Segment, Skipped
from megavlm.inputs.bad_sample import BadSample

_WORD = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class HeldOutPrompt:
    """A validation sample up to an answer of it, and that answer, the `reference`."""

    sample: Sample  # the tokens that the model continues, with the images in them
    label: str  # as in `chat.jsonl:18`
    question: str  # what is asked, as a reader sees it
    reference: str
    pictures: tuple[NDArray[np.uint8], ...]  # [height, width, 3] each, for readers: reduced


class Source(Protocol):
    """The samples of a run, and the tokens that have a meaning to the model."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the data sets whose losses are reported separately; empty if there is only one."""
        ...

    @property
    def validation_names(self) -> tuple[str, ...]:
        """Return the data sets that are not trained on, whose losses are measured."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def image_token(self) -> int: ...

    @property
    def pad_token(self) -> int: ...

    def load(self, segment: Segment) -> Sample:
        """Return the sample of a segment with its pixels. Raises BadSample if an image cannot be decoded."""
        ...

    def skipped(self, sample_id: SampleId, error: BadSample) -> Skipped:
        """Return the report of a sample that is left out."""
        ...


class ComputedSource(ABC):
    """A map-style source whose samples are a pure function of their number."""

    names: tuple[str, ...] = ()
    validation_names: tuple[str, ...] = ()
    vocab_size: int
    image_token: int
    pad_token: int

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """Return sample `index`."""

    def validation_sample(self, held_out: HeldOut) -> Sample:
        """Return a validation sample."""
        raise AssertionError("this source has none")

    def held_out_prompt(self, held_out: HeldOut) -> HeldOutPrompt:
        """Return a validation sample as a prompt."""
        raise AssertionError("this source has none")

    @property
    def answer_ends(self) -> tuple[int, ...]:
        """Return the tokens before which an answer ends."""
        raise AssertionError("this source has no prompts")

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated tokens."""
        raise AssertionError("this source has no prompts")

    def load(self, segment: Segment) -> Sample:
        if isinstance(segment.sample_id, HeldOut):
            return self.validation_sample(segment.sample_id)
        assert isinstance(segment.sample_id, int)
        return self.sample(segment.sample_id)

    def skipped(self, sample_id: SampleId, error: BadSample) -> NoReturn:
        raise AssertionError("a computed sample cannot be bad")


def generator(*, seed: int, index: int, stream: int = 0) -> np.random.Generator:
    """Return the random generator of a sample: the same for the same (seed, index, stream), wherever it is called.

    Philox is counter-based (Salmon et al., 2011): (seed, index) is its key, and streams start at counters that are
    2^192 draws apart, so generators of different addresses never overlap.
    """
    key = np.array([seed & _WORD, index & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
