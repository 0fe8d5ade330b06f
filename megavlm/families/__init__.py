"""The Hugging Face architectures that can be trained: each module of this package declares one or a few `Family`s.

A new family needs one new module in this package and no other change. `shared` holds code that several families use.
Importing the package needs no torch, so that the planner's command can list the published models.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from megavlm.config.messages import did_you_mean, plain
from megavlm.config.registry import Entry, registered
from megavlm.config.schema import Config, ModelConfig
from megavlm.errors import UserError
from megavlm.families.shared.chat import SHARED, NamedTemplate
from megavlm.families.shared.connectors import connector_families
from megavlm.families.shared.family import Family
from megavlm.families.shared.settings import Settings
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import VideoReader, class_of, video_class_of
from megavlm.inputs.video import VideoProcessor
from megavlm.rules.defaults import resolve_model
from megavlm.rules.fields import options, value_at, with_values


def _declared() -> tuple[Family, ...]:
    """Return the families of all modules of this package, in the modules' order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)
    modules = [import_module(f"{__name__}.{name}") for name in names]
    found = (value for module in modules for value in vars(module).values() if isinstance(value, Family))
    return tuple({id(family): family for family in found}.values())  # a module may import another's family


FAMILIES: tuple[Family, ...] = _declared()
VIDEO_READERS: Mapping[str, VideoReader] = {
    name: family.videos
    for family in FAMILIES
    if family.videos is not None
    for name in (*family.videos.classes, *family.videos.model_types)
}
CHAT_TEMPLATES: Mapping[str, NamedTemplate] = {
    template.name: template
    for template in (*SHARED, *(family.chat_template for family in FAMILIES if family.chat_template))
}
# Settings of released models' config.json beyond the defaults, by the name that the planner accepts. A llama without
# settings is Llama 2; gpt_7_1b has the 7.1e9 parameters of Megatron-LM's scaling table, with an MLP of three matrices
# of 8/3·H in place of two of 4·H.
_RELEASED = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
PUBLISHED: Mapping[str, tuple[Family, Mapping[str, Any]]] = {
    name: (family, values) for family in FAMILIES for name, values in _RELEASED.get(family.name, {}).items()
}
# "<image>" first: tokenizers of newer families extend older ones and may have several of these texts.
IMAGE_TEXTS: tuple[str, ...] = tuple(dict.fromkeys(("<image>", *(family.image_text for family in FAMILIES))))

_PUBLISHED = ("model", "published")


def families() -> tuple[Family, ...]:
    """Return the families of this package, those of extensions, and those of connector folders."""
    added = (entry.load() for entry in registered("families").values() if isinstance(entry, Entry))
    return (*FAMILIES, *added, *connector_families())


def kind_of(config: Mapping[str, Any]) -> Any:
    """Return the kind of a config.json: its `model_type`, or "model_type/X" if a family exists for that.

    X is an entry of `architectures` or the model_type of the vision tower.
    """
    tower, architectures = config.get("vision_config"), config.get("architectures")
    inner = [*architectures] if isinstance(architectures, list) else []
    inner += [tower.get("model_type")] if isinstance(tower, Mapping) else []
    kinds = [f"{config.get('model_type')}/{kind}" for kind in inner]
    known = {kind for family in families() for kind in family.model_types}
    return next((kind for kind in kinds if kind in known), config.get("model_type"))


def family_of(settings: Settings) -> Family:
    """Return the family that a config.json belongs to. Raises UserError, which lists the known types, if none fits."""
    settings.need("model_type")
    kind = kind_of(settings.values)
    for family in families():
        if kind in family.model_types:
            return family
    known = ", ".join(kind for family in families() for kind in family.model_types)
    raise UserError(
        f"{settings.where}: model_type {kind!r:.80} is not supported; supported are {known}; an --extension may add "
        "others"
    )


