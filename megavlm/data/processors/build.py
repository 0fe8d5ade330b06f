"""From the JSON beside a model to its `Processor`.

`preprocessor_config.json` says what happens to pixels, `config.json` how patches become features. Newer folders hold
the first as `image_processor` inside `processor_config.json`: give that file then. Defaults are those of the processor
class that the file names. Nothing is guessed: an unknown class or size is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from PIL.Image import Resampling

from megavlm.data.processors.families import Anyres, Native, Processor, Split, Tiled, Whole
from megavlm.data.processors.sizes import Size
from megavlm.errors import UserError

Json = Mapping[str, Any]

_CLIP: Json = {
    "resample": 3,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
_HALF: Json = {"resample": 3, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_SQUARE_224: Json = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
# LLaVA-OneVision's (height, width), where a folder names none.
DEFAULT_RESOLUTIONS = tuple(product(range(384, 2305, 384), repeat=2))
_DEFAULTS: Mapping[str, Json] = {
    "CLIP": {**_CLIP, **_SQUARE_224, "do_center_crop": True},
    "Llava": {**_CLIP, **_SQUARE_224, "do_center_crop": True, "do_pad": False},
    "Siglip": {**_HALF, "size": {"height": 224, "width": 224}},
    "LlavaOnevision": {
        **_CLIP,
        "size": {"height": 384, "width": 384},
        "image_grid_pinpoints": DEFAULT_RESOLUTIONS,
    },
    "GotOcr2": {**_CLIP, "size": {"height": 384, "width": 384}, "min_patches": 1, "max_patches": 12},
    "Qwen2VL": {**_CLIP, "size": {"shortest_edge": 56**2, "longest_edge": 28**2 * 1280}},
    "Idefics3": {
        **_HALF,
        "resample": 1,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "do_image_splitting": True,
    },
}
_SAME = {"SmolVLM": "Idefics3", "Qwen2_5_VL": "Qwen2VL", "Qwen3VL": "Qwen2VL"}


def processor_from(preprocessor_config: Json, model_config: Json, *, fast: bool = False) -> Processor:
    """The processor that both files describe; `fast` is `Processor.fast`.

    Raises UserError, in one line, for what is not supported.
    """
    given = preprocessor_config.get("image_processor", preprocessor_config)
    name = str(given.get("image_processor_type") or given.get("feature_extractor_type"))
    for ending in ("Pil", "Fast", "ImageProcessor", "FeatureExtractor"):
        name = name.removesuffix(ending)
    name = _SAME.get(name, name)
    if name not in _BUILDERS:
        raise UserError(
            f"image processor {name!r} of preprocessor_config.json is unknown: supported are {', '.join(_BUILDERS)}"
        )
    options = {**_DEFAULTS[name], **{key: value for key, value in given.items() if value is not None}}
    for option in ("do_resize", "do_rescale", "do_convert_rgb"):
        if options.get(option, True) is not True:
            raise UserError(f"{option}: false in preprocessor_config.json is not supported: remove it")
    if not math.isclose(options.get("rescale_factor", 1 / 255), 1 / 255):
        raise UserError("rescale_factor in preprocessor_config.json must be 1/255: other factors are not supported")
    return _BUILDERS[name](options, _Model(model_config), {**_pixels(options), "fast": fast})


class _Model:
    """What processors need of `config.json`; towers alone have their values at the top."""

    def __init__(self, config: Json) -> None:
        self.config = config
        self.vision: Json = config.get("vision_config", config)

    @property
    def patch_size(self) -> int:
        patch = self.vision.get("patch_size")
        sides = set(patch) if isinstance(patch, list | tuple) else {patch}
        if len(sides) != 1 or not isinstance(side := sides.pop(), int):
            raise UserError(f"patch_size of the vision model in config.json must be one number, and is {patch!r}")
        return side


def _pixels(options: Json) -> dict[str, Any]:
    normalise = options.get("do_normalize", True)
    return {
        "resample": Resampling(options["resample"]),
        "mean": tuple(options["image_mean"]) if normalise else (0.0, 0.0, 0.0),
        "std": tuple(options["image_std"]) if normalise else (1.0, 1.0, 1.0),
    }


def _whole(options: Json, model: _Model, pixels: dict[str, Any]) -> Processor:
    """CLIP, SigLIP, LLaVA. A LLaVA with strategy "full" also uses the tower's class token."""
    size = options["size"]
    edge = size["shortest_edge"] if _has(size, "shortest_edge") else size if isinstance(size, int) else None
    keeps_class_token = model.config.get("vision_feature_select_strategy", "default") == "full"
    return Whole(
        patch_size=model.patch_size,
        edge=edge,
        size=None if edge else _sides(size, "size"),
        crop=_sides(options.get("crop_size"), "crop_size") if options.get("do_center_crop") else None,
        pad_to_square=bool(options.get("do_pad", False)) and "Llava" in str(options.get("image_processor_type")),
        class_token=keeps_class_token and "clip" in str(model.vision.get("model_type")),
        **pixels,
    )


