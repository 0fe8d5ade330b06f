"""The source: a sample is a pure function of its number, so that every layout and every resumed run sees the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megavlm.arch.image_tokens import grid_of, tokens_per_grid
from megavlm.config.schema import Config
from megavlm.data.source import ComputedSource, generator
from megavlm.data.types import Sample
from megavlm.errors import UserError
from megavlm.inputs.patches import Image

PAD, IMAGE, QUESTION, NUMBERS = 0, 1, 2, 3  # tokens; number n is NUMBERS + n


class DotsSource(ComputedSource):
    """Images with 0 to `--dots-most` white pixels on black. A sample is image tokens, a question and the number."""

    image_token = IMAGE
    pad_token = PAD

    def __init__(self, config: Config) -> None:
        vision = config.model.vision
        self._seed, self._most = config.train.seed, config.data.sources.dots.most
        self._side, self._patch, self._channels = vision.image_size, vision.patch_size, vision.in_channels
        needed = NUMBERS + self._most + 1
        self.vocab_size = config.model.language.vocab_size or needed
        if self.vocab_size < needed:
            raise UserError(f"model.language.vocab_size {self.vocab_size} is too small for --dots-most {self._most}: "
                            f"set it to at least {needed}")  # fmt: skip
        self._tokens = tokens_per_grid(grid_of(self._side, self._side, self._patch), config.model.projector)
        if self._tokens + 2 > config.train.seq_length:
            raise UserError(f"--seq-length {config.train.seq_length} is too short: set it to {self._tokens + 2}")

    def sample(self, index: int) -> Sample:
        drawn = generator(seed=self._seed, index=index)
        count = int(drawn.integers(self._most + 1))
        places = drawn.choice(self._side**2, size=count, replace=False)

        def render() -> NDArray[np.uint8]:
            pixels = np.zeros((self._side**2, self._channels), dtype=np.uint8)
            pixels[places] = 255
            return pixels.reshape(self._side, self._side, self._channels)

        tokens = np.array([IMAGE] * self._tokens + [QUESTION, NUMBERS + count], dtype=np.int64)
        image = Image(height=self._side, width=self._side, patch_size=self._patch, render=render)
        return Sample(tokens=tokens, trained=np.arange(len(tokens)) == len(tokens) - 1, images=(image,))
