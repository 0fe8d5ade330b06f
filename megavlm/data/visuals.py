"""Read the images and videos of a record with a model's image processor: first their sizes, later their pixels."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

from megavlm.arch.image_tokens import Grid
from megavlm.config.schema import AudioConfig
from megavlm.data import clips
from megavlm.data.arrays import array_size, as_picture, is_array, read_array
from megavlm.data.decode import MAX_PIXELS, decode, size_of
from megavlm.data.preprocessors import with_area
from megavlm.data.types import (
    WITHOUT_VISION,
    Conversation,
    ImageRef,
    Picture,
    Sample,
    SoundRef,
    StoredImage,
    VideoRef,
    Visual,
)
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Film, Layout
from megavlm.inputs.patches import LoadedImage
from megavlm.inputs.processor import Processor
from megavlm.inputs.resize import Pixels
from megavlm.inputs.sounds import RATE, Sound, SoundProcessor, drawn, with_sound
from megavlm.inputs.video import Budget, Clip, VideoProcessor
from megavlm.inputs.vision_inputs import RGB

# Notations for places in an image: tags of boxes and points, and four numbers in brackets.
_PLACES = re.compile(r"<\|?(box|loc|point|ref|bbox)|\bbbox|[\[(]\s*[\d.]+(\s*,\s*[\d.]+){3}\s*[\])]", re.IGNORECASE)
# Features in pictures.
_DRAWN = SoundProcessor(AudioConfig(mel_bins=64), longest=10 * RATE, text="", number=0, start="", end="")
_COLORS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


@dataclass(frozen=True)
class Visuals:
    """Reads images, videos and sounds with `processor`; `budget` limits the frames and tokens of each video. A language
    model alone takes none (`takes_images` is false). With `video_sound` the sound of a video is part of it.
    """

    processor: Processor
    max_pixels: int
    budget: Budget
    takes_images: bool = True
    video_sound: bool = False

    def layouts(self, visuals: Sequence[Visual]) -> list[Layout]:
        """Return the layouts of a record's images and videos, of which only the headers are read.

        Raises BadSample, or UserError for any of them if the model takes none.
        """
        if visuals and not self.takes_images:
            raise UserError(WITHOUT_VISION)
        images = sum(isinstance(visual, ImageRef) for visual in visuals)
        numbers = {ImageRef: count(), VideoRef: count(), SoundRef: count()}
        return [
            self.processor.numbered(self._layout(visual, images), next(numbers[type(visual)])) for visual in visuals
        ]

    def load(
        self,
        visuals: Sequence[Visual],
        wanted: StoredImage,
        augmentation: Augmentation | None = None,
        *,
        beside: Sequence[Visual] | None = None,
    ) -> LoadedImage:
        """Return the image or video `wanted` of a record's `visuals` as patches. Raises BadSample.

        `beside` are the images, videos and sounds of its text, if these are not all.
        """
        visual = visuals[wanted.number]
        if isinstance(visual, VideoRef):
            patches = self._film(visual, wanted)
        else:
            assert isinstance(visual, ImageRef), "`sound` loads sounds"
            images = sum(isinstance(each, ImageRef) for each in (visuals if beside is None else beside))
            pixels = self._pixels(visual)
            if augmentation is not None:
                pixels = augmentation.changed(pixels, wanted.number)
            patches = torch.cat(self._processor_of(visual).tiles(pixels, images=images))
        return LoadedImage(wanted.grids, patches, wanted.arrangement, wanted.film)

    def sound(self, visuals: Sequence[Visual], wanted: StoredImage) -> Sound:
        """Return the sound (or the sound of the video) `wanted` of a record's `visuals` with its features.

        Raises BadSample.
        """
        visual = visuals[wanted.number]
        assert not isinstance(visual, ImageRef)
        assert not isinstance(visual.source, tuple), "folders of frames have no sound"
        mels = self._sounds.mels(clips.sound(visual.source, longest=self._sounds.longest))
        if len(mels) != wanted.frames:
            raise BadSample(Reason.CORRUPT, f"the sound has {len(mels)} frames, and had {wanted.frames} before")
        return Sound(wanted.frames, mels.contiguous)  # which can be pickled, as prompts are on their way to other ranks

    def _layout(self, visual: Visual, images: int) -> Layout:
        if isinstance(visual, SoundRef):  # no header tells the length of an mp3 exactly
            return self._sound_layout(visual.source)
        if isinstance(visual, ImageRef):
            return self._processor_of(visual).layout(*self._size(visual), images=images)
        if visual.max_pixels is not None and not self._videos.is_bounded:
            raise BadSample(Reason.UNSUPPORTED, "its video has max_pixels, which is for Qwen's models: leave it out")
        budget = replace(self.budget, max_pixels=visual.max_pixels, start=visual.video_start, end=visual.video_end)
        if isinstance(visual.source, tuple):  # extracted frames: all are used, if the budget allows it
            rate = visual.fps or self.budget.rate_of_images
            height, width = size_of(visual.source[0].source, max_pixels=self.max_pixels)
            clip = Clip(height, width, tuple(number / rate for number in range(len(visual.source))), rate)
            return self._videos.layout(clip, replace(budget, fps=rate))
        clip = clips.probe(visual.source, max_pixels=self.max_pixels)
        layout = self._videos.layout(clip, replace(budget, fps=visual.fps or budget.fps))
        if not self.video_sound:
            return layout
        if budget.start or budget.end:
            raise BadSample(Reason.UNSUPPORTED, "its video has video_start or video_end: leave out data.video_sound")
        try:
            return with_sound(layout, self._sound_layout(visual.source), turn=self._sounds.turn)
        except BadSample as error:
            if error.reason is Reason.NO_FRAMES:  # a silent video
                return layout
            raise

    def _processor_of(self, image: ImageRef) -> Processor:
        """Return the image processor, with the bounds of the image's record. Raises BadSample if it has no bounds."""
        try:
            return with_area(self.processor, {"min_pixels": image.min_pixels, "max_pixels": image.max_pixels})
        except UserError as error:
            raise BadSample(Reason.UNSUPPORTED, str(error)) from error

    def _sound_layout(self, source: clips.Source) -> Layout:
        samples = len(clips.sound(source, longest=self._sounds.longest))
        return self._sounds.layout(samples, self.processor.image_token)

    def _size(self, image: ImageRef) -> tuple[int, int]:
        channels = self.processor.vision_input.array_channels
        if channels is None:
            return size_of(image.source, max_pixels=self.max_pixels)
        return array_size(image.source, channels=channels, max_pixels=self.max_pixels)

    def _pixels(self, image: ImageRef) -> Pixels:
        channels = self.processor.vision_input.array_channels
        if channels is None:
            return decode(image.source, max_pixels=self.max_pixels)
        return read_array(image.source, channels=channels, max_pixels=self.max_pixels)

    def _film(self, video: VideoRef, wanted: StoredImage) -> Tensor:
        """Return the patches of a video; only one decoded frame at a time is in memory."""
        assert wanted.film is not None
        rows, columns, *_ = wanted.grids[0]
        numbers, frame = wanted.film.frames, partial(self._videos.frame, grid=(rows, columns))
        if isinstance(video.source, tuple):
            shown = [video.source[number].source for number in numbers]
            made = [frame(decode(image, max_pixels=self.max_pixels)) for image in shown]
        else:
            made = [frame(pixels) for pixels in clips.frames(video.source, numbers, max_pixels=self.max_pixels)]
        return self._videos.patches(made)

    @property
    def _sounds(self) -> SoundProcessor:
        if self.processor.sounds is None:
            raise BadSample(Reason.UNSUPPORTED, "it has a sound, and models of this family take no audio")
        return self.processor.sounds

    @property
    def _videos(self) -> VideoProcessor:
        if self.processor.vision_input != RGB:
            message = f"it has a video, and --vision-input {self.processor.vision_input.name} is for images alone"
            raise BadSample(Reason.UNSUPPORTED, message)
        if self.processor.video is None:
            raise BadSample(Reason.UNSUPPORTED, "it has a video, and models of this family are trained on images alone")
        return self.processor.video


