"""Generate samples of random images and text of any size, for benchmarks and tests.

The text is a Markov chain: with probability 3/4 a token is the successor of the previous token in the vocabulary, else
it is drawn uniformly. A model cannot have a loss below the chain's `entropy`. Images are noise and carry no information
about the text.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megavlm.arch.image_tokens import TileGroup, Tiling, features_of, grid_of, tokens_per_image
from megavlm.config.derived import has_vision, usual_side
from megavlm.config.schema import Config
from megavlm.data.source import ComputedSource, generator
from megavlm.data.types import NEGATIVE, POSITIVE, QUERY, Member, Sample, identity_of
from megavlm.errors import UserError
from megavlm.inputs.patches import Image
from megavlm.inputs.sounds import Sound
from megavlm.rules.defaults import resolve

VOCABULARY = 256  # number of tokens if model.language.vocab_size is not given

# The random streams of a sample: whether it has images, its text, one for each image, and its sound.
_IMAGELESS, _TEXT, _FIRST_IMAGE, _SOUND = 0, 1, 2, 2**32

_PARTS = 4  # a text of `SyntheticPairs` has at most 1 / 4 of `--seq-length` tokens; a record has two or three texts
_SAME = 5  # one in so many records gives its document the identity of the previous record's

_FOLLOWS = 0.75  # the probability that the previous token determines the next one


def entropy(entries: int) -> float:
    """Return the chain's conditional entropy in nats for a vocabulary of `entries`: the lowest loss of any model."""
    other = (1 - _FOLLOWS) / entries
    next_one = _FOLLOWS + other
    return -next_one * math.log(next_one) - (entries - 1) * other * math.log(other)


def chain(drawn: NDArray[np.int64], follows: NDArray[np.bool_], entries: int) -> NDArray[np.int64]:
    """Return a chain [L] of numbers below `entries`: the previous number plus 1 if `follows`, else the drawn number.

    Numbers wrap around at `entries`.
    """
    places = np.arange(len(drawn))
    fresh = np.maximum.accumulate(np.where(follows, 0, places))  # the last index at or before each that was drawn
    return (drawn[fresh] + places - fresh) % entries


