"""What is known about an image before its pixels are: its tiles, its features and its place in the prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """One picture that the vision tower sees: sides in pixels, grid in patches.

    Patches cover `grid` × patch side from the top left; pixels beyond (384 is 27 × 14 + 6) are seen by none, as with
    the strided convolution of the reference.
    """

    height: int
    width: int
    grid: tuple[int, int]  # (rows, columns)


@dataclass(frozen=True)
class Prompt:
    """What replaces an image in the text: texts[0], runs[0] image tokens, texts[1], runs[1] image tokens, …, texts[-1].

    Each image token takes one feature, in order.
    """

    token: str
    texts: tuple[str, ...]
    runs: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.texts) == len(self.runs) + 1

    def __str__(self) -> str:
        filled = zip(self.texts, self.runs, strict=False)
        return "".join(text + self.token * run for text, run in filled) + self.texts[-1]


@dataclass(frozen=True)
class Layout:
    """How one image of `size` (height, width) becomes tiles and text.

    `arrangement` is the (rows, columns) of tiles cut from the enlarged picture, (0, 0) where it stays whole; a picture
    of the whole comes besides, where the family has one, and `tiles` is in the order of the pixels.
    """

    size: tuple[int, int]
    tiles: tuple[Tile, ...]
    arrangement: tuple[int, int]
    prompt: Prompt

    @property
    def features(self) -> int:
        """Image tokens."""
        return sum(self.prompt.runs)

    @property
    def patches(self) -> int:
        return sum(rows * columns for rows, columns in (tile.grid for tile in self.tiles))
