"""Random records of pairs for benchmarks and tests: a query, a document that answers it, sometimes a negative."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megavlm.config.schema import Config
from megavlm.data.members import NEGATIVE, POSITIVE, QUERY, Member, identity_of
from megavlm.data.source import ComputedSource
from megavlm.data.synthetic import VOCABULARY, SyntheticSource
from megavlm.data.types import Sample
from megavlm.rules.defaults import resolve

_PARTS = 4  # of a sequence, which is cut evenly: a text has one or two of them
_SAME = 5  # one of so many records has the document of the record before it


class SyntheticPairs(ComputedSource):
    """Records of samples of `SyntheticSource` with shorter sequences.

    The query is one of them without images, the document one with its images. Each second record also has a negative,
    whose images are another sample's. Now and then a document is said to be the same as that of the record before.
    """

    def __init__(self, config: Config) -> None:
        """Raises UserError if a fourth of `--seq-length` is too short for a document."""
        config = resolve(config, vocab_size=VOCABULARY)
        length = config.train.seq_length // _PARTS
        self._with_images = SyntheticSource(replace(config, train=replace(config.train, seq_length=length)))
        self.vocab_size = self._with_images.vocab_size
        self.image_token = self._with_images.image_token
        self.pad_token = self._with_images.pad_token

    def sample(self, index: int) -> Sample:
        """Return record `index`. Its query is as long as fits beside its documents, or shorter."""
        document = self._with_images.sample(3 * index)
        other = self._with_images.sample(3 * index + 1)
        query = self._with_images.sample(3 * index + 2)
        shown = query if index % 3 == 1 else _without_images(query, self._with_images.image_token)
        named = index - 1 if index % _SAME == _SAME - 1 else index
        texts = [(QUERY, shown, ""), (POSITIVE, document, f"document {named}")]
        texts += [(NEGATIVE, other, f"other {index}")] if index % 2 else []
        return joined([(role, text, identity_of(name)) for role, text, name in texts])


def joined(texts: list[tuple[int, Sample, int]], *, source: int = 0) -> Sample:
    """Return a record of pairs of texts with their roles and identities, the query first."""
    return Sample(
        tokens=np.concatenate([text.tokens for _, text, _ in texts]),
        trained=np.concatenate([text.trained for _, text, _ in texts]),
        images=tuple(image for _, text, _ in texts for image in text.images),
        tile_groups=tuple(group for _, text, _ in texts for group in text.tile_groups),
        source=source,
        members=tuple(Member(role, identity, len(text), len(text.images)) for role, text, identity in texts),
    )


def _without_images(sample: Sample, image_token: int) -> Sample:
    kept = sample.tokens != image_token
    return Sample(sample.tokens[kept], sample.trained[kept])
