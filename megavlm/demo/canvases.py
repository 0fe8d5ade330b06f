"""Compose and draw canvases of handwritten digits, and questions about them.

scikit-learn ships 1,797 scans of 8×8 pixels (the test part of UCI's "Optical Recognition of Handwritten Digits").
A canvas of fixed size shows one to four of them in a row. One third of the scans is held out: training canvases never
show them, and held-out canvases show nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megavlm.data.source import generator
from megavlm.errors import UserError

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SCAN_SIDE = 8
MAX_DIGITS = 4  # a canvas is a row of this many square cells
# Side of a scan with padding for bilinear interpolation: one pixel on each side, and one more on the far sides.
_PADDED = SCAN_SIDE + 3

# Questions by kind. Training draws kinds from TRAINING_KINDS: most ask for all digits, because these teach most.
PHRASINGS = {
    "which digits": ("Which digits are there, from left to right?", "Read the digits from left to right."),
    "how many": ("How many digits?", "How many digits are there?"),
    "largest": ("Which is the largest?", "Which digit is the largest?"),
}
TRAINING_KINDS = ("which digits",) * 7 + ("how many",) * 1 + ("largest",) * 2

# The held-out scans must not depend on --seed: a run that resumes with another seed would train on them.
_HELD_OUT_SEED = 0
_TRAINING_STREAM, _HELD_OUT_STREAM = 0, 1


@dataclass(frozen=True, eq=False)
class Scans:
    """Scans of digits, in the order of scikit-learn's data set."""

    pixels: NDArray[np.uint8]  # [n, 8, 8], 0 (paper) … 16 (ink)
    labels: NDArray[np.int64]  # [n], the digit


def load_scans() -> Scans:
    """Return the scans of scikit-learn's file. To import scikit-learn takes much longer than to read it.

    Raises UserError if scikit-learn is not installed.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError("--data digits needs scikit-learn: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",", dtype=np.int64)  # [n, 65]: pixels, then the label
    return Scans(pixels=rows[:, :-1].reshape(-1, SCAN_SIDE, SCAN_SIDE).astype(np.uint8), labels=rows[:, -1])


def split_scans(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of training and held-out scans; a third of each digit is held out, the same in every run."""
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
    """A scan on a canvas: its cell, rotation, size, position and contrast."""

    scan: int
    column: int
    angle: float  # radians, clockwise
    size: tuple[float, float]  # (height, width) of the scan, as shares of the cell's side
    shift: tuple[float, float]  # (down, right) from the centre of the cell, as shares of its side
    contrast: float  # brightness of full ink, at most 1


@dataclass(frozen=True)
class Poses:
    """The range of random sizes and rotations of glyphs."""

    least_size: float  # share of the cell
    largest_angle: float  # radians


# 1,200 scans are few, so training varies them more than the held-out ones vary.
_TRAINING_POSES, _HELD_OUT_POSES = Poses(0.8, 0.2), Poses(0.9, 0.05)


@dataclass(frozen=True)
class Scene:
    """What a canvas shows and the question about it; these determine the pixels."""

    glyphs: tuple[Glyph, ...]  # left to right
    kind: str
    phrasing: int


class Canvases:
    """Composes the scene of an index and draws it on a canvas `width` pixels wide and one cell high."""

    def __init__(self, *, seed: int, width: int) -> None:
        """Raises UserError if the canvas is too small for a row of digits, or scikit-learn is missing."""
        if width < MAX_DIGITS * SCAN_SIDE or width % MAX_DIGITS:
            raise UserError(
                f"model.vision.image_size {width} cannot be divided into {MAX_DIGITS} cells for digits of {SCAN_SIDE} "
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
        """Return scene `index` of the training stream of `seed`."""
        rng = generator(seed=self._seed, index=index, stream=_TRAINING_STREAM)
        return self._scene(
            rng, self._training, kind=TRAINING_KINDS[rng.integers(len(TRAINING_KINDS))], poses=_TRAINING_POSES
        )

    def held_out_scene(self, index: int, *, kind: str) -> Scene:
        """Return scene `index` of the held-out stream, which is the same for every seed."""
        rng = generator(seed=_HELD_OUT_SEED, index=index, stream=_HELD_OUT_STREAM)
        return self._scene(rng, self._held_out, kind=kind, poses=_HELD_OUT_POSES)

    def dialogue(self, scene: Scene) -> tuple[str, str]:
        """Return the question about a scene and its answer."""
        digits = self._digits(scene)
        answers = {
            "which digits": self.digits_of(scene),
            "how many": WORDS[len(digits)],
            "largest": WORDS[max(digits)],
        }
        return PHRASINGS[scene.kind][scene.phrasing], answers[scene.kind]

    def digits_of(self, scene: Scene) -> str:
        """Return the digits of a scene in words, from left to right."""
        return " ".join(WORDS[digit] for digit in self._digits(scene))

    def _digits(self, scene: Scene) -> list[int]:
        return [int(self._scans.labels[glyph.scan]) for glyph in scene.glyphs]

    def draw(self, scene: Scene) -> NDArray[np.uint8]:
        """Return the pixels [height, width] of a scene: bright ink on black."""
        canvas = np.zeros((self.height, self.width), dtype=np.uint8)
        for glyph in scene.glyphs:
            left = glyph.column * self._cell
            canvas[:, left : left + self._cell] = self._glyph(glyph)
        return canvas

    def _glyph(self, glyph: Glyph) -> NDArray[np.uint8]:
        """Return the pixels [cell, cell] of a glyph, interpolated bilinearly in its scan; outside the scan is black."""
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
        """Return a scene of one to four of the scans, each in its own column."""
        columns = np.sort(rng.permutation(MAX_DIGITS)[: rng.integers(1, MAX_DIGITS + 1)])
        return Scene(
            glyphs=tuple(
                self._pose(rng, int(scans[rng.integers(len(scans))]), int(column), poses) for column in columns
            ),
            kind=kind,
            phrasing=int(rng.integers(len(PHRASINGS[kind]))),
        )

    def _pose(self, rng: np.random.Generator, scan: int, column: int, poses: Poses) -> Glyph:
        """Return a glyph at a random place in its cell, with random rotation, size and contrast."""
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