def _anyres(options: Json, model: _Model, pixels: dict[str, Any]) -> Processor:
    ratio = str(model.config.get("vision_aspect_ratio", "anyres_max_9"))
    if not ratio.removeprefix("anyres_max_").isdigit():
        raise UserError(f"vision_aspect_ratio {ratio!r} in config.json is not supported: use anyres_max_N")
    if model.config.get("vision_feature_select_strategy", "full") != "full":
        raise UserError("vision_feature_select_strategy in config.json must be 'full' for LLaVA-OneVision")
    tile = _square(_sides(options["size"], "size"), "size")
    resolutions = tuple((int(height), int(width)) for height, width in options["image_grid_pinpoints"])
    if not resolutions or any(height % tile or width % tile for height, width in resolutions):
        raise UserError(f"image_grid_pinpoints in preprocessor_config.json must be multiples of size {tile}")
    return Anyres(
        patch_size=model.patch_size,
        tile=tile,
        resolutions=resolutions,
        max_tiles=int(ratio.removeprefix("anyres_max_")),
        **pixels,
    )


def _tiled(options: Json, model: _Model, pixels: dict[str, Any]) -> Processor:
    """InternVL's own processor always cuts, whatever `crop_to_patches` says in the file."""
    ratio = model.config.get("downsample_ratio", 0.5)
    return Tiled(
        patch_size=model.patch_size,
        merge=round(1 / ratio),
        tile=_sides(options["size"], "size"),
        fewest=options["min_patches"],
        most=options["max_patches"],
        placeholder="<IMG_CONTEXT>",
        image_token="<IMG_CONTEXT>",
        **pixels,
    )


def _native(options: Json, model: _Model, pixels: dict[str, Any]) -> Processor:
    """The file's sizes, as pixels or as old names; patches must be those of the model."""
    merge = model.vision.get("spatial_merge_size", 2)
    for key, ours in (("patch_size", model.patch_size), ("merge_size", merge)):
        if options.get(key, ours) != ours:
            raise UserError(
                f"{key} {options[key]} in preprocessor_config.json is not the model's, {ours} in config.json: "
                "both files must be of one model"
            )
    size = options["size"]
    if not _has(size, "shortest_edge", "longest_edge"):
        raise UserError("size in preprocessor_config.json must give shortest_edge and longest_edge, as areas in pixels")
    return Native(
        patch_size=model.patch_size,
        merge=merge,
        min_pixels=options.get("min_pixels", size["shortest_edge"]),
        max_pixels=options.get("max_pixels", size["longest_edge"]),
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        image_token="<|image_pad|>",
        **pixels,
    )


def _split(options: Json, model: _Model, pixels: dict[str, Any]) -> Processor:
    size, tile = options["size"], options["max_image_size"]
    if not _has(size, "longest_edge") or not _has(tile, "longest_edge"):
        raise UserError("size and max_image_size in preprocessor_config.json must give longest_edge, and nothing else")
    return Split(
        patch_size=model.patch_size,
        merge=model.config.get("scale_factor", 2),
        edge=size["longest_edge"],
        tile=tile["longest_edge"],
        split=options["do_image_splitting"],
        **pixels,
    )


_BUILDERS: Mapping[str, Callable[[Json, _Model, dict[str, Any]], Processor]] = {
    "CLIP": _whole,
    "Llava": _whole,
    "Siglip": _whole,
    "LlavaOnevision": _anyres,
    "GotOcr2": _tiled,
    "Qwen2VL": _native,
    "Idefics3": _split,
}


def _has(size: Any, *names: str) -> bool:
    return isinstance(size, Mapping) and set(size) == set(names)


def _sides(size: Any, name: str) -> Size:
    """(height, width) of a size that is written as one number, two numbers or a mapping."""
    match size:
        case int():
            return size, size
        case {"height": int(height), "width": int(width)} if len(size) == 2:
            return height, width
        case [int(height), int(width)]:
            return height, width
    raise UserError(f"{name} {size!r} in preprocessor_config.json is not supported: give height and width")


def _square(size: Size, name: str) -> int:
    if size[0] != size[1]:
        raise UserError(f"{name} in preprocessor_config.json must be square, and is {size[0]}×{size[1]}")
    return size[0]
