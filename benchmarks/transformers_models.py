"""Return configurations of Transformers' models and their optimizer, for all benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megavlm.config.schema import LanguageConfig, OptimizerConfig

if TYPE_CHECKING:
    from gpu_model import Shape

OPTIMIZER = OptimizerConfig(lr=1e-4, lr_decay_style="constant", weight_decay=0.01, clip_grad=1.0)  # of both sides


def text_sizes(language: LanguageConfig, *, vocabulary: int) -> dict[str, Any]:
    """Return the fields of a Llama-like configuration."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": language.hidden_size,
        "intermediate_size": language.ffn_hidden_size,
        "num_hidden_layers": language.num_layers,
        "num_attention_heads": language.num_attention_heads,
        "rms_norm_eps": language.norm_epsilon,
        "use_cache": False,
    }


def their_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return torch's fused AdamW (the fastest) with megavlm's groups: no decay on norms and biases."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2),
        eps=OPTIMIZER.adam_eps,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )


def llava_config(shape: Shape) -> Any:
    """Return the LlavaConfig of a shape."""
    import transformers

    vision, language = shape.model.vision, shape.model.language
    tower = transformers.CLIPVisionConfig(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.ffn_hidden_size,
        num_hidden_layers=vision.num_layers,
        num_attention_heads=vision.num_attention_heads,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        layer_norm_eps=vision.norm_epsilon,
        hidden_act="quick_gelu",
    )
    text = transformers.LlamaConfig(
        **text_sizes(language, vocabulary=shape.vocabulary),
        num_key_value_heads=language.num_attention_heads,
        rope_parameters={"rope_type": "default", "rope_theta": language.rotary_base},
    )
    return transformers.LlavaConfig(vision_config=tower, text_config=text, image_token_index=shape.vocabulary - 1)


def vision_tokens(end: int) -> dict[str, int]:
    """Return the tokens of images and videos in Qwen's configurations: the last ones of a vocabulary of `end`."""
    return {
        "image_token_id": end - 1,
        "video_token_id": end - 2,
        "vision_start_token_id": end - 4,
        "vision_end_token_id": end - 3,
    }


def qwen_config(shape: Shape) -> Any:
    """Return the Qwen2_5_VLConfig of a shape."""
    import transformers

    vision, language, end = shape.model.vision, shape.model.language, shape.vocabulary
    assert vision.window_size is not None
    tower = {
        "depth": vision.num_layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_hidden_size,
        "num_heads": vision.num_attention_heads,
        "patch_size": vision.patch_size,
        "window_size": vision.window_size,
        "fullatt_block_indexes": list(vision.full_attention_layers),
        "out_hidden_size": language.hidden_size,
    }
    rope = {"rope_type": "default", "rope_theta": language.rotary_base, "mrope_section": list(language.mrope_section)}
    text = {
        **text_sizes(language, vocabulary=shape.vocabulary),
        "num_key_value_heads": language.num_query_groups,
        "rope_parameters": rope,
    }
    return transformers.Qwen2_5_VLConfig(
        vision_config=tower, text_config=text, tie_word_embeddings=False, **vision_tokens(end)
    )


def qwen3_5_config(shape: Shape) -> Any:
    """Return the Qwen3_5Config of a shape."""
    import transformers

    vision, language, end = shape.model.vision, shape.model.language, shape.vocabulary
    tower = {
        "depth": vision.num_layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_hidden_size,
        "num_heads": vision.num_attention_heads,
        "patch_size": vision.patch_size,
        "out_hidden_size": language.hidden_size,
        "num_position_embeddings": (vision.image_size // vision.patch_size) ** 2,
        "deepstack_visual_indexes": [],
    }
    linear = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
    rope = {
        "rope_type": "default",
        "rope_theta": language.rotary_base,
        "partial_rotary_factor": language.rotary_percent,
        "mrope_section": list(language.mrope_section),
    }
    kinds = ("full_attention", "linear_attention")
    text = {
        **text_sizes(language, vocabulary=end),
        **{f"linear_{name}": getattr(language, f"linear_{name}") for name in linear},
        "num_key_value_heads": language.num_query_groups,
        "head_dim": language.kv_channels,
        "rope_parameters": rope,
        "layer_types": [kinds[layer in language.linear_attention_layers] for layer in range(language.num_layers)],
    }
    tied = language.tie_embeddings
    return transformers.Qwen3_5Config(
        vision_config=tower, text_config=text, tie_word_embeddings=tied, **vision_tokens(end)
    )
