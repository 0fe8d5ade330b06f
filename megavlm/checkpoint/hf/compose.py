"""Write the sidecar of a model whose vision tower and language model come from two Hugging Face folders.

Its exports are one model, if Transformers has a class for this combination, and otherwise a folder for each part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megavlm.arch.connector import connector_of
from megavlm.arch.layers import part_of
from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.checkpoint.hf.sidecar import FILES, NAME, Kept, copy_described, write_sidecar, write_tensors
from megavlm.config.schema import Config, ModelConfig
from megavlm.data.chat.spans import image_style, source_of
from megavlm.data.chat.template import ChatTemplate, TemplateError
from megavlm.data.preprocessors import image_settings, model_type, processor_for, tokenizer_path
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.errors import UserError
from megavlm.families import families, family_of
from megavlm.families.shared.connectors import exported_config
from megavlm.families.shared.family import Composition
from megavlm.families.shared.settings import Settings
from megavlm.files import replace_file
from megavlm.inputs.vision_inputs import NAME as CHANNELS_FILE
from megavlm.inputs.vision_inputs import RGB, Channels, channels_json
from megavlm.json_files import read_json
from megavlm.storage.cache import local_path

_TEMPLATE = "chat_template.jinja"
_IMAGES, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
_OF_OTHERS = ("chat_template.json", "video_preprocessor_config.json")
# Joins the parts of each message for a template that takes texts, in the same way as `ChatFormat` does in training.
_IN_PARTS = Path(__file__).with_name("in_parts.jinja")
_CHANNELS = ("num_channels", "in_channels", "in_chans")  # of a config.json's vision_config
_TOWER_PARTS = ("embeddings.", "encoder.", "post_layernorm.", "head.")


def composed_config(
    pretrained_list: Sequence[Pretrained], model: ModelConfig, *, image_token: int
) -> dict[str, Any] | None:
    """Return the config.json of the Transformers model that equals the composed model; None if there is none."""
    parts = {part: pretrained for pretrained in pretrained_list for part in pretrained.parts}
    if parts.keys() != {"vision", "language"}:
        return None
    vision, language = parts["vision"], parts["language"]
    composition = Composition(
        vision.family.name, vision.folder.settings, language.folder.settings, model, image_token=image_token
    )
    configs = (family.compose(composition) for family in families() if family.compose is not None)
    return next((config for config in configs if config is not None), None)


def write_composed_sidecar(
    pretrained_list: Sequence[Pretrained],
    described: Mapping[str, Any],
    parent: Path,
    config: Config,
    *,
    image_token: int,
) -> None:
    """Write the sidecar `parent`/hf of a composed model, as if the run had started from one with the config.json
    `described`.

    The tokenizer is the language model's, the image processor the vision tower's.
    """
    parts = {part: pretrained for pretrained in pretrained_list for part in pretrained.parts}
    target = parent / NAME
    for pretrained in (parts["vision"], parts["language"]):
        copy_described(pretrained.folder, target / FILES)
    _remove_index(target / FILES)
    replace_file(target / FILES / "config.json", json.dumps(described, indent=2, sort_keys=True) + "\n")
    family = family_of(Settings(described, "config.json"))
    assert family.processor is not None
    write_processor_files(target / FILES, config, family.processor(config.model), image_token=image_token)
    spelling = family.name_prefixes[0]
    unused = {**_unused_of_tower(parts["vision"]), **_output_aside(parts["language"], spelling.head)}
    table = family.table(config.model, spelling)
    write_tensors(target, pretrained_list, table, unused=unused, spelling=0, files={}, config=config)


def write_part_sidecars(pretrained_list: Sequence[Pretrained], parent: Path, config: Config) -> bool:
    """Write a sidecar `parent`/hf/PART for each part, so that an export has a folder for each part.

    Return False, without writing, unless tower and language model come from folders and the connector names its
    weights in an export.
    """
    model = config.model
    parts = {part: pretrained for pretrained in pretrained_list for part in pretrained.parts if part != "projector"}
    spelling = connector_of(model.projector).exported(model)
    if parts.keys() != {"vision", "language"} or spelling is None:
        return False
    for part, pretrained in parts.items():
        if pretrained.family.parts == (part,):
            write_sidecar(pretrained, parent / NAME / part, config)
        else:
            _write_part_of_larger(pretrained, part, parent / NAME / part, config)
    target = parent / NAME / "projector"
    (target / FILES).mkdir(parents=True)
    described = exported_config(model)
    replace_file(target / FILES / "config.json", json.dumps(described, indent=2, sort_keys=True) + "\n")
    family = family_of(Settings(described, "config.json"))
    table = family.table(model, family.name_prefixes[spelling])
    write_tensors(target, pretrained_list, table, unused={}, spelling=spelling, files={}, config=config)
    return True


def _write_part_of_larger(pretrained: Pretrained, part: str, target: Path, config: Config) -> None:
    """Write the sidecar of one part of a larger pretrained model, without weights of the other parts."""
    copy_described(pretrained.folder, target / FILES)
    _remove_index(target / FILES)
    spelling = pretrained.family.name_prefixes[pretrained.variant]
    beside = (name for name in pretrained.unused if name.startswith(getattr(spelling, part)) and name != spelling.head)
    kept: Kept = {name: (pretrained.folder, name) for name in beside}
    kept |= _output_aside(pretrained, spelling.head)
    table = {key: rule for key, rule in pretrained.table.items() if part_of(key) == part}
    write_tensors(target, [pretrained], table, unused=kept, spelling=pretrained.variant, files={}, config=config)


def _remove_index(files: Path) -> None:
    """Remove the index of weight files: an export has other weight files."""
    for index in files.glob("*.safetensors.index.json"):
        index.unlink()


def _output_aside(pretrained: Pretrained, name: str) -> Kept:
    """Return {name: weight of the output layer} for an embedding model, which does not use this weight; else {}."""
    head = pretrained.family.name_prefixes[pretrained.variant].head
    kept = pretrained.pools and "language" in pretrained.parts and head in pretrained.folder.tensors
    return {name: (pretrained.folder, head)} if kept else {}


def _unused_of_tower(vision: Pretrained) -> Kept:
    """Return the tower's weights that no feature depends on, under their names in a composed model."""
    prefix = vision.family.name_prefixes[vision.variant].vision
    return {
        f"vision_tower.{name.removeprefix(prefix)}": (vision.folder, name)
        for name in vision.unused
        if name.startswith(prefix) and name.removeprefix(prefix).startswith(_TOWER_PARTS)
    }


