"""Folders of tiny models of each family, with tokenizer, chat template and image processor, as they are published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers.models.internvl import InternVLVisionConfig

from tests.support import hf
from tests.support.processors import CASES, PINPOINTS, bare
from tests.support.tiny_models.gemma3 import TEXT as GEMMA
from tests.support.tiny_models.llava import TEXT
from tests.support.tokenizers import tokenizers_in

TOWER: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 36,
    "num_heads": 3,
    "out_hidden_size": 32,
    "intermediate_size": 52,
}
EXPERTS = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "mrope_section": [1, 1, 1]}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def whole_folder(name: str, root: Path) -> tuple[Path, Any, Any]:
    """Write the folder `root`/hf of a tiny model of CASES; return it with Transformers' model and whole processor.

    `name` may end with "-moe": a mixture of experts with the processor of the family without.
    """
    case = CASES[name.removesuffix("-moe")]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizers_in(root)[case.tokenizer])
    model = model_of(name, tokenizer)
    folder = hf.save(model, root / "hf")
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(case.template)
    case.image_processor.save_pretrained(folder)
    processor = bare(
        case.kind,
        **case.attributes,
        image_processor=case.image_processor,
        tokenizer=tokenizer,
        chat_template=case.template,
        image_token_id=model.config.image_token_id,
    )
    return folder, model, processor


def answer_of_transformers(
    model: Any,
    processor: Any,
    messages: Sequence[dict[str, Any]],
    *,
    ends: Sequence[int],
    never: Sequence[int],
    length: int,
) -> str:
    """The text that Transformers generates greedily, up to one of the tokens `ends` and without those of `never`."""
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    options = transformers.GenerationConfig(
        max_new_tokens=length, do_sample=False, eos_token_id=list(ends), suppress_tokens=list(never)
    )
    made = model.generate(**inputs, generation_config=options)[0, inputs["input_ids"].shape[1] :]
    text: str = processor.tokenizer.decode(made, skip_special_tokens=True)
    return text.strip()


def model_of(name: str, tokenizer: Any) -> transformers.PreTrainedModel:
    """A tiny model of each family, for the images of its processor."""
    image = tokenizer.convert_tokens_to_ids(CASES[name.removesuffix("-moe")].attributes["image_token"])
    text = {**TEXT, "vocab_size": len(tokenizer) + 3, "eos_token_id": tokenizer.eos_token_id}
    build = config_with_mrope if name.startswith(("qwen", "glm4v")) else config_with_rope
    return transformers.AutoModelForImageTextToText.from_config(build(name, tokenizer, text, image))


def config_with_rope(name: str, tokenizer: Any, text: dict[str, Any], image: int) -> transformers.PreTrainedConfig:
    """Return the configuration of a family whose tokens have one position each."""
    match name:
        case "llava":
            return transformers.LlavaConfig(
                vision_config=transformers.CLIPVisionConfig(**TOWER),
                text_config=transformers.LlamaConfig(**text),
                image_token_index=image,
            )
        case "llava-next":
            return transformers.LlavaNextConfig(
                vision_config=transformers.CLIPVisionConfig(**TOWER),
                text_config=transformers.LlamaConfig(**text),
                image_token_index=image,
                image_grid_pinpoints=PINPOINTS,
            )
        case "onevision":
            return transformers.LlavaOnevisionConfig(
                vision_config=transformers.SiglipVisionConfig(**TOWER),
                text_config=transformers.Qwen2Config(**text),
                image_token_index=image,
                video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
                image_grid_pinpoints=PINPOINTS,
                vision_aspect_ratio="anyres_max_9",
            )
        case "internvl":
            sides = {"image_size": [28, 28], "patch_size": [14, 14]}
            return transformers.InternVLConfig(
                vision_config=InternVLVisionConfig(**{**TOWER, **sides}, attention_bias=True),
                text_config=transformers.Qwen2Config(**text),
                image_token_id=image,
                tie_word_embeddings=False,
            )
        case "gemma3":
            return transformers.Gemma3Config(
                vision_config=transformers.SiglipVisionConfig(**{**TOWER, "image_size": 56, "patch_size": 7}),
                text_config=transformers.Gemma3TextConfig(**{**GEMMA, "vocab_size": len(tokenizer) + 3}),
                mm_tokens_per_image=4,
                image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
            )
        case "mistral3":
            return transformers.Mistral3Config(
                vision_config=transformers.PixtralVisionConfig(**{**TOWER, "patch_size": 7, "hidden_act": "silu"}),
                text_config=transformers.MistralConfig(**text, head_dim=10, sliding_window=None),
                image_token_index=image,
                tie_word_embeddings=False,
            )
    return transformers.SmolVLMConfig(
        vision_config={**TOWER, "image_size": 32, "patch_size": 8},
        text_config={"model_type": "llama", **text},
        image_token_id=image,
        scale_factor=2,
    )


def config_with_mrope(name: str, tokenizer: Any, text: dict[str, Any], image: int) -> transformers.PreTrainedConfig:
    """Return the configuration of a family whose images have positions in time, height and width."""
    marks = {
        "video_token_id": tokenizer.get_vocab().get("<|video_pad|>", len(tokenizer) + 1),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    experts = EXPERTS if name.endswith("-moe") else {}
    match name:
        case "qwen2-vl":
            return transformers.Qwen2VLConfig(
                vision_config={"depth": 4, "embed_dim": 36, "num_heads": 3, "hidden_size": 32, "patch_size": 14},
                text_config={**text, "rope_parameters": ROPE},
                image_token_id=image,
                **marks,
            )
        case "qwen2.5-vl":
            return transformers.Qwen2_5_VLConfig(
                vision_config={**QWEN_TOWER, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3]},
                text_config={**text, "rope_parameters": ROPE},
                image_token_id=image,
                **marks,
            )
        case "qwen3-vl" | "qwen3-vl-moe":
            build = transformers.Qwen3VLMoeConfig if experts else transformers.Qwen3VLConfig
            return build(
                vision_config={
                    **QWEN_TOWER,
                    "patch_size": 16,
                    "num_position_embeddings": 36,
                    "deepstack_visual_indexes": [0, 2],
                },
                text_config={**text, **experts, "head_dim": 8, "rope_parameters": ROPE},
                image_token_id=image,
                **marks,
            )
        case "glm4v" | "glm4v-moe":
            build = transformers.Glm4vMoeConfig if experts else transformers.Glm4vConfig
            return build(
                vision_config={**QWEN_TOWER, "patch_size": 14, "image_size": 56},
                text_config={**text, **experts, "rope_parameters": GLM_ROPE},
                image_token_id=image,
                video_token_id=marks["video_token_id"],
            )
    raise KeyError(name)
