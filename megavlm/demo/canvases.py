"""Canvases of handwritten digits: which scans, where, what is asked, and the pixels.

scikit-learn ships 1,797 scans of 8×8 pixels (the test part of UCI's "Optical Recognition of Handwritten Digits").
A canvas of fixed size shows one to four of them in a row. One third of the scans is held out: training canvases never
show them, and held-out canvases show nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megavlm.data.source import generator
from megavlm.errors import UserError

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SCAN_SIDE = 8
MAX_DIGITS = 4  # a canvas is a row of so many square cells
# A scan for bilinear look-up: a ring of paper around it, and one more so that the next pixel always exists.
_PADDED = SCAN_SIDE + 3

# What may be asked; training draws from the second list, for reading all digits teaches most.
PHRASINGS = {
    "which digits": ("Which digits are there, from left to right?", "Read the digits from left to right."),
    "how many": ("How many digits?", "How many digits are there?"),
    "largest": ("Which is the largest?", "Which digit is the largest?"),
}
TRAINING_KINDS = ("which digits",) * 7 + ("how many",) * 1 + ("largest",) * 2

# What is held out must not depend on --seed: a run that resumes with another seed would train on it.
_HELD_OUT_SEED = 0
_TRAINING_STREAM, _HELD_OUT_STREAM = 0, 1


@dataclass(frozen=True, eq=False)
class Scans:
    pixels: NDArray[np.uint8]  # [n, 8, 8], 0 (paper) … 16 (ink)
    labels: NDArray[np.int64]  # [n], the digit


def load_scans() -> Scans:
    """The scans of scikit-learn. Raises UserError where scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("--data digits needs scikit-learn: pip install megavlm[demo]") from error
    data = load_digits()
    return Scans(pixels=data.images.astype(np.uint8), labels=data.target.astype(np.int64))


