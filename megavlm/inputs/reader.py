"""`ProcessorReader`: build a `Processor` from the `preprocessor_config.json` of a Transformers image processor class.

`VideoReader` reads `video_preprocessor_config.json`. Defaults are those of the class that the file names. Nothing is
guessed: an unknown size is an error.
`OPTIONS` has the types of options, and ranges far beyond any present model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from PIL.Image import Resampling

from megavlm.config.schema import ModelConfig
from megavlm.errors import UserError
from megavlm.inputs.processor import MOST_PIXELS, Processor, Whole
from megavlm.inputs.resize import Size
from megavlm.inputs.video import Budget, VideoProcessor
from megavlm.json_files import FLAG, OBJECT, TEXT, Expected, check, listed, mapped, number, whole

_AREA = whole(1, 2**26)  # pixels; larger pictures are not made on the way either
_FRAMES = whole(1, 2**18)
_FPS = number(1e-3, 1e3)
_COLOURS = number(-1e3, 1e3)
_ANY_SIZE = _AREA | listed(_AREA, 1, 2) | mapped(_AREA)
_SIZE = Expected("a number of pixels up to 67108864, two of them, or an object of them", _ANY_SIZE.fits)
OPTIONS: dict[str, Expected] = {
    "do_resize": FLAG,
    "do_rescale": FLAG,
    "do_convert_rgb": FLAG,
    "do_normalize": FLAG,
    "do_center_crop": FLAG,
    "do_pad": FLAG,
    "do_image_splitting": FLAG,
    "crop_to_patches": FLAG,
    "resample": whole(0, 5),
    "rescale_factor": number(0, 1e3),
    "image_mean": listed(_COLOURS, 3, 3),
    "image_std": listed(number(1e-6, 1e3), 3, 3),
    "size": _SIZE,
    "crop_size": _SIZE,
    "patch_size": _SIZE,
    "max_image_size": _SIZE,
    "merge_size": whole(1, 64),
    "pooling_kernel_size": whole(1, 64),
    **dict.fromkeys(("max_soft_tokens", "max_image_tokens", "max_video_frame_tokens"), whole(1, 2**14)),
    "temporal_patch_size": whole(1, 64),
    "fps": _FPS,
    "num_frames": _FRAMES,
    "min_frames": _FRAMES,
    "max_frames": _FRAMES,
    "max_duration": number(1e-3, 1e6),
    "spatial_merge_size": whole(1, 64),
    "min_size": whole(1, 2**14),
    "min_pixels": _AREA,
    "max_pixels": _AREA,
    "min_patches": whole(1, 256),
    "max_patches": whole(1, 256),
    "image_grid_pinpoints": listed(listed(whole(1, 2**14), 2, 2), 1, 1_024),
    "video_sampling": OBJECT,
    "slice_mode": FLAG,
    "use_image_id": FLAG,
    "max_slice_nums": whole(1, 1_024),
    "scale_resolution": whole(1, 2**13),
    "downsample_mode": TEXT,
    "max_num_frames": _FRAMES,
    "stack_frames": whole(1, 64),
}
# Of `video_sampling`.
VIDEO_SAMPLING: dict[str, Expected] = {"fps": _FPS, "max_frames": _FRAMES, "video_size": _SIZE}


Json = Mapping[str, Any]
_IMAGES, _VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"

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
        classes: names of the class in files, without "ImageProcessor", "Fast" and similar endings.
        defaults: the class's default options, which files leave out.
        build: (options, model, fields common to all processors) → the processor.
        model_types: the only model types that it reads, if they share a class name with another family; default: all.
        ranges: types and ranges of options that differ from those of `OPTIONS`.
    """

    classes: tuple[str, ...]
    defaults: Json
    build: Callable[[Json, ModelConfig, dict[str, Any]], Processor]
    model_types: tuple[str, ...] = ()
    ranges: Mapping[str, Expected] = field(default_factory=dict)

    def read(self, given: Json, model: ModelConfig, *, fast: bool) -> Processor:
        """Build the processor that the options `given` describe. Raises UserError for unsupported options."""
        options = _filled(given, self.defaults, _IMAGES, self.ranges)
        return self.build(options, model, {**_shared(options, model), "fast": fast})


