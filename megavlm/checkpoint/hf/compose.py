"""Write what the export of a model needs whose vision tower and language model come from two Hugging Face folders: as
one model, where Transformers has one that consists of them, and otherwise as a folder for each part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megavlm.arch.connector import connector_of
from megavlm.arch.layers import part_of
from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.checkpoint.hf.processor_files import write_processor_files
from megavlm.checkpoint.hf.sidecar import FILES, NAME, Kept, copy_kept, write_sidecar, write_tensors
from megavlm.config.schema import Config, ModelConfig
from megavlm.families import families, family_of
from megavlm.families.shared.connectors import exported_config
from megavlm.families.shared.family import Composition
from megavlm.families.shared.settings import Settings
from megavlm.files import replace_file

_TOWER_PARTS = ("embeddings.", "encoder.", "post_layernorm.", "head.")


def composed_config(
    pretrained_list: Sequence[Pretrained], model: ModelConfig, *, image_token: int
) -> dict[str, Any] | None:
    """Return the config.json of a Transformers model that computes what this model does; None if there is none."""
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
    """Write `parent`/hf as if the run, of this `config`, had begun with a model whose config.json is `described`.

    The tokenizer is the language model's, the image processor the vision tower's.
    """
    parts = {part: pretrained for pretrained in pretrained_list for part in pretrained.parts}
    target = parent / NAME
    for pretrained in (parts["vision"], parts["language"]):
        copy_kept(pretrained.folder.path, target / FILES)
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
    """Write `parent`/hf/PART for each part, so that an export is a folder for each; return whether that is possible.

    It is if tower and language model come from folders, and the connector says how its weights are named.
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
    """Write the sidecar of a part that was taken out of a larger model: its files, and no weights of other parts."""
    copy_kept(pretrained.folder.path, target / FILES)
    _remove_index(target / FILES)
    spelling = pretrained.family.name_prefixes[pretrained.variant]
    beside = (name for name in pretrained.unused if name.startswith(getattr(spelling, part)) and name != spelling.head)
    kept: Kept = {name: (pretrained.folder, name) for name in beside}
    kept |= _output_aside(pretrained, spelling.head)
    table = {key: rule for key, rule in pretrained.table.items() if part_of(key) == part}
    write_tensors(target, [pretrained], table, unused=kept, spelling=pretrained.variant, files={}, config=config)


def _remove_index(files: Path) -> None:
    """Remove the list of the files of weights, which an export has others of."""
    for index in files.glob("*.safetensors.index.json"):
        index.unlink()


def _output_aside(pretrained: Pretrained, name: str) -> Kept:
    """Return the weight of the output layer under this name, if the run embeds and therefore does not hold it."""
    head = pretrained.family.name_prefixes[pretrained.variant].head
    kept = pretrained.embeds and "language" in pretrained.parts and head in pretrained.folder.tensors
    return {name: (pretrained.folder, head)} if kept else {}


def _unused_of_tower(vision: Pretrained) -> Kept:
    """Return the tower's weights that no feature depends on, under the names that a composed model gives them."""
    prefix = vision.family.name_prefixes[vision.variant].vision
    return {
        f"vision_tower.{name.removeprefix(prefix)}": (vision.folder, name)
        for name in vision.unused
        if name.startswith(prefix) and name.removeprefix(prefix).startswith(_TOWER_PARTS)
    }
