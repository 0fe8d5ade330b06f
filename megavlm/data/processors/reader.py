"""`ProcessorReader`: how `preprocessor_config.json` of one image processor class of Transformers becomes a `Processor`.

Defaults are those of the class that the file names. Nothing is guessed: an unknown size is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL.Image import Resampling

from megavlm.config.schema import ModelConfig
from megavlm.data.processors.expected import OPTIONS
from megavlm.data.processors.processor import MOST_PIXELS, Processor, Whole
from megavlm.data.processors.sizes import Size
from megavlm.data.processors.video import VideoProcessor
from megavlm.errors import UserError
from megavlm.json_files import check

Json = Mapping[str, Any]

# Defaults that classes share: resampling (3: bicubic, as Pillow counts) and the channels' means and deviations.
CLIP_PIXELS: Json = {
    "resample": 3,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
HALF_PIXELS: Json = {"resample": 3, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
SQUARE_224: Json = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}


@dataclass(frozen=True)
class ProcessorReader:
    """Reads the options of an image processor class.

    Args:
        classes: names that the class has in files, without "ImageProcessor", "Fast" and the like.
        defaults: the class's own options, which files leave out.
        build: (options, model, fields that all processors share) → the processor.
        video: (options of the video processor, model) → the one for videos, if the model has a video token.
    """

    classes: tuple[str, ...]
    defaults: Json
    build: Callable[[Json, ModelConfig, dict[str, Any]], Processor]
    video: Callable[[Json, ModelConfig], VideoProcessor] | None = None

    def read(self, given: Json, model: ModelConfig, *, fast: bool, video: Json | None = None) -> Processor:
        """Return the processor that the options `given` describe. Raises UserError for what is not supported.

        `video` are those of the video processor; without it they are those of the images, as in Transformers.
        """
        options = {**self.defaults, **{key: value for key, value in given.items() if value is not None}}
        check(options, OPTIONS, "preprocessor_config.json")
        for option in ("do_resize", "do_rescale", "do_convert_rgb"):
            if options.get(option, True) is not True:
                raise UserError(f"{option}: false in preprocessor_config.json is not supported: remove it")
        if not math.isclose(options.get("rescale_factor", 1 / 255), 1 / 255):
            raise UserError("rescale_factor in preprocessor_config.json must be 1/255: other factors are not supported")
        normalise = options.get("do_normalize", True)
        shared = {
            "patch_size": model.vision.patch_size,
            "projector": model.projector,
            "resample": Resampling(options["resample"]),
            "mean": tuple(options["image_mean"]) if normalise else (0.0, 0.0, 0.0),
            "std": tuple(options["image_std"]) if normalise else (1.0, 1.0, 1.0),
            "fast": fast,
            "video": self.video(video or given, model) if self.video and model.video_token is not None else None,
        }
        return self.build(options, model, shared)


def build_whole(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Whole:
    """Return a processor that keeps an image in one piece."""
    size = options["size"]
    edge = size["shortest_edge"] if has_only(size, "shortest_edge") else size if isinstance(size, int) else None
    return Whole(
        edge=edge,
        size=None if edge else sides(size, "size"),
        crop=sides(options.get("crop_size"), "crop_size") if options.get("do_center_crop") else None,
        **shared,
    )


def class_of(preprocessor_config: Json) -> tuple[str, Json]:
    """Return the short name of the class that the file names, and its options; newer files nest them."""
    given = preprocessor_config.get("image_processor", preprocessor_config)
    if not isinstance(given, Mapping):
        raise UserError("image_processor in processor_config.json is no object: correct it, or copy the file again")
    name = str(given.get("image_processor_type") or given.get("feature_extractor_type"))
    for ending in ("Pil", "Fast", "ImageProcessor", "FeatureExtractor"):
        name = name.removesuffix(ending)
    return name, given


def has_only(size: Any, *names: str) -> bool:
    """Return whether `size` is a mapping with exactly these keys."""
    return isinstance(size, Mapping) and set(size) == set(names)


def sides(size: Any, name: str) -> Size:
    """Return (height, width) of a size that is written as one number, two numbers or a mapping."""
    match size:
        case int():
            found = size, size
        case {"height": int(height), "width": int(width)} if len(size) == 2:
            found = height, width
        case [int(height), int(width)]:
            found = height, width
        case _:
            raise UserError(f"{name} {size!r:.80} in preprocessor_config.json is not supported: give height and width")
    if found[0] * found[1] > MOST_PIXELS:
        raise UserError(
            f"{name} {size!r:.80} in preprocessor_config.json has more than {MOST_PIXELS} pixels: correct it"
        )
    return found


def square(size: Size, name: str) -> int:
    """Return the side of a square size. Raises UserError for any other."""
    if size[0] != size[1]:
        raise UserError(f"{name} in preprocessor_config.json must be square, and is {size[0]}×{size[1]}")
    return size[0]


def require_model_value(options: Json, name: str, expected: int) -> None:
    """Refuse an option of the file that contradicts the model."""
    if options.get(name, expected) != expected:
        raise UserError(
            f"{name} {options[name]} in preprocessor_config.json is not the model's, {expected} in config.json: "
            "both files must be of one model"
        )
