"""A VLM composed of an encoder and a language model leaves as a LLaVA: the config.json that such a run exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megavlm.checkpoint.hf.files import HfFolder
from megavlm.checkpoint.hf.safetensors_writer import StreamedFile
from megavlm.checkpoint.hf.sidecar import FILES, KEPT, NAME, TENSORS, UNUSED
from megavlm.checkpoint.hf.source import Origin
from megavlm.config.schema import ModelConfig

_TOWERS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
_TOWER_PARTS = ("embeddings.", "encoder.", "post_layernorm.", "head.")


def is_llava(origins: Sequence[Origin], model: ModelConfig) -> bool:
    """Whether Transformers' LLaVA computes what this model does."""
    parts = {part: origin for origin in origins for part in origin.parts}
    if parts.keys() != {"vision", "language"} or parts["vision"].family.name not in _TOWERS:
        return False
    projector, vision = model.projector, model.vision
    plain = projector.kind == "mlp" and projector.pixel_shuffle == 1 and not projector.input_norm
    plain = plain and projector.anyres_max_tiles is None
    inner = projector.hidden_size in (None, model.language.hidden_size)
    return plain and inner and not (vision.post_norm and vision.feature_layer == -1)


def write_composed_sidecar(origins: Sequence[Origin], model: ModelConfig, parent: Path, *, image_token: int) -> None:
    """`parent`/hf as if the run had begun with a LLaVA: tokenizer of the language model, processor of the encoder."""
    parts = {part: origin for origin in origins for part in origin.parts}
    target = parent / NAME
    (target / FILES).mkdir(parents=True, exist_ok=True)
    for origin in (parts["vision"], parts["language"]):
        for file in sorted(origin.folder.path.iterdir()):
            if file.is_file() and file.suffix in KEPT and not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, target / FILES / file.name)
    config = _config(parts["vision"], parts["language"], model, image_token=image_token)
    (target / FILES / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    _write_unused(parts["vision"], target / UNUSED)
    (target / TENSORS).write_text(json.dumps({"spelling": 0, "files": {}}) + "\n")


def _config(vision: Origin, language: Origin, model: ModelConfig, *, image_token: int) -> dict[str, Any]:
    tower = vision.folder.settings
    tower_values = dict(tower.section("vision_config").values if "vision_config" in tower.values else tower.values)
    text = language.folder.settings.values
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": {**tower_values, "model_type": _TOWERS[vision.family.name]},
        "text_config": dict(text),
        "image_token_index": image_token,
        "vision_feature_layer": model.vision.feature_layer,
        "vision_feature_select_strategy": "default" if model.vision.class_token else "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": model.projector.bias,
        "tie_word_embeddings": model.language.tie_embeddings,
        "dtype": text.get("dtype", text.get("torch_dtype", "float32")),
    }


def _write_unused(vision: Origin, path: Path) -> None:
    """The encoder's weights that no feature depends on, under the names that LLaVA gives them."""
    prefix = vision.family.spellings[vision.spelling].vision
    folder: HfFolder = vision.folder
    kept = {
        f"vision_tower.{name.removeprefix(prefix)}": name
        for name in vision.unused
        if name.startswith(prefix) and name.removeprefix(prefix).startswith(_TOWER_PARTS)
    }
    declared = {theirs: (folder.tensors[name].dtype, folder.tensors[name].shape) for theirs, name in kept.items()}
    with StreamedFile(path, declared) as out:
        for theirs, name in kept.items():
            out.write(theirs, folder.read(name, slice(None)))