@dataclass(frozen=True)
class VideoReader:
    """Reads the options of a video processor class.

    Args:
        classes: names of the class in files, without "VideoProcessor".
        model_types: model types for which it is used if no file names a class.
        defaults: the class's default options, which files leave out.
        usual: default frame budget, for options that the file leaves out.
        build: (options, model, fields common to all processors) → the processor; None if the model has no videos.
        ranges: types and ranges of options that differ from those of `OPTIONS`.
    """

    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    defaults: Json
    usual: Budget
    build: Callable[[Json, ModelConfig, dict[str, Any]], VideoProcessor | None]
    ranges: Mapping[str, Expected] = field(default_factory=dict)

    def read(self, given: Json, model: ModelConfig) -> VideoProcessor | None:
        """Build the video processor that the options `given` describe. In place of video options, they may be those of
        an image processor, as in Transformers. Raises UserError for unsupported options.
        """
        options = _filled(given, self.defaults, _VIDEOS, self.ranges)
        usual = replace(
            self.usual, **{name: options[name] for name in ("fps", "min_frames", "max_frames") if name in options}
        )
        if "num_frames" in options:  # of every clip, whatever its length
            usual = replace(usual, fps=math.inf, max_frames=options["num_frames"])
        return self.build(options, model, {**_shared(options, model), "usual": usual})


def _filled(given: Json, defaults: Json, file: str, ranges: Mapping[str, Expected]) -> Json:
    """Return the options of a file, completed by its class's defaults. Raises UserError for unsupported options."""
    options = {**defaults, **{key: value for key, value in given.items() if value is not None}}
    check(options, {**OPTIONS, **ranges}, file)
    for option in ("do_resize", "do_rescale", "do_convert_rgb"):
        if options.get(option, True) is not True:
            raise UserError(f"{option}: false in {file} is not supported: remove it")
    if not math.isclose(options.get("rescale_factor", 1 / 255), 1 / 255):
        raise UserError(f"rescale_factor in {file} must be 1/255: other factors are not supported")
    return options


def _shared(options: Json, model: ModelConfig) -> dict[str, Any]:
    """Return the fields common to all image and video processors."""
    normalise = options.get("do_normalize", True)
    return {
        "patch_size": model.vision.patch_size,
        "projector": model.projector,
        "resample": Resampling(options["resample"]),
        "mean": tuple(options["image_mean"]) if normalise else (0.0, 0.0, 0.0),
        "std": tuple(options["image_std"]) if normalise else (1.0, 1.0, 1.0),
    }


def build_whole(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Whole:
    """Build a processor that does not tile images."""
    size = options["size"]
    edge = size["shortest_edge"] if has_only(size, "shortest_edge") else size if isinstance(size, int) else None
    return Whole(
        edge=edge,
        size=None if edge else sides(size, "size"),
        crop=sides(options.get("crop_size"), "crop_size") if options.get("do_center_crop") else None,
        **shared,
    )


def video_class_of(options: Json) -> str | None:
    """Return the short name of the video processor class that a file names; None if it names none."""
    name = options.get("video_processor_type")
    return name.removesuffix("VideoProcessor") if isinstance(name, str) else None


def class_of(preprocessor_config: Json) -> tuple[str, Json]:
    """Return the short name of the image processor class in a file, and its options, which newer files nest.

    Options of a feature extractor of sounds are among them, as in older files.
    """
    given = preprocessor_config.get("image_processor", preprocessor_config)
    if not isinstance(given, Mapping):
        raise UserError("image_processor in processor_config.json is no object: correct it, or copy the file again")
    if isinstance(of_sounds := preprocessor_config.get("feature_extractor"), Mapping):
        given = {**of_sounds, **given}
    code = given.get("auto_map")
    own = code.get("AutoImageProcessor") if isinstance(code, Mapping) else None
    name = str(given.get("image_processor_type") or given.get("feature_extractor_type") or own).rpartition(".")[2]
    for ending in ("Pil", "Fast", "ImageProcessor", "FeatureExtractor"):
        name = name.removesuffix(ending)
    return name, given


def has_only(size: Any, *names: str) -> bool:
    """Return whether `size` is a mapping with exactly these keys."""
    return isinstance(size, Mapping) and set(size) == set(names)


def sides(size: Any, name: str) -> Size:
    """Parse a size, written as one number, two numbers or a mapping, as (height, width). Raises UserError."""
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
    """Return the side of a square size. Raises UserError if the size is not square."""
    if size[0] != size[1]:
        raise UserError(f"{name} in preprocessor_config.json must be square, and is {size[0]}×{size[1]}")
    return size[0]


def require_model_value(options: Json, name: str, expected: float) -> None:
    """Raise UserError if an option of the file contradicts the model's config."""
    if options.get(name, expected) != expected:
        raise UserError(
            f"{name} {options[name]} in preprocessor_config.json is not the model's, {expected} in config.json: "
            "both files must be of one model"
        )
