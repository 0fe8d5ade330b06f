"""Define the data types between a record and a micro-batch, in the order of the data flow.

Conversation   a record as it was read          Sample        the tokens of a sequence, with access to its pixels
EncodedSample  its tokens, pixels not read      GlobalBatch   the packed sequences of one optimizer step
Segment        an encoded sample in a sequence  StepData      the micro-batches of one rank
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.image_tokens import Grid, TileGroup
from megavlm.inputs.bad_sample import Skipped
from megavlm.paths import FileRange
from megavlm.storage.transfer import StoredFile

if TYPE_CHECKING:
    from megavlm.inputs.batch import MicroBatch
    from megavlm.inputs.layout import Film
    from megavlm.inputs.patches import Image, LoadedImage
    from megavlm.inputs.sounds import Sound

# --- Records

Role = Literal["system", "user", "assistant", "untrained", "text", "query", "positive", "negative"]


@dataclass(frozen=True)
class ImageRef:
    """An image that has not been opened: its encoded bytes, or a file whose path has been checked.

    `min_pixels` and `max_pixels` are from the record: bounds of its size in place of the image processor's.
    """

    source: bytes | Path | StoredFile
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class VideoRef:
    """A clip that has not been opened: a video file, or its frames as images.

    All else is from the record: `fps` is the rate at which to sample frames of a file, or at which the given frames
    were sampled, `video_start` and `video_end` are the seconds between which they lie, `max_pixels` bounds a frame.
    """

    source: bytes | Path | StoredFile | FileRange | tuple[ImageRef, ...]
    fps: float | None = None
    video_start: float | None = None
    video_end: float | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class SoundRef:
    """A sound that has not been opened: its encoded bytes, or a file whose path has been checked."""

    source: bytes | Path | StoredFile


Visual = ImageRef | VideoRef | SoundRef  # what a text has beside words; sounds are handled as images and videos are


@dataclass(frozen=True)
class Turn:
    """A message of one speaker: text, images, videos, sounds, in order. Plain text is one turn of the role `text`, and
    an answer of the assistant that has no loss one of `untrained`.
    """

    role: Role
    parts: tuple[str | Visual, ...]

    @property
    def speaker(self) -> str:
        """Return the role as templates know it."""
        return "assistant" if self.role == "untrained" else self.role

    @property
    def images(self) -> tuple[Visual, ...]:
        """Return the images, videos and sounds of the turn, in order."""
        return tuple(part for part in self.parts if not isinstance(part, str))


@dataclass(frozen=True)
class Conversation:
    """The turns of one record. For a record of pairs, the turns are its texts; equal texts have equal `identities`.

    A preference has the turns of two conversations, first the one with the chosen answer. `answers` are the numbers of
    turns of the two, `identities` the identities of their contents. For a rated answer, one of the two conversations
    has no turns and no identity. `margin` is what the chosen answer's score shall lead by.
    """

    turns: tuple[Turn, ...]
    identities: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()
    margin: float = 0.0

    def conversations(self) -> Iterator[Conversation]:
        """Yield the one or two conversations of a preference, the chosen one first."""
        start = 0
        for count in filter(None, self.answers):
            yield Conversation(self.turns[start : start + count])
            start += count

    def texts(self) -> Iterator[Conversation | Turn]:
        """Yield what the model sees apart: the conversations of a preference, the texts of a pair, or all of it."""
        if self.answers:
            yield from self.conversations()
        elif self.identities:
            yield from self.turns
        else:
            yield self

    @property
    def images(self) -> tuple[Visual, ...]:
        """Return the images, videos and sounds of all turns, in order."""
        return tuple(image for turn in self.turns for image in turn.images)


@dataclass(frozen=True)
class HeldOut:
    """Address of a validation sample: the index of its validation set, and its record number in that set."""

    source: int
    record: int


# Identifies a sample: its number in the shuffled blend, or its address in a validation set.
SampleId = int | HeldOut


# --- Samples

WITHOUT_VISION = (
    "a language model alone (model.vision.num_layers 0) reads no images: name a vision-language model, or leave the "
    "images out"
)
RECORD, ROLE, ID, SOURCE = range(4)  # columns of `TextBatch.members`
QUERY, POSITIVE, NEGATIVE, PADDING = 0, 1, 2, -1  # roles


@dataclass(frozen=True)
class Member:
    """One text of a sample of several texts: `length` tokens with `images` images and videos, and `sounds`.

    The loss treats documents with equal `identity` as the same document: they are not negatives of a query for which
    one of them is a positive.
    """

    role: int
    identity: int
    length: int
    images: int = 0
    sounds: int = 0
    margin: float = 0.0  # of a chosen answer: what its score shall lead by


def identity_of(*parts: str | bytes) -> int:
    """Return the identity of a text, a hash of 62 bits of its id or content: equal parts give equal numbers."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest(), "little") >> 2


@dataclass(frozen=True)
class SampleCost:
    """Forward FLOPs of a sample of `length` tokens.

    `vision` are the FLOPs of the vision tower and the projector, attention included: c·Σp² + d·Σp over images of p
    patches. `language` is a·l² + b·l.
    """

    length: int
    patches: int
    images: int
    vision: float
    language: float


