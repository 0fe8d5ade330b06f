"""Random images and tokens of any size, for benchmarks and parity tests."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from megavlm.config.schema import Config
from megavlm.data.images import features_of, grid_of
from megavlm.data.randomness import generator
from megavlm.data.sample import Image, Sample
from megavlm.errors import UserError

# Streams of a sample's randomness: whether it has images, its text, then one per image.
_IMAGELESS, _TEXT, _FIRST_IMAGE = 0, 1, 2


class SyntheticSource:
    """Samples of exactly `--seq-length` tokens: text with images inside it, then an answer of varying length.

    Image counts cycle over samples and image sizes over images, so shapes are the same for every seed. The image token
    is the model's or the last of the vocabulary, entry 0 is padding, and text is drawn from all others.
    """

    pad_token = 0

    def __init__(self, config: Config) -> None:
        """Raises UserError when the sizes do not fit one another."""
        vision, data = config.model.vision, config.data
        self.vocab_size = config.model.language.vocab_size or 256
        self.pixel_shuffle = config.model.projector.pixel_shuffle
        self.patch_dim = vision.in_channels * vision.patch_size**2
        self.image_token = self.vocab_size - 1 if config.model.image_token is None else config.model.image_token
        self.mrope = bool(config.model.language.mrope_section)
        self._seed = config.train.seed
        self._seq_length = config.train.seq_length
        self._global_batch_size = config.train.global_batch_size
        self._patch_size = vision.patch_size
        self._channels = vision.in_channels
        self._data = data
        self._sides = data.image_sizes or (vision.image_size,)
        self._counts = data.images_per_sample or (0,)
        self._images_before = (0, *accumulate(self._counts))
        self._features = {
            side: features_of(grid_of(side, side, vision.patch_size), self.pixel_shuffle) for side in self._sides
        }
        if self.vocab_size < 3:
            raise UserError(f"--language-vocab-size {self.vocab_size} leaves no room for text: use at least 3")
        if not 0 < self.image_token < self.vocab_size:
            raise UserError(
                f"--image-token {self.image_token} is not between 1 and {self.vocab_size - 1}, the end of the "
                "vocabulary: choose another, or leave it out"
            )
        needed = max(self._counts) * max(self._features.values()) + 2
        if needed > self._seq_length:
            raise UserError(
                f"--seq-length {self._seq_length} is too short for {max(self._counts)} image(s) of up to "
                f"{max(self._features.values())} tokens: set --seq-length to at least {needed}, or lower "
                f"--images-per-sample, --image-sizes or --vision-image-size"
            )

    def sample(self, index: int) -> Sample:
        """Sample `index` of the stream; answers average `--answer-share` of the text and vary by half of that."""
        images = () if self._is_imageless(index) else self._images(index)
        feature_counts = [self._features[image.height] for image in images]
        rng = generator(seed=self._seed, index=index, stream=_TEXT)
        text_length = self._seq_length - sum(feature_counts)
        text = rng.integers(1, self.vocab_size - 1, size=text_length, dtype=np.int64)
        text += text >= self.image_token
        answer_length = round(text_length * self._data.answer_share * rng.uniform(0.5, 1.5))
        answer_length = min(max(answer_length, 1), text_length - 1)
        # Images divide the prompt evenly, beginning after its first piece: the text before an image is never trained.
        pieces = np.array_split(text[: text_length - answer_length], len(images) + 1)
        parts: list[NDArray[np.int64]] = [pieces[0]]
        for count, piece in zip(feature_counts, pieces[1:], strict=True):
            parts += [np.full(count, self.image_token, dtype=np.int64), piece]
        parts.append(text[text_length - answer_length :])
        trained = np.zeros(self._seq_length, dtype=np.bool_)
        trained[self._seq_length - answer_length :] = True
        return Sample(tokens=np.concatenate(parts), trained=trained, images=images)

    def _is_imageless(self, index: int) -> bool:
        if index % self._global_batch_size in self._data.imageless_samples:
            return True
        draw = generator(seed=self._seed, index=index, stream=_IMAGELESS).random()
        return bool(draw < self._data.imageless_share)

    def _images(self, index: int) -> tuple[Image, ...]:
        cycle, place = divmod(index, len(self._counts))
        first = cycle * self._images_before[-1] + self._images_before[place]
        return tuple(
            self._image(index, number=number, side=self._sides[(first + number) % len(self._sides)])
            for number in range(self._counts[place])
        )

    def _image(self, index: int, *, number: int, side: int) -> Image:
        def render() -> NDArray[np.uint8]:
            rng = generator(seed=self._seed, index=index, stream=_FIRST_IMAGE + number)
            return rng.integers(0, 256, size=(side, side, self._channels), dtype=np.uint8)

        return Image(height=side, width=side, patch_size=self._patch_size, render=render)
