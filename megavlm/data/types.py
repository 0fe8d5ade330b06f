"""The types between a record and a micro-batch, in the order in which the data pass through them.

Conversation   a record as it was read          Sample        a sequence's tokens, with access to its pixels
EncodedSample  its tokens, pixels not read      GlobalBatch   the packed sequences of one optimizer step
Segment        an encoded sample in a sequence  StepData      the micro-batches of one rank
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.image_tokens import TileGroup
from megavlm.inputs.bad_sample import Skipped
from megavlm.paths import FileRange
from megavlm.storage.transfer import StoredFile

if TYPE_CHECKING:
    from megavlm.inputs.batch import MicroBatch
    from megavlm.inputs.layout import Film
    from megavlm.inputs.patches import Image, LoadedImage

# --- Records

Role = Literal["system", "user", "assistant", "text", "query", "positive", "negative"]


@dataclass(frozen=True)
class ImageRef:
    """An image that has not been opened: its encoded bytes, or a file whose path has been checked."""

    source: bytes | Path | StoredFile


@dataclass(frozen=True)
class VideoRef:
    """A clip that has not been opened: a video file, or its frames as images.

    `fps` is what the record says: the rate at which frames are taken from a file, or at which its images were.
    """

    source: bytes | Path | StoredFile | FileRange | tuple[ImageRef, ...]
    fps: float | None = None


Visual = ImageRef | VideoRef


@dataclass(frozen=True)
class Turn:
    """A message of one speaker: text, images and videos, in order. Plain text is one turn of the role `text`."""

    role: Role
    parts: tuple[str | Visual, ...]

    @property
    def images(self) -> tuple[Visual, ...]:
        """Return the images and videos."""
        return tuple(part for part in self.parts if not isinstance(part, str))


@dataclass(frozen=True)
class Conversation:
    """The turns of one record. The turns of a record of pairs are its texts, and `identities` tells equal texts.

    A preference has the turns of two conversations, that with the chosen answer first: `answers` says how many each
    has, `identities` what each is. Of a rated answer one of the two has no turns, and no identity.
    """

    turns: tuple[Turn, ...]
    identities: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()

    def conversations(self) -> Iterator[Conversation]:
        """Yield the conversations of a preference."""
        start = 0
        for count in filter(None, self.answers):
            yield Conversation(self.turns[start : start + count])
            start += count

    @property
    def images(self) -> tuple[Visual, ...]:
        """Return the images and videos."""
        return tuple(image for turn in self.turns for image in turn.images)


@dataclass(frozen=True)
class HeldOut:
    """A validation sample: the index of its validation set, and its number in that data set."""

    source: int
    record: int


# What identifies a sample: its number in the shuffled blend, or its place in a validation set.
SampleId = int | HeldOut


# --- Samples

RECORD, ROLE, ID, SOURCE = range(4)  # columns of `TextBatch.members`
QUERY, POSITIVE, NEGATIVE, PADDING = 0, 1, 2, -1  # roles


@dataclass(frozen=True)
class Member:
    """A text of a record of pairs: `length` tokens with `images` images and videos.

    Documents of one `identity` are the same to the loss: none of them is a negative of a query whose positive is one.
    """

    role: int
    identity: int
    length: int
    images: int = 0


def identity_of(*parts: str | bytes) -> int:
    """Return a number for what a text is, from an id or its content: equal parts, equal numbers of 62 bits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = part.encode() if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return int.from_bytes(digest.digest(), "little") >> 2


@dataclass(frozen=True)
class SampleCost:
    """Forward FLOPs of a sample of `length` tokens.

    `vision` counts the tower and the projector by patches, attention included: c·Σp² + d·Σp over its images;
    `language` is a·l² + b·l.
    """

    length: int
    patches: int
    images: int
    vision: float
    language: float