def processor_from(
    preprocessor_config: Mapping[str, Any],
    model: ModelConfig,
    *,
    fast: bool = False,
    video: Mapping[str, Any] | None = None,
    model_type: str | None = None,
) -> Processor:
    """Return the image processor that a `preprocessor_config.json` describes, with the patches of `model`.

    Raises UserError, in one line, for options that are not supported.

    Args:
        preprocessor_config: the file's content. Newer folders have the options as `image_processor` inside
            `processor_config.json`; pass the content of that file for them.
        fast: see `Processor.fast`.
        video: content of `video_preprocessor_config.json`, if the folder has this file.
        model_type: model type of the folder. It selects between families that share an image processor class, and
            takes precedence over the class of video processors.
    """
    name, options = class_of(preprocessor_config)
    found = [reader for family in families() for reader in family.image_processors]
    found = [reader for reader in found if not reader.model_types] + [
        reader for reader in found if model_type in reader.model_types
    ]
    readers = {name: reader for reader in found for name in reader.classes}
    if name not in readers:
        raise UserError(
            f"image processor {name!r:.80} of preprocessor_config.json is unknown: supported are " + ", ".join(readers)
        )
    processor = readers[name].read(options, model, fast=fast)
    return replace(processor, video=_video_processor(options if video is None else video, model, model_type))


def _video_processor(options: Any, model: ModelConfig, model_type: str | None) -> VideoProcessor | None:
    """Return the video processor of a model; None for a model that is trained on images alone."""
    if not isinstance(options, Mapping):
        raise UserError("video_processor in processor_config.json is no object: correct it, or copy the file again")
    reader = VIDEO_READERS.get(model_type or "") or VIDEO_READERS.get(video_class_of(options) or "")
    return reader.read(options, model) if reader is not None else None


def chat_template_of(model_type: str | None) -> NamedTemplate | None:
    """Return the chat template for folders of this model type that have none; None if no family has one."""
    return next((family.chat_template for family in families() if model_type in family.model_types), None)


def published_model(name: str, *, option: str = "--model") -> ModelConfig:
    """Return the `ModelConfig` of a published model. Raises UserError, with a suggestion, for an unknown name."""
    if name not in PUBLISHED:
        hint = ": give a folder, or the hub's OWNER/NAME, to --hf" if option == "--model" and "/" in name else ""
        hint = hint or did_you_mean(name, PUBLISHED) or f": choose one of {', '.join(PUBLISHED)}"
        raise UserError(f"{option} {plain(name)} is not known{hint}")
    family, values = PUBLISHED[name]
    model = family.config(Settings(values, name))
    # A plan may ask for more tokens than the model was trained with.
    model = replace(model, language=replace(model.language, max_positions=None))
    return resolve_model(model)


def with_published(config: Config, values: Mapping[tuple[str, ...], Any]) -> Config:
    """Return a copy of `config` with the values at the given paths replaced.

    The name of a published model sets all sizes of the model; other given values override them.
    """
    if (name := values.get(_PUBLISHED, config.model.published)) != config.model.published:
        config = without_published(config)
    if name is not None and _PUBLISHED in values:
        config = with_values(config, _published_sizes(name))
    return with_values(config, values)


def without_published(config: Config) -> Config:
    """Return the configuration with sizes that --published-model set reset to defaults; changed sizes are kept."""
    if config.model.published is None:
        return config
    sizes = _published_sizes(config.model.published)
    defaults = {option.path: option.default for option in options()}
    same = (path for path, value in sizes.items() if value_at(config, path) == value)
    return with_values(config, {_PUBLISHED: None} | {path: defaults[path] for path in same})


def _published_sizes(name: str) -> dict[tuple[str, ...], Any]:
    """Return the value of each option that a published model sets, by path. Raises UserError for an unknown name."""
    model = replace(Config(), model=published_model(name, option="--published-model"))
    found = {option: value_at(model, option.path) for option in options() if option.path[0] == "model"}
    return {
        option.path: value
        for option, value in found.items()
        if option.path[1] in ("vision", "projector", "language") or value != option.default
    }
