"""Describe an image or a video before its pixels are read: tiles, image tokens and the text that replaces it."""

from __future__ import annotations

from dataclasses import dataclass

from megavlm.arch.image_tokens import TileGroup


@dataclass(frozen=True)
class Tile:
    """One input of the vision tower: sides in pixels, grid in patches.

    Patches start at the top left. If the patch size does not divide a side (384 = 27 × 14 + 6), the last pixels belong
    to no patch, as in the strided convolution of the reference.
    """

    height: int
    width: int
    grid: tuple[int, int]  # (rows, columns)


@dataclass(frozen=True)
class Prompt:
    """The text that replaces an image: texts[0], runs[0] image tokens, texts[1], runs[1] image tokens, …, texts[-1].

    Each image token receives one feature, in order. `number` is the token's in the vocabulary, if it is not the image
    token: some models have one of its own for videos.
    """

    token: str
    texts: tuple[str, ...]
    runs: tuple[int, ...]
    number: int | None = None

    def __post_init__(self) -> None:
        assert len(self.texts) == len(self.runs) + 1

    def __str__(self) -> str:
        filled = zip(self.texts, self.runs, strict=False)
        return "".join(text + self.token * run for text, run in filled) + self.texts[-1]


@dataclass(frozen=True)
class Film:
    """The frames that are taken of a video. As many of them as a patch spans make a group, which has one grid."""

    frames: tuple[int, ...]  # their numbers in the clip, rising
    seconds: tuple[float, ...]  # when each of them is shown
    # Time of each group in the steps of M-RoPE, from 0 on, if the groups' tokens follow one another; () if each group
    # is an image among text.
    moments: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The tiles and the text of one image of `size` (height, width), or the groups of frames and the text of a video.

    `arrangement` is the (rows, columns) of tiles that the enlarged image is cut into, (0, 0) if it is not cut. Some
    families add a tile with the whole image. `tiles` are in the order of their pixels in the batch.
    """

    size: tuple[int, int]
    tiles: tuple[Tile, ...]
    arrangement: tuple[int, int]
    prompt: Prompt
    film: Film | None = None  # of a video

    @property
    def features(self) -> int:
        """Return the number of image tokens."""
        return sum(self.prompt.runs)

    @property
    def tile_groups(self) -> tuple[TileGroup, ...]:
        """Return how features become image tokens, in models that join tiles (`arch/image_tokens.py`)."""
        if self.film is None:
            return (TileGroup(self.arrangement, self.size),)
        frame = TileGroup(self.arrangement, self.size, "frame")
        return (*(frame for _ in self.tiles[1:]), TileGroup(self.arrangement, self.size, "last frame"))

    @property
    def patches(self) -> int:
        return sum(rows * columns for rows, columns in (tile.grid for tile in self.tiles))