def split_scans(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(training, held-out) scan numbers: a third of each digit is held out, the same third in every run."""
    rng = np.random.default_rng(_HELD_OUT_SEED)
    training: list[NDArray[np.int64]] = []
    held_out: list[NDArray[np.int64]] = []
    for digit in range(len(WORDS)):
        members = rng.permutation(np.flatnonzero(labels == digit))
        third = len(members) // 3
        held_out.append(members[:third])
        training.append(members[third:])
    return np.sort(np.concatenate(training)), np.sort(np.concatenate(held_out))


@dataclass(frozen=True)
class Glyph:
    """A scan as it stands on a canvas: in which cell, and how it is turned, stretched, shifted and lit."""

    scan: int
    column: int
    angle: float  # radians, clockwise
    size: tuple[float, float]  # (height, width) of the scan's square, as shares of the cell's side
    shift: tuple[float, float]  # (down, right) from the middle of the cell, likewise
    contrast: float  # brightness of full ink, at most 1


@dataclass(frozen=True)
class Poses:
    """How much glyphs vary."""

    least_size: float  # share of the cell
    largest_angle: float  # radians


# 1,200 scans are few: training turns and stretches them more than any held-out one is.
_TRAINING_POSES, _HELD_OUT_POSES = Poses(0.8, 0.2), Poses(0.9, 0.05)


@dataclass(frozen=True)
class Scene:
    """What a canvas shows and what is asked about it; the pixels follow from this."""

    glyphs: tuple[Glyph, ...]  # left to right
    kind: str
    phrasing: int


class Canvases:
    """Composes scenes from their index alone, and draws them on canvases `width` pixels wide and a cell high."""

    def __init__(self, *, seed: int, width: int) -> None:
        """Raises UserError when the canvas is too small for a row of digits, or scikit-learn is missing."""
        if width < MAX_DIGITS * SCAN_SIDE or width % MAX_DIGITS:
            raise UserError(
                f"--vision-image-size {width} cannot be divided into {MAX_DIGITS} cells for digits of {SCAN_SIDE} "
                f"pixels: --data digits needs a multiple of {MAX_DIGITS}, at least {MAX_DIGITS * SCAN_SIDE}"
            )
        self.width = width
        self._cell = width // MAX_DIGITS
        self.height = self._cell
        self._seed = seed
        self._scans = load_scans()
        self._ink = np.pad(self._scans.pixels, ((0, 0), (1, 2), (1, 2))).reshape(-1, _PADDED**2).astype(np.float64)
        self._training, self._held_out = split_scans(self._scans.labels)

    def training_scene(self, index: int) -> Scene:
        """Scene `index` of the training stream of `seed`."""
        rng = generator(seed=self._seed, index=index, stream=_TRAINING_STREAM)
        return self._scene(
            rng, self._training, kind=TRAINING_KINDS[rng.integers(len(TRAINING_KINDS))], poses=_TRAINING_POSES
        )

    def held_out_scene(self, index: int, *, kind: str) -> Scene:
        """Scene `index` of the held-out stream, which is the same for every seed."""
        rng = generator(seed=_HELD_OUT_SEED, index=index, stream=_HELD_OUT_STREAM)
        return self._scene(rng, self._held_out, kind=kind, poses=_HELD_OUT_POSES)

    def dialogue(self, scene: Scene) -> tuple[str, str]:
        """(question, answer) of a scene."""
        digits = [int(self._scans.labels[glyph.scan]) for glyph in scene.glyphs]
        answers = {
            "which digits": " ".join(WORDS[digit] for digit in digits),
            "how many": WORDS[len(digits)],
            "largest": WORDS[max(digits)],
        }
        return PHRASINGS[scene.kind][scene.phrasing], answers[scene.kind]

    def draw(self, scene: Scene) -> NDArray[np.uint8]:
        """Pixels [height, width] of a scene: bright ink on black."""
        canvas = np.zeros((self.height, self.width), dtype=np.uint8)
        for glyph in scene.glyphs:
            left = glyph.column * self._cell
            canvas[:, left : left + self._cell] = self._glyph(glyph)
        return canvas

    def _glyph(self, glyph: Glyph) -> NDArray[np.uint8]:
        """Pixels [cell, cell] of a glyph: each looks up its place in the scan, bilinearly; outside is paper."""
        across = (np.arange(self._cell) - (self._cell - 1) / 2) / self._cell  # from the middle, as shares of the cell
        down, right = across[:, None] - glyph.shift[0], across[None, :] - glyph.shift[1]
        # Turn the cell's axes to the scan's, then go from shares of the cell to scan pixels, in the padded scan.
        sine, cosine, middle = math.sin(glyph.angle), math.cos(glyph.angle), (_PADDED - 2) / 2
        y = (down * cosine - right * sine) * (SCAN_SIDE / glyph.size[0]) + middle
        x = (down * sine + right * cosine) * (SCAN_SIDE / glyph.size[1]) + middle
        y, x = np.clip(y, 0, _PADDED - 2), np.clip(x, 0, _PADDED - 2)
        i, j = y.astype(np.intp), x.astype(np.intp)
        y, x = y - i, x - j
        ink, corner = self._ink[glyph.scan], i * _PADDED + j
        upper = ink[corner] * (1 - x) + ink[corner + 1] * x
        lower = ink[corner + _PADDED] * (1 - x) + ink[corner + _PADDED + 1] * x
        return ((upper * (1 - y) + lower * y) * (255 * glyph.contrast / 16)).astype(np.uint8)

    def _scene(self, rng: np.random.Generator, scans: NDArray[np.int64], *, kind: str, poses: Poses) -> Scene:
        """Digits stand in columns of their own."""
        columns = np.sort(rng.permutation(MAX_DIGITS)[: rng.integers(1, MAX_DIGITS + 1)])
        return Scene(
            glyphs=tuple(
                self._pose(rng, int(scans[rng.integers(len(scans))]), int(column), poses) for column in columns
            ),
            kind=kind,
            phrasing=int(rng.integers(len(PHRASINGS[kind]))),
        )

    def _pose(self, rng: np.random.Generator, scan: int, column: int, poses: Poses) -> Glyph:
        """A glyph at a random place in its cell, slightly turned and stretched."""
        height, width = rng.uniform(poses.least_size, 1.0, size=2).tolist()
        down, right, angle, contrast = rng.uniform(-1, 1, size=4).tolist()
        return Glyph(
            scan=scan,
            column=column,
            angle=poses.largest_angle * angle,
            size=(height, width),
            shift=(down * (1 - height) / 2, right * (1 - width) / 2),
            contrast=0.8 + 0.2 * contrast,
        )
