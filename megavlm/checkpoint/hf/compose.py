"""Write what the export of a model needs whose vision tower and language model come from two Hugging Face folders: as
one model, where Transformers has one that consists of them, and otherwise as a folder for each part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megavlm.arch.connector import connector_of
from megavlm.checkpoint.hf.files import HfFolder
from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.checkpoint.hf.safetensors_writer import StreamedFile
from megavlm.checkpoint.hf.sidecar import FILES, NAME, TENSORS, UNUSED, copy_kept, write_sidecar
from megavlm.config.schema import ModelConfig
from megavlm.families import families
from megavlm.families.shared.connectors import exported_config
from megavlm.families.shared.family import Composition

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


def write_composed_sidecar(pretrained_list: Sequence[Pretrained], config: Mapping[str, Any], parent: Path) -> None:
    """Write `parent`/hf as if the run had begun with a model of this `config`.

    The tokenizer is the language model's, the image processor the vision tower's.
    """
    parts = {part: pretrained for pretrained in pretrained_list for part in pretrained.parts}
    target = parent / NAME
    for pretrained in (parts["vision"], parts["language"]):
        copy_kept(pretrained.folder.path, target / FILES)
    for index in (target / FILES).glob("*.safetensors.index.json"):
        index.unlink()
    (target / FILES / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    _write_unused(parts["vision"], target / UNUSED)
    (target / TENSORS).write_text(json.dumps({"spelling": 0, "files": {}}) + "\n")


def write_part_sidecars(pretrained_list: Sequence[Pretrained], model: ModelConfig, parent: Path) -> bool:
    """Write `parent`/hf/PART for each part, so that an export is a folder for each; return whether that is possible.

    It is if tower and language model have folders of their own, and the connector says how its weights are named.
    """
    alone = {pretrained.parts[0]: pretrained for pretrained in pretrained_list if _is_alone(pretrained)}
    spelling = connector_of(model.projector).exported(model)
    if alone.keys() != {"vision", "language"} or spelling is None:
        return False
    for part, pretrained in alone.items():
        write_sidecar(pretrained, parent / NAME / part)
    target = parent / NAME / "projector"
    (target / FILES).mkdir(parents=True)
    config = json.dumps(exported_config(model), indent=2, sort_keys=True)
    (target / FILES / "config.json").write_text(config + "\n")
    with StreamedFile(target / UNUSED, {}):
        pass
    (target / TENSORS).write_text(json.dumps({"spelling": spelling, "files": {}}) + "\n")
    return True


def _is_alone(pretrained: Pretrained) -> bool:
    """Return whether a folder holds a tower or a language model and nothing that a run takes from elsewhere."""
    return pretrained.family.parts == pretrained.parts != ("projector",)


def _write_unused(vision: Pretrained, path: Path) -> None:
    """Write the tower's weights that no feature depends on, under the names that a composed model gives them."""
    prefix = vision.family.name_prefixes[vision.variant].vision
    folder: HfFolder = vision.folder
    kept = {
        f"vision_tower.{name.removeprefix(prefix)}": name
        for name in vision.unused
        if name.startswith(prefix) and name.removeprefix(prefix).startswith(_TOWER_PARTS)
    }
    declared = {new: (folder.tensors[name].dtype, folder.tensors[name].shape) for new, name in kept.items()}
    with StreamedFile(path, declared) as out:
        for new, name in kept.items():
            out.write(new, folder.read(name, slice(None)))