class SyntheticSource(ComputedSource):
    """Samples of exactly `--seq-length` tokens: a prompt that contains images, then an answer of varying length.

    `--images-per-sample` cycles over samples and `--image-sizes` over images, so shapes do not depend on the seed. The
    image token is `--image-token` or the last token of the vocabulary, token 0 is padding, and text consists of all
    other tokens (except a video and an audio token). A sound of `data.sound_frames` precedes the prompt.

    If the model tiles images, an image that is alone in its sample has a base tile and k × k others, where k is the
    image's side divided by `model.vision.image_size`. If a sample has several images, each has a base tile only.
    """

    pad_token = 0

    def __init__(self, config: Config, *, tiling: Tiling | None = None) -> None:
        """Check the options. `tiling` maps (height, width) in pixels to (rows, columns) of tiles; by default it divides
        the sides by `model.vision.image_size`.

        Raises UserError if `--seq-length` is too short for the images, or the vocabulary does not fit.
        """
        config = resolve(config, vocab_size=VOCABULARY)
        vision, data = config.model.vision, config.data
        self.vocab_size = config.model.language.vocab_size
        self._projector = config.model.projector
        self.image_token = self.vocab_size - 1 if config.model.image_token is None else config.model.image_token
        others = (config.model.video_token, config.model.audio_token)
        self._feature_tokens = sorted({self.image_token, *(token for token in others if token is not None)})
        self._audio_token, self._audio = config.model.audio_token, config.model.audio
        self._sounds = config.data.sound_frames or (0,)
        self._seed = config.train.seed
        self._seq_length = config.train.seq_length
        self._global_batch_size = config.train.global_batch_size
        self._patch_size = vision.patch_size
        self._channels = vision.in_channels
        self._data = data
        self._sides = data.image_sizes or (usual_side(config.model),)
        self._counts = (data.images_per_sample if has_vision(config.model) else ()) or (0,)
        self._images_before = (0, *accumulate(self._counts))
        self._tile_side = vision.image_size
        self._tiling = tiling or (lambda size: (size[0] // vision.image_size, size[1] // vision.image_size))
        if self.vocab_size < 3:
            raise UserError(f"model.language.vocab_size {self.vocab_size} leaves no room for text: use at least 3")
        if not 0 < self.image_token < self.vocab_size:
            raise UserError(
                f"--image-token {self.image_token} is not between 1 and {self.vocab_size - 1}, the end of the "
                "vocabulary: choose another, or leave it out"
            )
        needed, count = max(
            (sum(self._features((side,) * count)) + 2, count) for count in self._counts for side in self._sides
        )
        needed += max(features_of(frames, self._audio) for frames in self._sounds)
        if needed > self._seq_length:
            raise UserError(
                f"--seq-length {self._seq_length} is too short for {count} image(s) of {needed - 2} tokens in all: set "
                f"--seq-length to at least {needed}, or lower --images-per-sample, --image-sizes or "
                "model.vision.image_size"
            )

    def sample(self, index: int) -> Sample:
        """Return sample `index`. Its answer is 0.5 to 1.5 times `data.answer_share` of the text tokens."""
        sides = () if self._is_imageless(index) else self._sides_of(index)
        feature_counts, frames = self._features(sides), self._sounds[index % len(self._sounds)]
        rng = generator(seed=self._seed, index=index, stream=_TEXT)
        text_length = self._seq_length - sum(feature_counts) - features_of(frames, self._audio)
        entries = self.vocab_size - 1 - len(self._feature_tokens)  # nor 0, which pads
        drawn = rng.integers(entries, size=text_length, dtype=np.int64)
        answer_length = round(text_length * self._data.answer_share * rng.uniform(0.5, 1.5))
        answer_length = min(max(answer_length, 1), text_length - 1)
        text = 1 + chain(drawn, rng.random(text_length) < _FOLLOWS, entries)
        for token in self._feature_tokens:
            text += text >= token
        # N images cut the prompt into N + 1 pieces of equal length. The prompt is not trained.
        pieces = np.array_split(text[: text_length - answer_length], len(sides) + 1)
        audio = np.full(features_of(frames, self._audio), self._audio_token or 0, dtype=np.int64)
        parts: list[NDArray[np.int64]] = [audio, pieces[0]]
        for count, piece in zip(feature_counts, pieces[1:], strict=True):
            parts += [np.full(count, self.image_token, dtype=np.int64), piece]
        parts.append(text[text_length - answer_length :])
        trained = np.zeros(self._seq_length, dtype=np.bool_)
        trained[self._seq_length - answer_length :] = True
        seen, tile_groups = self._tiled(sides)
        images = tuple(self._image(index, number=number, side=side) for number, side in enumerate(seen))
        sounds = (Sound(frames, partial(self._mels, index, frames)),) if frames else ()
        return Sample(np.concatenate(parts), trained, images, tile_groups, sounds=sounds)

    def _mels(self, index: int, frames: int) -> Tensor:
        drawn = generator(seed=self._seed, index=index, stream=_SOUND).standard_normal((frames, self._audio.mel_bins))
        return torch.from_numpy(drawn.astype(np.float32))

    def _is_imageless(self, index: int) -> bool:
        if index % self._global_batch_size in self._data.imageless_samples:
            return True
        draw = generator(seed=self._seed, index=index, stream=_IMAGELESS).random()
        return bool(draw < self._data.imageless_share)

    def _sides_of(self, index: int) -> tuple[int, ...]:
        """Return the side in pixels of each image of a sample."""
        cycle, place = divmod(index, len(self._counts))
        first = cycle * self._images_before[-1] + self._images_before[place]
        return tuple(self._sides[(first + number) % len(self._sides)] for number in range(self._counts[place]))

    def _tiled(self, sides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[TileGroup, ...]]:
        """Return the sides in pixels of all tiles of a sample's images, and the tile group of each image.

        If the model does not tile images, these are the sides of the images, without tile groups.
        """
        if self._projector.anyres_max_tiles is None:
            return sides, ()
        alone = len(sides) == 1  # images of a sample with several are their base tiles
        groups = tuple(TileGroup(self._tiling((side, side)) if alone else (0, 0), (side, side)) for side in sides)
        return (self._tile_side,) * sum(group.tiles for group in groups), groups

    def _features(self, sides: tuple[int, ...]) -> list[int]:
        """Return the number of image tokens of each image of a sample."""
        seen, groups = self._tiled(sides)
        grids = [grid_of(side, side, self._patch_size) for side in seen]
        return tokens_per_image(grids, groups, self._projector)

    def _image(self, index: int, *, number: int, side: int) -> Image:
        def render() -> NDArray[np.uint8]:
            rng = generator(seed=self._seed, index=index, stream=_FIRST_IMAGE + number)
            return rng.integers(0, 256, size=(side, side, self._channels), dtype=np.uint8)

        return Image(height=side, width=side, patch_size=self._patch_size, render=render)


class SyntheticPairs(ComputedSource):
    """Records of pairs whose texts are samples of a `SyntheticSource` with a quarter of `--seq-length`.

    The positive document keeps its images; the query keeps them in every third record only. Every second record also
    has a negative with images of its own. In every fifth record, the document has the identity of the previous record's
    document.
    """

    def __init__(self, config: Config) -> None:
        """Check the options. Raises UserError if a fourth of `--seq-length` is too short for a document."""
        config = resolve(config, vocab_size=VOCABULARY)
        length = config.train.seq_length // _PARTS
        self._with_images = SyntheticSource(replace(config, train=replace(config.train, seq_length=length)))
        self.vocab_size = self._with_images.vocab_size
        self.image_token = self._with_images.image_token
        self.pad_token = self._with_images.pad_token

    def sample(self, index: int) -> Sample:
        """Return record `index`: its query, its document and, if `index` is odd, a negative."""
        document = self._with_images.sample(3 * index)
        other = self._with_images.sample(3 * index + 1)
        query = self._with_images.sample(3 * index + 2)
        shown = query if index % 3 == 1 else _without_images(query, self._with_images.image_token)
        named = index - 1 if index % _SAME == _SAME - 1 else index
        texts = [(QUERY, shown, ""), (POSITIVE, document, f"document {named}")]
        texts += [(NEGATIVE, other, f"other {index}")] if index % 2 else []
        return joined([(role, text, identity_of(name)) for role, text, name in texts])


def joined(texts: list[tuple[int, Sample, int]], *, source: int = 0) -> Sample:
    """Return a record of pairs as one sample, given its texts as (role, text, identity), the query first."""
    return Sample(
        tokens=np.concatenate([text.tokens for _, text, _ in texts]),
        trained=np.concatenate([text.trained for _, text, _ in texts]),
        images=tuple(image for _, text, _ in texts for image in text.images),
        tile_groups=tuple(group for _, text, _ in texts for group in text.tile_groups),
        source=source,
        members=tuple(
            Member(role, identity, len(text), len(text.images), len(text.sounds)) for role, text, identity in texts
        ),
        sounds=tuple(sound for _, text, _ in texts for sound in text.sounds),
    )


def _without_images(sample: Sample, image_token: int) -> Sample:
    kept = sample.tokens != image_token
    return Sample(sample.tokens[kept], sample.trained[kept], sounds=sample.sounds)
