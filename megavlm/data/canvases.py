"""Canvases of handwritten digits: which scans, where, what is asked, and the pixels.

scikit-learn ships 1,797 scans of 8×8 pixels (the test part of UCI's "Optical Recognition of Handwritten Digits").
A canvas of fixed size shows one to four of them in a row. One third of the scans is held out: training canvases never
show them, and held-out canvases show nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megavlm.data.randomness import generator
from megavlm.errors import UserError

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MAX_DIGITS = 4
SCAN_SIDE = 8

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
class Scene:
    """What a canvas shows and what is asked about it; the pixels follow from this."""

    scans: tuple[int, ...]  # scan numbers, left to right
    corners: tuple[tuple[int, int], ...]  # (top, left) of each scan in pixels
    contrasts: tuple[float, ...]  # brightness of full ink, at most 1
    kind: str
    phrasing: int


class Canvases:
    """Composes scenes from their index alone, and draws them on canvases of `side` × `side` pixels."""

    def __init__(self, *, seed: int, side: int) -> None:
        """Raises UserError when the canvas is too small for a row of digits, or scikit-learn is missing."""
        if side < MAX_DIGITS * SCAN_SIDE:
            raise UserError(
                f"--vision-image-size {side} cannot show {MAX_DIGITS} digits of {SCAN_SIDE} pixels: "
                f"--data digits needs at least {MAX_DIGITS * SCAN_SIDE}"
            )
        self.side = side
        self._seed = seed
        self._scans = load_scans()
        self._training, self._held_out = split_scans(self._scans.labels)

    def training_scene(self, index: int) -> Scene:
        """Scene `index` of the training stream of `seed`."""
        rng = generator(seed=self._seed, index=index, stream=_TRAINING_STREAM)
        return self._scene(rng, self._training, kind=TRAINING_KINDS[rng.integers(len(TRAINING_KINDS))])

    def held_out_scene(self, index: int, *, kind: str) -> Scene:
        """Scene `index` of the held-out stream, which is the same for every seed."""
        rng = generator(seed=_HELD_OUT_SEED, index=index, stream=_HELD_OUT_STREAM)
        return self._scene(rng, self._held_out, kind=kind)

    def dialogue(self, scene: Scene) -> tuple[str, str]:
        """(question, answer) of a scene."""
        digits = [int(self._scans.labels[scan]) for scan in scene.scans]
        answers = {
            "which digits": " ".join(WORDS[digit] for digit in digits),
            "how many": WORDS[len(digits)],
            "largest": WORDS[max(digits)],
        }
        return PHRASINGS[scene.kind][scene.phrasing], answers[scene.kind]

    def draw(self, scene: Scene) -> NDArray[np.uint8]:
        """Pixels [side, side] of a scene: bright ink on black."""
        canvas = np.zeros((self.side, self.side), dtype=np.uint8)
        for scan, (top, left), contrast in zip(scene.scans, scene.corners, scene.contrasts, strict=True):
            ink = self._scans.pixels[scan] * (255 * contrast / 16)
            canvas[top : top + SCAN_SIDE, left : left + SCAN_SIDE] = ink.astype(np.uint8)
        return canvas

    def _scene(self, rng: np.random.Generator, scans: NDArray[np.int64], *, kind: str) -> Scene:
        """The canvas is a lattice of 4×4 cells; digits stand in one row of it, each anywhere within its cell."""
        count = int(rng.integers(1, MAX_DIGITS + 1))
        columns = np.sort(rng.permutation(MAX_DIGITS)[:count])
        row = rng.integers(MAX_DIGITS)
        cell = self.side // MAX_DIGITS
        down, right = rng.integers(0, cell - SCAN_SIDE + 1, size=(2, count))
        corners = zip(row * cell + down, columns * cell + right, strict=True)
        return Scene(
            scans=tuple(int(scan) for scan in scans[rng.integers(len(scans), size=count)]),
            corners=tuple((int(top), int(left)) for top, left in corners),
            contrasts=tuple(float(contrast) for contrast in rng.uniform(0.6, 1.0, size=count)),
            kind=kind,
            phrasing=int(rng.integers(len(PHRASINGS[kind]))),
        )
