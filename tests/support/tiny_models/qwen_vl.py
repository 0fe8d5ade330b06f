"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL in miniature, and images of which one has windows of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

VOCABULARY, IMAGE_TOKEN = 61, 60


# (height, width) of each sample's images. With patches of 4 and windows of 16 pixels, 24 × 40 has windows of all four
# kinds; 8 × 8 is one feature; the last micro-batch has no image.
IMAGES = ((((24, 40), (8, 8)), ((32, 16),)), (((16, 16),), ()), ((), ()))


# (frames, height, width) of videos beside images: three frames fill two groups, of which the second repeats the last.
# The second micro-batch has none, so that its patches are narrower.
VIDEOS = ((((4, 24, 40), (8, 8)), ((3, 16, 32),)), (((16, 16),), ()), (((16, 16),), ((2, 8, 8), (2, 8, 8))))


VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 36,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 32,
}


TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 59,
    "vision_start_token_id": 58,
    "vision_end_token_id": 57,
}


def qwen2(*, tied: bool = False) -> transformers.PreTrainedModel:
    tower = {name: value for name, value in VISION.items() if name != "out_hidden_size"}
    config = transformers.Qwen2VLConfig(
        vision_config={**tower, "embed_dim": 36, "hidden_size": 32, "mlp_ratio": 2},
        text_config={
            **TEXT,
            "num_attention_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        tie_word_embeddings=tied,
        **TOKENS,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5(*, tied: bool = False) -> transformers.PreTrainedModel:
    config = transformers.Qwen2_5_VLConfig(
        vision_config={**VISION, "intermediate_size": 52, "window_size": 16, "fullatt_block_indexes": [1, 3]},
        text_config={
            **TEXT,
            "num_attention_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        tie_word_embeddings=tied,
        **TOKENS,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3(*, tied: bool = False) -> transformers.PreTrainedModel:
    config = transformers.Qwen3VLConfig(
        vision_config={
            **VISION,
            "intermediate_size": 52,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        text_config={
            **TEXT,
            "num_attention_heads": 4,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 1]},
        },
        tie_word_embeddings=tied,
        **TOKENS,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


class AsPublished(transformers.Qwen3VLMoeForConditionalGeneration):
    """Writes experts as published files hold them, transposed. Transformers reads that and writes them as they are."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)
        for file in Path(save_directory).glob("*.safetensors"):
            tensors = load_file(file)
            turned = {name: tensors[name].mT.contiguous() for name in tensors if ".mlp.experts." in name}
            save_file(tensors | turned, file, metadata={"format": "pt"})


def qwen3_moe(*, tied: bool = False, kind: type = AsPublished, **text: Any) -> transformers.PreTrainedModel:
    """A mixture of six experts in two layers of three; matrices that fit only one way round."""
    config = transformers.Qwen3VLMoeConfig(
        vision_config={
            **VISION,
            "intermediate_size": 52,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        text_config={
            **TEXT,
            "num_attention_heads": 4,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 1]},
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            **text,
        },
        tie_word_embeddings=tied,
        **TOKENS,
    )
    return kind(config)
