"""Encode and collate samples, in the calling thread or in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from megavlm.data.collate import CollateSpec, collate, collate_images
from megavlm.data.files import FilesSource
from megavlm.data.reads import Reads
from megavlm.data.source import ComputedSource
from megavlm.data.types import EncodedRecord, Sample, SampleId, Segments, Skipped
from megavlm.data.workers import TellingSource, Told, WorkerPool
from megavlm.inputs.bad_sample import BadSample
from megavlm.inputs.batch import ImageSizes, Mask, MicroBatch

Result = TypeVar("Result")

# A worker encodes this many samples per task, so that the time of sending the task does not count.
_SAMPLES_PER_TASK = 32


@dataclass(frozen=True)
class CollatedBatch:
    """A micro-batch, and the samples that were left out of it."""

    batch: MicroBatch
    skipped: tuple[Skipped, ...] = ()


class Collator(Protocol):
    """Makes the micro-batches of a step."""

    def collate(self, micro_batches: Sequence[Sequence[Segments]]) -> list[CollatedBatch]:
        """Collate each list of sequences into one micro-batch; return the micro-batches in order."""
        ...

    def close(self) -> None:
        """Free what the collator holds."""
        ...


class ComputedCollator:
    """Collates computed samples, with the images that this rank encodes. No other image is rendered."""

    def __init__(
        self,
        source: ComputedSource,
        spec: CollateSpec,
        *,
        with_patches: bool = True,
        own_images: Callable[[Sequence[ImageSizes]], Sequence[Mask]] | None = None,
    ) -> None:
        """`with_patches`: this rank encodes images. `own_images` returns, from the sizes of a step's images by
        micro-batch, which of them it encodes; None: all.
        """
        self._source = source
        self._spec = spec
        self._with_patches = with_patches
        self._own_images = own_images

    def collate(self, micro_batches: Sequence[Sequence[Segments]]) -> list[CollatedBatch]:
        rows = [
            [[self._source.load(segment) for segment in segments] for segments in sequences]
            for sequences in micro_batches
        ]
        batches = [collate(each, self._spec, with_patches=False) for each in rows]
        if self._with_patches:
            chosen: Sequence[Mask | None] = [None] * len(batches)
            if self._own_images is not None:
                chosen = self._own_images([batch.image_sizes for batch in batches])
            images = [collate_images(each, self._spec, mask) for each, mask in zip(rows, chosen, strict=True)]
            batches = [replace(batch, images=each) for batch, each in zip(batches, images, strict=True)]
        return [CollatedBatch(batch) for batch in batches]

    def close(self) -> None:
        pass


class FileCollator:
    """Encodes the records of files (template, tokens, image sizes), and collates them with all of their images.

    An image that cannot be decoded is only detected here: its sample is left out of its sequence, and reported.
    """

    def __init__(
        self, source: FilesSource, spec: CollateSpec, *, pool: WorkerPool | None = None, reads: Reads | None = None
    ) -> None:
        """Without `pool` the calling thread does the work and tells `reads` of each sample. `close` closes the pool."""
        self._source = source
        self._reads = reads or Reads(0)
        self._collate = partial(collate_segments, spec=spec)
        self._pool = pool

    def collate(self, micro_batches: Sequence[Sequence[Segments]]) -> list[CollatedBatch]:
        return self._map(self._collate, micro_batches)

    def encode(self, samples: Sequence[SampleId]) -> list[EncodedRecord]:
        """Return the encoded records of samples, in order. A record that comes several times is encoded once."""
        places = [self._source.place(sample) for sample in samples]
        distinct = dict(zip(places, samples, strict=True))
        once = list(distinct.values())
        tasks = [once[i : i + _SAMPLES_PER_TASK] for i in range(0, len(once), _SAMPLES_PER_TASK)]
        encoded = [record for records in self._map(_encode_samples, tasks) for record in records]
        found = dict(zip(distinct, encoded, strict=True))
        return [replace(found[place], sample_id=sample) for place, sample in zip(places, samples, strict=True)]

    def close(self) -> None:
        """End the workers; what they do is dropped."""
        if self._pool is not None:
            self._pool.close()

    def _map(self, function: Callable[[Any, Any], Result], tasks: Sequence[Any]) -> list[Result]:
        """Return `function(source, task)` of each task."""
        if self._pool is not None:
            return self._pool.map(function, tasks)
        telling = TellingSource(self._source, self._tell)
        with self._reads.reading(lambda: "data"):
            return [function(telling, task) for task in tasks]

    def _tell(self, told: Told) -> None:
        self._reads.begin(lambda: f"sample {told[2]}")


def _encode_samples(source: FilesSource, samples: Sequence[SampleId]) -> list[EncodedRecord]:
    return [source.encode(sample_id) for sample_id in samples]


def collate_segments(source: FilesSource, rows: Sequence[Segments], *, spec: CollateSpec) -> CollatedBatch:
    """Return one micro-batch; a sample whose images cannot be decoded is left out of its sequence."""
    skipped: list[Skipped] = []
    loaded: list[list[Sample]] = []
    for segments in rows:
        loaded.append([])
        for segment in segments:
            try:
                loaded[-1].append(source.load(segment))
            except BadSample as error:
                skipped.append(source.skipped(segment.sample_id, error))
    return CollatedBatch(collate(loaded, spec), tuple(skipped))