@dataclass(frozen=True)
class StoredImage:
    """An image or a video of which the header has been read, but not the pixels."""

    number: int  # among the images and videos of its record
    # (rows, columns) in patches of the image, of each of its tiles, or of each group of a video's frames
    grids: tuple[tuple[int, int], ...]
    arrangement: tuple[int, int]  # (rows, columns) of the tiles that the image is cut into; (0, 0) if it is not cut
    film: Film | None = None  # of a video


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """A sample of L tokens after template and tokenizer. The pixels of its images have not been read."""

    tokens: NDArray[np.int64]  # [L]
    trained: NDArray[np.bool_]  # [L]; the tokens that the model learns to predict (the answers)
    images: tuple[StoredImage, ...]
    tile_groups: tuple[TileGroup, ...]
    source: int
    cost: SampleCost
    members: tuple[Member, ...] = ()  # of a record of pairs


@dataclass(frozen=True, eq=False)
class EncodedRecord:
    """The samples that a record was split into (usually one), and the parts of it that were left out."""

    samples: tuple[EncodedSample, ...]
    skipped: tuple[Skipped, ...] = ()
    sample_id: SampleId | None = None  # workers leave it out


Picture: TypeAlias = "Image | LoadedImage"  # an image or a video as patches; its sizes are known at once


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of L tokens with its images, in the order of their tokens.

    If the model tiles images, `tile_groups` says which consecutive tiles are one image.
    """

    tokens: NDArray[np.int64]  # [L], each image expanded to one image token per feature
    trained: NDArray[np.bool_]  # [L]; the tokens that the model learns to predict (the answers)
    images: tuple[Picture, ...] = ()
    tile_groups: tuple[TileGroup, ...] = ()
    source: int = 0  # index of its data set
    # Of a record of pairs: its query and documents, whose tokens and images follow one another. Else none.
    members: tuple[Member, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def texts(self) -> tuple[Sample, ...]:
        """Return the texts of a record of pairs as samples of their own; any other sample is one already."""
        if len(self.members) <= 1:
            return (self,)
        found, token, image, group = [], 0, 0, 0
        for member in self.members:
            images = self.images[image : image + member.images]
            groups = self.tile_groups[group : group + member.images] if self.tile_groups else ()
            tokens = slice(token, token + member.length)
            found.append(Sample(self.tokens[tokens], self.trained[tokens], images, groups, self.source, (member,)))
            token, image, group = token + member.length, image + member.images, group + len(groups)
        return tuple(found)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        return tuple(grid for image in self.images for grid in image.grids)


Row = Sequence[Sample]  # the samples of one sequence


# --- Batches

LoaderState = dict[str, Any]  # the position in the data as checkpoints store it: plain values, the same for all layouts


@dataclass(frozen=True, eq=False)
class Segment:
    """One of the samples that share a sequence. `encoded` is None if the sample is computed from its number."""

    sample_id: SampleId
    encoded: EncodedSample | None = None


Segments = tuple[Segment, ...]  # the segments of one sequence


@dataclass(frozen=True)
class GlobalBatch:
    """The sequences of one optimizer step; `read` and `skipped` count the windows that it is the first to open."""

    sequences: tuple[Segments, ...]
    after: LoaderState  # where the next global batch begins
    read: int
    skipped: tuple[Skipped, ...] = ()
    epochs: float | None = None  # how many epochs lie before its end; None: the data have none
    last: bool = False  # of the validation data


@dataclass(frozen=True)
class Imbalance:
    """The largest load of a data-parallel rank over the mean load, after and before balancing."""

    vision: float
    language: float
    vision_before: float
    language_before: float


@dataclass(frozen=True)
class CollatedBatch:
    """A micro-batch, the samples in it, and those that were left out of it."""

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
    samples: tuple[tuple[SampleId, ...], ...] = ()  # of each micro-batch, on a rank that reads
    epochs: float | None = None  # how many epochs are done after it, on a rank that reads; None: the data have none
    last: bool = False  # of the validation data