def write_processor_files(files: Path, config: Config, processor: Mapping[str, Any], *, image_token: int) -> None:
    """Write the image processor of the run's tower, `processor_config.json` with the values of `processor`, and the
    run's chat template to `files`. Without a tokenizer or an image processor, write nothing.
    """
    given = config.data.image_processor or config.checkpoint.vision_from
    settings = None if given is None else image_settings(local_path(given, "--image-processor", weights=False))
    try:
        folder = tokenizer_path(config)
        tokenizer = HuggingFaceTokenizer.of(folder, image=image_token)
        source = source_of(tokenizer, config.data.chat_template, model_type(folder))
        template = None if source is None else _for_parts(source, tokenizer)
    except UserError:  # a run of synthetic data needs none
        return
    if settings is None:
        return
    for name in _OF_OTHERS:
        (files / name).unlink(missing_ok=True)
    images = settings.get("image_processor", settings)
    images = {name: value for name, value in images.items() if name != "processor_class"}
    _write(files / _IMAGES, images)
    _write(files / _PROCESSOR, {**processor, "image_token": tokenizer.image_text})
    if template is not None:
        replace_file(files / _TEMPLATE, template)


def _for_parts(source: str, tokenizer: HuggingFaceTokenizer) -> str | None:
    """Return a chat template that takes messages in parts and writes each image as the tokenizer's image token.

    Return None for a template that cannot render any conversation.
    """
    try:
        in_parts, written = image_style(
            ChatTemplate(source, tuple(sorted(tokenizer.specials.items()))), tokenizer.image_text, tokenizer.image_text
        )
    except TemplateError:
        return None
    if in_parts and written == tokenizer.image_text:
        return source
    return _IN_PARTS.read_text(encoding="utf-8").replace("IMAGE", json.dumps(tokenizer.image_text)) + source


def _write(path: Path, values: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(values, indent=2, sort_keys=True) + "\n")


def note_channels(files: Path, config: Config) -> None:
    """Correct the number of channels in `files`/config.json; write channels.json if images are not RGB.

    Transformers then loads the export, and `--init-from` reads images as this run did.
    """
    wanted = config.model.vision.in_channels
    values = read_json(files / "config.json")
    family = family_of(Settings(values, "config.json"))
    if family.config(Settings(values, "config.json")).vision.in_channels != wanted:
        tower = values.get("vision_config", values)
        # A family reads one of the keys; try keys that the file has before the others.
        for key in sorted(_CHANNELS, key=lambda key: key not in tower):
            wider = {**tower, key: wanted}
            changed = {**values, "vision_config": wider} if "vision_config" in values else wider
            if family.config(Settings(changed, "config.json")).vision.in_channels == wanted:
                replace_file(files / "config.json", json.dumps(changed, indent=2) + "\n")
                break
    if config.data.kind != "files":
        return
    processor = processor_for(config)
    if processor.vision_input.name != RGB.name:
        channels = Channels(processor.mean, processor.std)
        replace_file(files / CHANNELS_FILE, channels_json(processor.vision_input.name, channels))