@dataclass(frozen=True)
class StoredImage:
    """An image or a video whose header has been read, but not its pixels; or a sound of known length."""

    number: int  # index among the images, videos and sounds of its record
    grids: tuple[Grid, ...]  # of patches of the image, of each of its tiles, or of each group of a video's frames
    arrangement: tuple[int, int]  # (rows, columns) of the tiles that the image is cut into; (0, 0) if it is not cut
    film: Film | None = None  # of a video
    frames: int = 0  # mel frames of a sound, or of the sound of a video


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """A sample of L tokens, rendered with the chat template and tokenized. The pixels of its images are not read."""

    tokens: NDArray[np.int64]  # [L]
    trained: NDArray[np.bool_]  # [L]; the tokens that the model learns to predict (the answers)
    images: tuple[StoredImage, ...]  # sounds among them
    tile_groups: tuple[TileGroup, ...]
    source: int
    cost: SampleCost
    members: tuple[Member, ...] = ()  # the texts of a record of pairs or of a preference


@dataclass(frozen=True, eq=False)
class EncodedRecord:
    """The samples that a record was split into (usually one), and the parts of it that were left out."""

    samples: tuple[EncodedSample, ...]
    skipped: tuple[Skipped, ...] = ()
    sample_id: SampleId | None = None  # set by the collator, not by workers


Picture: TypeAlias = "Image | LoadedImage"  # an image or a video as patches; its sizes are known before they are made


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of L tokens with its images, in the order of their tokens.

    If the model tiles images, `tile_groups` groups consecutive tiles into images.
    """

    tokens: NDArray[np.int64]  # [L], each image expanded to one image token per feature
    trained: NDArray[np.bool_]  # [L]; the tokens that the model learns to predict (the answers)
    images: tuple[Picture, ...] = ()
    tile_groups: tuple[TileGroup, ...] = ()
    source: int = 0  # index of its data set
    # The texts of a record of pairs or of a preference, in the order of their tokens and images; else empty.
    members: tuple[Member, ...] = ()
    sounds: tuple[Sound, ...] = ()  # in the order of their tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def texts(self) -> tuple[Sample, ...]:
        """Split a sample of several texts (`members`) into one sample per text; any other sample is returned alone."""
        if len(self.members) <= 1:
            return (self,)
        found, token, pictures, groups, sounds = [], 0, iter(self.images), iter(self.tile_groups), iter(self.sounds)
        for member in self.members:
            tokens, token = slice(token, token + member.length), token + member.length
            images = tuple(islice(pictures, member.images))
            own, tiles = [], sum(len(image.grids) for image in images) if self.tile_groups else 0
            while tiles > 0:
                own.append(next(groups))
                tiles -= own[-1].tiles
            found.append(
                Sample(
                    tokens=self.tokens[tokens],
                    trained=self.trained[tokens],
                    images=images,
                    tile_groups=tuple(own),
                    source=self.source,
                    members=(member,),
                    sounds=tuple(islice(sounds, member.sounds)),
                )
            )
        return tuple(found)

    @property
    def grids(self) -> tuple[Grid, ...]:
        return tuple(grid for image in self.images for grid in image.grids)


Row = Sequence[Sample]  # the samples of one sequence


# --- Batches

LoaderState = dict[str, Any]  # the position in the data as checkpoints store it: plain values, the same for all layouts


@dataclass(frozen=True, eq=False)
class Segment:
    """One sample of a packed sequence. `encoded` is None if the sample is computed from its number."""

    sample_id: SampleId
    encoded: EncodedSample | None = None


Segments = tuple[Segment, ...]  # the segments of one sequence


@dataclass(frozen=True)
class GlobalBatch:
    """The sequences of one optimizer step; `read` and `skipped` are of the windows that this batch is first to use."""

    sequences: tuple[Segments, ...]
    after: LoaderState  # where the next global batch begins
    read: int
    skipped: tuple[Skipped, ...] = ()
    epochs: float | None = None  # number of epochs at the end of the batch; None for data without epochs
    last: bool = False  # whether it is the last batch of the validation data


@dataclass(frozen=True)
class Imbalance:
    """Load imbalance after and before balancing: the largest load of a data-parallel rank over the mean load."""

    vision: float
    language: float
    vision_before: float
    language_before: float


@dataclass(frozen=True)
class CollatedBatch:
    """A micro-batch, the ids of its samples, and the reports of samples that were left out."""

    batch: MicroBatch
    skipped: tuple[Skipped, ...] = ()
    samples: tuple[SampleId, ...] = ()


@dataclass(frozen=True)
class StepData:
    """The data of one optimizer step on one rank."""

    batches: list[MicroBatch]
    read: int  # number of samples read for it, counted by data-parallel rank 0
    skipped: tuple[Skipped, ...]  # counted by the rank that collates them, or by rank 0 if they are never collated
    imbalance: Imbalance | None  # None if costs are not known
    samples: tuple[tuple[SampleId, ...], ...] = ()  # sample ids of each micro-batch, on a rank that reads
    epochs: float | None = None  # epochs done after the step, on a rank that reads; None for data without epochs
    last: bool = False  # whether it is the last step of the validation data
    checksum: int = 0  # of the samples of the global batch, on a rank that reads: equal on all of them