def first_frame(visual: Visual, *, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Return an image, the first frame of a video, or the spectrum of a sound's first ten seconds, as RGB bytes for
    display. Raises BadSample if it is damaged.
    """
    if isinstance(visual, SoundRef):
        return drawn(_DRAWN.mels(clips.sound(visual.source, longest=_DRAWN.longest)))
    if isinstance(visual, ImageRef) and is_array(visual.source):
        return as_picture(read_array(visual.source, channels=None, max_pixels=max_pixels))
    if isinstance(visual, ImageRef):
        return decode(visual.source, max_pixels=max_pixels)
    if isinstance(visual.source, tuple):
        return first_frame(visual.source[0], max_pixels=max_pixels)
    return next(clips.frames(visual.source, (0,), max_pixels=max_pixels))


def seen(processor: Processor, sample: Sample, number: int) -> tuple[Film | None, list[Pixels]]:
    """Return image or video `number` of a sample as the vision tower receives it: pictures uint8 [height, width, 3].

    An image has no `Film`, and its tiles are joined to pictures; a video has the `Film` with its frame numbers, and a
    picture per frame. Sounds have the numbers after all images; a picture shows the features of one.
    """
    if number >= len(sample.images):
        return None, [drawn(sample.sounds[number - len(sample.images)].mels())]
    image = sample.images[number]
    if image.film is None:
        return None, _pictures(processor, image)
    return image.film, _frames(processor, image)


def _pictures(processor: Processor, image: Picture) -> list[Pixels]:
    """Return an image as the vision tower receives it, as pictures uint8 [height, width, 3].

    A tiled image that includes a tile of the whole image gives two pictures: its other tiles joined, and that tile.
    """
    patches = image.patches().split([rows * columns for rows, columns in image.grids])
    normal: Any = {"mean": processor.mean, "std": processor.std, "rgb": processor.vision_input == RGB}
    pictures = [
        unpatchified(cells, grid, patch=processor.patch_size, **normal)
        for cells, grid in zip(patches, image.grids, strict=True)
    ]
    rows, columns = image.arrangement
    if not rows or rows * columns + 1 != len(pictures):
        return pictures
    whole = pictures.pop(0 if processor.whole_first else -1)
    lines = [np.concatenate(pictures[row * columns : (row + 1) * columns], axis=1) for row in range(rows)]
    return [np.concatenate(lines), whole]


def _frames(processor: Processor, video: Picture) -> list[Pixels]:
    """Return the frames of a video as the vision tower receives them, as pictures uint8 [height, width, 3].

    Slices, which follow the copy of their frame, are left out.
    """
    assert processor.video is not None
    assert video.film is not None
    span, patch = processor.video.frames_per_patch, processor.patch_size
    groups = video.patches().unflatten(1, (3, span, -1)).movedim(2, 0)  # [span, P, 3, p·p]
    grids = [(rows, columns) for rows, columns, *frames in video.grids for _ in range(math.prod(frames))]
    sizes = [rows * columns for rows, columns in grids]
    by_frame = [group.flatten(1).split(sizes) for group in groups]
    tiles = len(sizes) // -(-len(video.film.frames) // span)  # of a frame, or of a pair of frames
    pictures = [
        unpatchified(by_frame[place][number], grid, patch=patch, mean=processor.video.mean, std=processor.video.std)
        for number, grid in enumerate(grids)
        if number % tiles == 0
        for place in range(span)
    ]
    return pictures[: len(video.film.frames)]


def unpatchified(
    patches: Tensor,
    grid: Grid,
    *,
    patch: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rgb: bool = True,
) -> Pixels:
    """Return the pixels [height, width, 3] of row-major, normalised patches [rows·columns, C·p·p]: undo `patchify`.

    Channels other than those of photos become a picture by `as_picture`.
    """
    rows, columns = grid
    cells = patches.numpy().reshape(rows, columns, len(mean), patch, patch).transpose(0, 3, 1, 4, 2)
    values = cells.reshape(rows * patch, columns * patch, len(mean)) * np.array(std) + np.array(mean)
    if not rgb:
        return as_picture(values)
    return np.clip(np.rint(values * 255), 0, 255).astype(np.uint8)


def stored(number: int, layout: Layout) -> StoredImage:
    """Return the `StoredImage` of image, video or sound `number` of a record, from its layout."""
    grids = tuple(tile.grid for tile in layout.tiles)
    return StoredImage(number, grids, layout.arrangement, layout.film, layout.frames)


@dataclass(frozen=True)
class Augmentation:
    """Random crops and color changes of training images, determined by seed, record and epoch (`place`) alone.

    `crop` is the least share of a side that is kept; `color` the largest relative change of brightness, contrast and
    color. The size of an image does not change, since packing uses it before pixels are read.
    """

    crop: float
    color: float
    place: str

    def changed(self, pixels: Pixels, number: int) -> Pixels:
        """Return image `number` of the record, augmented; an array other than uint8 [height, width, 3] is unchanged."""
        if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,):
            return pixels
        digest = hashlib.sha256(f"{self.place}/{number}".encode()).digest()
        random = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        picture = Image.fromarray(pixels)
        sides = np.array(picture.size)
        part = sides * random.uniform(self.crop, 1, 2)
        first = (sides - part) * random.uniform(0, 1, 2)
        if self.crop < 1:
            picture = picture.resize(picture.size, Image.Resampling.BICUBIC, box=(*first, *(first + part)))
        for enhance, factor in zip(_COLORS, random.uniform(1 - self.color, 1 + self.color, 3), strict=True):
            picture = enhance(picture).enhance(factor) if self.color else picture
        return np.asarray(picture)


def names_places(conversation: Conversation) -> bool:
    """Return whether a conversation's text mentions boxes or points, which a crop would invalidate."""
    parts = (part for turn in conversation.turns for part in turn.parts if isinstance(part, str))
    return any(_PLACES.search(part) for part in parts)
