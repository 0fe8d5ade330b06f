"""Write a small model of this family with random weights as a Hugging Face folder: `python small_model.py FOLDER`.

It is a LLaVA with a SigLIP tower, of the sizes of `examples/first_run/small_model.py` and with its tokenizer and chat
template, under the names that the family's folders have.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

NAMES = {
    "vision_tower.": "encoder.",
    "multi_modal_projector.linear_1": "bridge.wide",
    "multi_modal_projector.linear_2": "bridge.narrow",
    "language_model.lm_head": "decoder.head",
    "language_model.model.": "decoder.",
}


def as_acme(llava: Path, folder: Path) -> None:
    """Write the weights and the config.json of a LLaVA folder under the names of this family."""
    folder.mkdir(exist_ok=True)
    weights = {}
    for name, value in load_file(llava / "model.safetensors").items():
        (old,) = (old for old in NAMES if name.startswith(old))
        weights[NAMES[old] + name.removeprefix(old)] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((llava / "config.json").read_text())
    renamed = {"encoder": config["vision_config"], "decoder": config["text_config"]}
    renamed |= {"model_type": "acme_vlm", "auto_map": {"AutoModel": "modeling_acme.AcmeVlm"}}
    renamed |= {"image_token_id": config.get("image_token_id", config.get("image_token_index"))}
    (folder / "config.json").write_text(json.dumps(renamed, indent=2, sort_keys=True) + "\n")


def main(folder: Path) -> None:
    small = Path(__file__).parents[1] / "first_run/small_model.py"
    first: dict[str, Any] = runpy.run_path(str(small))
    first["main"](folder)  # for the tokenizer and the chat template
    original = LlavaConfig.from_pretrained(folder)
    side, patch = first["SIDE"], first["PATCH"]
    tower = original.vision_config.to_dict()
    sizes = {name: tower[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(**sizes, num_attention_heads=4, image_size=side, patch_size=patch),
        text_config=original.text_config,
        image_token_index=original.image_token_index,
        vision_feature_select_strategy="full",
    )
    with tempfile.TemporaryDirectory() as llava:
        LlavaForConditionalGeneration(config).save_pretrained(llava)
        as_acme(Path(llava), folder)
    (folder / "processor_config.json").unlink()
    from transformers import SiglipImageProcessor  # here, where warnings about torchvision are off

    SiglipImageProcessor(size={"height": side, "width": side}).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
