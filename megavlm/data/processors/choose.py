"""Which processor a run's images go through."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL.Image import Resampling

from megavlm.config.schema import Config, ModelConfig
from megavlm.data.processors.build import processor_from
from megavlm.data.processors.families import Anyres, Processor, Whole
from megavlm.errors import UserError

_FILES = ("preprocessor_config.json", "processor_config.json")


def processor_for(config: Config) -> Processor:
    """The processor of `--image-processor`, else of the folder that the vision tower comes from, else plain resizing.

    Patches and merging are the model's, whatever the folder says. Raises UserError where both do not fit.
    """
    model = config.model
    given = config.data.image_processor or config.checkpoint.init_from or config.checkpoint.vision_from
    settings = _settings(Path(given)) if given else None
    if settings is None:
        if config.data.image_processor:
            raise UserError(f"--image-processor {given} has no {' and no '.join(_FILES)}: name a folder with one")
        return _checked(_plain(model, fast=config.data.fast_image_resize), model)
    processor = processor_from(settings, _described(model), fast=config.data.fast_image_resize)
    if isinstance(processor, Whole):
        processor = replace(processor, merge=model.projector.pixel_shuffle)
    return _checked(processor, model)


def _settings(folder: Path) -> Any:
    for name in _FILES:
        try:
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / name} cannot be read ({error}): check --image-processor") from error
        if isinstance(settings, dict) and (name == _FILES[0] or "image_processor" in settings):
            return settings
    return None


def _described(model: ModelConfig) -> dict[str, Any]:
    """What processors read of a model's config.json."""
    merge = model.projector.pixel_shuffle
    return {
        "vision_config": {"patch_size": model.vision.patch_size, "spatial_merge_size": merge},
        "scale_factor": merge,
        "downsample_ratio": 1 / merge,
        "vision_aspect_ratio": f"anyres_max_{model.projector.anyres_max_tiles or 9}",
    }


def _plain(model: ModelConfig, *, fast: bool) -> Whole:
    """Stretched to the size that the tower is made for, values from −1 to 1."""
    side, half = model.vision.image_size, (0.5, 0.5, 0.5)
    return Whole(
        patch_size=model.vision.patch_size,
        merge=model.projector.pixel_shuffle,
        resample=Resampling.BICUBIC,
        mean=half,
        std=half,
        size=(side, side),
        fast=fast,
    )


def _checked(processor: Processor, model: ModelConfig) -> Processor:
    tiled = model.projector.anyres_max_tiles is not None
    if tiled != isinstance(processor, Anyres):
        raise UserError(
            "--projector-anyres-max-tiles goes with LLaVA-OneVision's image processor, and "
            + ("--image-processor is another" if tiled else "it is left out")
            + ": name the folder of a LLaVA-OneVision model, or change --projector-anyres-max-tiles"
        )
    if model.vision.in_channels != 3:
        raise UserError(f"--vision-in-channels {model.vision.in_channels}: images from --datasets have 3 channels")
    return processor
