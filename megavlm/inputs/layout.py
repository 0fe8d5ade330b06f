"""Layout of an image, a video or a sound, known before its pixels are read: tiles, image tokens and prompt text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megavlm.arch.image_tokens import Grid, TileGroup


@dataclass(frozen=True)
class Tile:
    """Size of one input of the vision tower: sides in pixels, grid in patches.

    Patches start at the top left. If the patch size does not divide a side (384 = 27 × 14 + 6), the last pixels belong
    to no patch, as in the strided convolution of the reference.
    """

    height: int
    width: int
    grid: Grid


@dataclass(frozen=True)
class Prompt:
    """The text that replaces an image: texts[0], runs[0] image tokens, texts[1], runs[1] image tokens, …, texts[-1].

    Each image token receives one feature, in order. `number` is the token's id in the vocabulary, if it differs from
    the image token: some models have a separate video token. `each` has the ids of the runs, if these differ.
    """

    token: str
    texts: tuple[str, ...]
    runs: tuple[int, ...]
    number: int | None = None
    each: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.texts) == len(self.runs) + 1

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """Return the token's id of each run; None: the image token's."""
        return self.each or (self.number,) * len(self.runs)

    def __str__(self) -> str:
        filled = zip(self.texts, self.runs, strict=False)
        return "".join(text + self.token * run for text, run in filled) + self.texts[-1]


@dataclass(frozen=True)
class Film:
    """Frames sampled from a video. Each group of as many frames as a patch or a chunk spans has one grid of patches."""

    frames: tuple[int, ...]  # frame numbers in the clip, ascending
    seconds: tuple[float, ...]  # timestamp of each frame
    # Time of each group in the steps of M-RoPE, from 0 on, if the groups' tokens follow one another; () if each group
    # is an image among text.
    moments: tuple[int, ...] = ()
    # If the sound of a video is read: how many tokens of the video, then of its sound, then of the video, … follow.
    pieces: tuple[int, ...] = ()
    shares_marks: bool = True  # whether both marks before the pieces have one position, and those behind, too


@dataclass(frozen=True)
class Layout:
    """Tiles and text of one image of `size` (height, width), frame groups and text of a video, or text of a sound.

    `arrangement` is the (rows, columns) of tiles that the resized image is cut into, (0, 0) if it is not cut. Some
    families add a tile with the whole image. `tiles` are in the order of their pixels in the batch.
    """

    size: tuple[int, int]
    tiles: tuple[Tile, ...]
    arrangement: tuple[int, int]
    prompt: Prompt
    film: Film | None = None  # of a video
    frames: int = 0  # mel frames of a sound, which has no tiles, or of the sound of a video

    @property
    def features(self) -> int:
        """Return the number of image tokens."""
        return sum(self.prompt.runs)

    @property
    def tile_groups(self) -> tuple[TileGroup, ...]:
        """Return the tile groups of an image or a video, for models that join tiles (`arch/image_tokens.py`)."""
        if self.film is None:
            return (TileGroup(self.arrangement, self.size),)
        frame = TileGroup(self.arrangement, self.size, "frame")
        return (*(frame for _ in self.tiles[1:]), TileGroup(self.arrangement, self.size, "last frame"))

    @property
    def patches(self) -> int:
        return sum(math.prod(tile.grid) for tile in self.tiles)
