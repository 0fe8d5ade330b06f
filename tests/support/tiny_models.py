"""Models of every Hugging Face family in miniature, and images for them.

Their sizes differ from one another and their options from the defaults, so that nothing is right by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from megavlm.families.gemma4_unified import FAMILY as GEMMA4_UNIFIED
from megavlm.families.kimi_k25 import FAMILY as KIMI_K25

TEXT: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 59, "bos_token_id": 1},
    "pad_token_id": 0,
}
LLAMA = {"model_type": "llama", **TEXT, "rms_norm_eps": 1e-5}
LLAMA3_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
MISTRAL = {"model_type": "mistral", **TEXT, "head_dim": 10, "sliding_window": None}
# Of five pairs of channels two keep their frequencies, one has a quarter, two lie between; scores grow by 13 %.
YARN = {
    **{"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 64},
    **{"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1},
}
# What makes positions of other models longer.
LONGER = {name: YARN[name] for name in ("rope_type", "factor", "original_max_position_embeddings")}
QWEN2 = {"model_type": "qwen2", **TEXT}
QWEN3 = {"model_type": "qwen3", **TEXT, "head_dim": 12}
QWEN3_MOE = {  # weights of a token's experts that add up to less than 1
    **{"model_type": "qwen3_moe", **TEXT, "head_dim": 12, "norm_topk_prob": False, "num_experts": 6},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
}
# A window of five tokens that images of four reach across, every third layer without one.
GEMMA = {
    **TEXT,
    **{"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 10, "query_pre_attn_scalar": 13},
    **{"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}
# Bounds that scores and logits of random weights come near to.
GEMMA2 = {
    **{**GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5},
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
# Full attention has wider heads, of which three pairs of eight rotate, and one key head; its keys are values.
GEMMA4 = {
    **{**TEXT, "num_hidden_layers": 3, "head_dim": 10, "global_head_dim": 16, "num_global_key_value_heads": 1},
    **{"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    **{"attention_k_eq_v": True, "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0},
    **{"final_logit_softcapping": 1.5, "rms_norm_eps": 1e-4},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.375},
    },
}
QWEN_VL = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 512},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
QWEN3_VL = {
    **QWEN_VL,
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 1]},
}
# Two key heads for six value heads; a key has other channels than a value.
QWEN3_5 = {
    **{**QWEN_VL, "num_hidden_layers": 4, "head_dim": 24, "full_attention_interval": 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 12},
    **{"linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-5},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [3, 2, 1]},
        "mrope_interleaved": True,
    },
}
QWEN3_5_EXPERTS = {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "shared_expert_intermediate_size": 20,
}
# Llama 3.1's frequencies in the two layers with a window; the others do not rotate.
EXAONE = {
    **{**TEXT, "model_type": "exaone4", "num_hidden_layers": 4, "head_dim": 10, "rms_norm_eps": 1e-4},
    **{"rope_parameters": LLAMA3_ROPE, "sliding_window": 5},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
# A layer with a window and rotary positions, one without both, one with a window alone.
MUSE = {
    **{**TEXT, "num_hidden_layers": 3, "head_dim": 10, "sliding_window": 5, "layer_rope_theta": [100.0, 0, 0]},
    **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rms_norm_eps": 1e-4},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "post_norm_eps": 1e-2},
    **{"qk_scale_factor": 1.7, "output_multiplier": 0.4, "final_logit_softcapping": 1.5},
}
# Command R7B with a window in two of three layers; Command R, without.
COHERE = {
    **{**TEXT, "model_type": "cohere", "num_hidden_layers": 3, "layer_norm_eps": 1e-3, "logit_scale": 0.3},
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
COHERE2 = {
    **{**COHERE, "model_type": "cohere2", "sliding_window": 5},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# Six of a head's twelve channels rotate, a pair with each axis of a position.
GLM_ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
GLM = {**QWEN_VL, "hidden_size": 48, "rope_parameters": GLM_ROPE, "rms_norm_eps": 1e-4}
GLM_OCR = {**GLM, "head_dim": 16, "rope_parameters": {**GLM_ROPE, "mrope_section": [1, 2, 1]}}
GLM_EXPERTS = {  # after one dense layer, and two that every token takes
    **{"head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 4},
    **{"moe_intermediate_size": 40, "routed_scaling_factor": 1.75, "first_k_dense_replace": 1},
}

# YaRN with one factor of what rotates and another of all scores; an epsilon that latents do not share.
DEEPSEEK = {
    **{"model_type": "deepseek_v3", **TEXT, "num_hidden_layers": 3, "num_key_value_heads": 4, "rms_norm_eps": 1e-2},
    **{"q_lora_rank": 20, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 10, "v_head_dim": 12},
    **{"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 24},
    **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.75, "first_k_dense_replace": 1},
    "rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 1.0},
}
# Queries straight from the hidden states, positions without scaling, no groups of experts (Kimi-VL).
PLAIN_LATENTS = {
    **{"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
# No groups of experts, and queries of any length.
KIMI = {
    **{**DEEPSEEK, "n_group": 1, "topk_group": 1},
    "rope_parameters": {name: value for name, value in YARN.items() if name != "llama_4_scaling_beta"},
}

# Windows of five tokens in two of three layers, bounds of YaRN that lie between pairs of channels.
GPT_OSS = {
    **{**TEXT, "model_type": "gpt_oss", "num_hidden_layers": 3, "head_dim": 12, "sliding_window": 5},
    **{"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-4},
    **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "pad_token_id": 0},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 64},
        **{"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    },
}

TOWER: dict[str, Any] = {
    **{"hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 3},
    **{"image_size": 32, "patch_size": 8},
}
CLIP = {"model_type": "clip_vision_model", **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER}
TILE = {"image_size": 12, "patch_size": 4}  # of 3 × 3 features
SMALL_TILE = {**TOWER, "image_size": 26, "patch_size": 4}  # 6 patches, and two pixels that no patch has
# Heads of 12 channels: three pairs of frequencies for rows and three for columns.
PIXTRAL = {"model_type": "pixtral", **TOWER, "patch_size": 4, "hidden_act": "silu"}
INTERN = {
    **{"hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 5},
    **{"image_size": [32, 32], "patch_size": [8, 8]},
}
QWEN2_TOWER = {"depth": 4, "embed_dim": 36, "hidden_size": 32, "num_heads": 3, "patch_size": 4, "mlp_ratio": 2}
QWEN_TOWER = {
    **{"depth": 4, "hidden_size": 36, "num_heads": 3, "patch_size": 4, "out_hidden_size": 32},
    "intermediate_size": 52,
}
QWEN3_5_TOWER = {**QWEN_TOWER, "num_position_embeddings": 36}
QWEN3_TOWER = {**QWEN_TOWER, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
EXAONE_TOWER = {**QWEN_TOWER, "hidden_size": 48, "num_heads": 4, "num_key_value_heads": 2}
# Positions of six by six patches, which most images have not.
GLM_TOWER = {**QWEN_TOWER, "out_hidden_size": 48, "image_size": 24, "rms_norm_eps": 1e-3}
ROTARY_TOWER = {name: value for name, value in TOWER.items() if name != "image_size"} | {"patch_size": 4}
# Positions of six by six patches, and another epsilon than the projector's.
PADDLE_TOWER = {**TOWER, "image_size": 24, "patch_size": 4, "layer_norm_eps": 1e-3}
# As PaddleOCR-VL's, with heads of 16 channels.
MOON_TOWER = {
    **{"hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 4},
    **{"pos_emb_height": 6, "pos_emb_width": 6, "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}},
}
# Positions of four by four patches, which are a window.
MUSE_TOWER = {**MOON_TOWER, "num_hidden_layers": 3, "pos_emb_height": 4, "pos_emb_width": 4}
GEMMA4_TOWER = {
    **{"hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 16},
    **{"num_key_value_heads": 3, "patch_size": 4, "position_embedding_size": 12, "standardize": True},
    "rms_norm_eps": 1e-3,
}
# A patch has 12 × 12 pixels.
GEMMA4_EMBEDDER = {
    **{"mm_embed_dim": 40, "output_proj_dims": 40, "patch_size": 4, "mm_posemb_size": 5, "rms_norm_eps": 1e-3},
}
GLM_OCR_TOWER = {**QWEN_TOWER, "out_hidden_size": 48, "rms_norm_eps": 1e-3}
# Positions of six by six patches; the merger follows the second of four layers.
MINICPM_TOWER = {**TOWER, "image_size": 24, "patch_size": 4, "num_hidden_layers": 4, "layer_norm_eps": 1e-4}
MINICPM_TEXT = {**QWEN3_5, "model_type": "qwen3_5_text"}
CANVAS_MARKS: dict[str, Any] = {
    **{"image_start_id": 58, "image_end_id": 57, "slice_start_id": 56, "slice_end_id": 55, "newline_id": 54}
}
MARKS: dict[str, Any] = {"image_token_id": 60, "video_token_id": 59}
QWEN_MARKS = {**MARKS, "vision_start_token_id": 58, "vision_end_token_id": 57}
TILES: dict[str, Any] = {
    "image_token_index": 60,
    "image_grid_pinpoints": [[12 * rows, 12 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)],
}
ONEVISION = {**TILES, "video_token_index": 59, "vision_aspect_ratio": "anyres_max_2"}
FULL: dict[str, Any] = {"image_token_index": 60, "vision_feature_select_strategy": "full"}
SHUFFLE: dict[str, Any] = {"image_token_id": 60, "scale_factor": 2}


def _of(kind: Any, vision: Any, text: Any, **top: Any) -> dict[str, Any]:
    return {"model_type": kind, "vision_config": vision, "text_config": text, **top}


TIED: dict[str, Any] = {"tie_word_embeddings": True}
# Chunks of six frames; heads of 10 channels, 28 and 36 in the others' widths.
OMNI: dict[str, Any] = {
    "audio_config": {
        **{"model_type": "qwen2_5_omni_audio_encoder", "num_mel_bins": 12, "encoder_layers": 2, "d_model": 30},
        **{"encoder_attention_heads": 3, "encoder_ffn_dim": 44, "n_window": 3, "output_dim": 32},
    },
    **{"image_token_index": 60, "video_token_index": 59, "audio_token_index": 56, "vision_start_token_id": 58},
}
# Windows of two chunks, which have 100 frames in all models of this kind.
OMNI3: dict[str, Any] = {
    "audio_config": {
        **{"model_type": "qwen3_omni_moe_audio_encoder", "num_mel_bins": 12, "encoder_layers": 2, "d_model": 30},
        **{"encoder_attention_heads": 3, "encoder_ffn_dim": 44, "n_window_infer": 200, "output_dim": 32},
        "downsample_hidden_size": 6,
    },
    **{"image_token_id": 60, "video_token_id": 59, "audio_token_id": 56, "vision_start_token_id": 58},
    "position_id_per_seconds": 13,
}
MODELS: dict[str, dict[str, Any]] = {
    "omni3-moe": _of(
        "qwen3_omni_moe_thinker",
        QWEN3_TOWER,
        {
            **{**QWEN3_VL, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            **{"mlp_only_layers": [1], "norm_topk_prob": False},
        },
        **{"tie_word_embeddings": False, **OMNI3},
    ),
    "omni": _of(
        "qwen2_5_omni_thinker",
        {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1, 3]},
        QWEN_VL,
        **{"tie_word_embeddings": False, **OMNI},
    ),
    "llava": _of("llava", {**CLIP, "hidden_act": "quick_gelu"}, LLAMA, image_token_index=60),
    "llava-tied": _of(
        "llava", CLIP, {**MISTRAL, "head_dim": 16}, image_token_index=60, vision_feature_layer=-1, **TIED
    ),
    "llava-siglip": _of(
        "llava", SIGLIP, {**LLAMA, "rope_parameters": LLAMA3_ROPE}, **FULL, multimodal_projector_bias=False
    ),
    "internvl": _of(
        "internvl", {**INTERN, "attention_bias": True}, QWEN2, image_token_id=60, tie_word_embeddings=False
    ),
    # RMSNorm, normalised queries and keys, no biases there.
    "internvl-6b": _of(
        "internvl",
        {**INTERN, "norm_type": "rms_norm", "use_qk_norm": True},
        QWEN3,
        **{"image_token_id": 60, **TIED},
    ),
    # A norm after the last layer; no layers that are left out at random.
    "qianfan-ocr": _of(
        "qianfan_ocr", {**INTERN, "use_mean_pooling": False, "drop_path_rate": 0.0}, QWEN3, image_token_id=60
    ),
    "llava-next": _of("llava_next", {**CLIP, **TILE}, MISTRAL, **TILES),
    # Untied with SigLIP's pooling head, which no feature comes from; tied without.
    "llava-onevision": _of("llava_onevision", {**SIGLIP, **TILE}, QWEN2, **ONEVISION),
    "llava-onevision-tied": _of(
        "llava_onevision",
        {**SIGLIP, **TILE, "vision_use_head": False},
        {**QWEN2, **TIED},
        **{**ONEVISION, "vision_feature_layer": -2, "multimodal_projector_bias": False},
    ),
    "deepseek-vl": _of("deepseek_vl", SIGLIP, LLAMA, image_token_id=60, tie_word_embeddings=False),
    "smolvlm": _of("smolvlm", SMALL_TILE, LLAMA, **SHUFFLE),
    "idefics3-tied": _of("idefics3", SMALL_TILE, {"model_type": "llama", **TEXT, "head_dim": 10}, **SHUFFLE, **TIED),
    "gemma3": _of(
        "gemma3",
        {**SIGLIP, "vision_use_head": False},
        GEMMA,
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=58,
        eoi_token_index=59,
    ),
    "gemma4": _of("gemma4", GEMMA4_TOWER, GEMMA4, audio_config=None, **MARKS),
    "gemma4-unified": _of("gemma4_unified", GEMMA4_EMBEDDER, GEMMA4, audio_config={"audio_embed_dim": 20}, **MARKS),
    "paligemma": _of(
        "paligemma", {**SIGLIP, "vision_use_head": False}, GEMMA2, image_token_index=60, projection_dim=32
    ),
    # The gate of the projector, 23 channels, lies below what it multiplies.
    "aya": _of(
        "aya_vision",
        {**SIGLIP, "vision_use_head": False},
        COHERE2,
        image_token_index=60,
        alignment_intermediate_size=46,
        adapter_layer_norm_eps=1e-3,
        vision_feature_layer=-2,
        tie_word_embeddings=False,
    ),
    "aya-cohere": _of("aya_vision", {**SIGLIP, "vision_use_head": False}, COHERE, image_token_index=60),
    "cohere2-vision": _of(
        "cohere2_vision",
        {**SIGLIP, "vision_use_head": False},
        COHERE2,
        image_token_id=60,
        alignment_intermediate_size=42,
    ),
    "pixtral": _of("llava", PIXTRAL, {**MISTRAL, "rms_norm_eps": 1e-5}, **FULL, vision_feature_layer=-1),
    # The projector's norm has the text's epsilon, another than the tower's: large, so that it shows.
    "mistral3": _of(
        *("mistral3", PIXTRAL, {**MISTRAL, "rms_norm_eps": 1e-2}),
        **{"image_token_index": 60, "multimodal_projector_bias": False, "tie_word_embeddings": False},
    ),
    "ministral3-tied": _of(
        "mistral3",
        PIXTRAL,
        {**MISTRAL, "model_type": "ministral3", "rms_norm_eps": 1e-2, "rope_parameters": YARN},
        **{"image_token_index": 60, "multimodal_projector_bias": True, **TIED},
    ),
    # Tied by default; the projector's norm has the text's epsilon.
    "lighton-ocr": _of("lighton_ocr", PIXTRAL, {**QWEN3, "rms_norm_eps": 1e-2}, image_token_id=60),
    "qwen2-vl": _of("qwen2_vl", QWEN2_TOWER, QWEN_VL, tie_word_embeddings=False, **QWEN_MARKS),
    "qwen2.5-vl": _of(
        "qwen2_5_vl",
        {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1, 3]},
        QWEN_VL,
        **{"tie_word_embeddings": False, **QWEN_MARKS},
    ),
    "qwen3-vl": _of("qwen3_vl", QWEN3_TOWER, QWEN3_VL, **TIED, **QWEN_MARKS),
    "cosmos3": _of("cosmos3_omni", QWEN3_TOWER, QWEN3_VL, tie_word_embeddings=False, **QWEN_MARKS),
    "qwen3.5": _of("qwen3_5", QWEN3_5_TOWER, QWEN3_5, tie_word_embeddings=False, **QWEN_MARKS),
    "qwen3.5-moe": _of(
        "qwen3_5_moe", QWEN3_5_TOWER, {**QWEN3_5, **QWEN3_5_EXPERTS}, tie_word_embeddings=False, **QWEN_MARKS
    ),
    "paddleocr-vl": _of(
        "paddleocr_vl",
        PADDLE_TOWER,
        {**QWEN3_VL, "tie_word_embeddings": False},
        tie_word_embeddings=False,
        **QWEN_MARKS,
    ),
    "video-llama-3": _of(
        "video_llama_3", {**ROTARY_TOWER, "layer_norm_eps": 1e-3}, QWEN2, tie_word_embeddings=False, **MARKS
    ),
    "exaone4.5": _of(
        "exaone4_5",
        {**EXAONE_TOWER, "window_size": 16, "fullatt_block_indexes": [1, 3]},
        EXAONE,
        **{"tie_word_embeddings": False, **MARKS},
    ),
    "muse-glimmer": _of(
        "muse_glimmer",
        MUSE_TOWER,
        MUSE,
        **{"out_hidden_size": 192, "projector_hidden_size": 23, "tie_word_embeddings": False, **MARKS},
    ),
    "glm-ocr": _of("glm_ocr", GLM_OCR_TOWER, GLM_OCR, **MARKS),
    "minicpmv-4.7": _of("minicpmv4_7", MINICPM_TOWER, MINICPM_TEXT, insert_layer_id=1, **CANVAS_MARKS, **TIED, **MARKS),
    "minicpmv-4.6": _of(
        "minicpmv4_6", MINICPM_TOWER, MINICPM_TEXT, insert_layer_id=2, tie_word_embeddings=False, **MARKS
    ),
    "glm4v": _of("glm4v", GLM_TOWER, GLM, tie_word_embeddings=False, **MARKS),
    # Matrices that fit only one way round.
    "qwen3-vl-moe": _of(
        "qwen3_vl_moe",
        QWEN3_TOWER,
        {
            **{**QWEN3_VL, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "mlp_only_layers": [1],
        },
        **{"tie_word_embeddings": False, **QWEN_MARKS},
    ),
    "internvl-moe": _of(
        "internvl", {**INTERN, "attention_bias": True}, QWEN3_MOE, image_token_id=60, tie_word_embeddings=False
    ),
    "internvl-gpt-oss-moe": _of(
        "internvl", {**INTERN, "attention_bias": True}, GPT_OSS, image_token_id=60, tie_word_embeddings=False
    ),
    "gemma4-moe": _of(
        "gemma4",
        GEMMA4_TOWER,
        {
            **{**GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
            "use_bidirectional_attention": None,
        },
        **{"audio_config": None, "image_token_id": 60},
    ),
    "glm4v-moe": _of("glm4v_moe", GLM_TOWER, {**GLM, **GLM_EXPERTS}, tie_word_embeddings=False, **MARKS),
    "kimi-moe": _of(
        "kimi_k25",
        MOON_TOWER,
        KIMI,
        **{"projection_hidden_size": 48, "projection_layer_norm_eps": 1e-3, "tie_word_embeddings": False},
        **{"image_token_id": 60, "video_token_id": 61},  # as published, that of videos is none of the vocabulary
    ),
    # Language models alone.
    "text-qwen3": QWEN3,
    "text-llama": {**LLAMA, "rope_parameters": LLAMA3_ROPE, **TIED},
    "text-qwen3-moe": QWEN3_MOE,
    "text-gpt-oss-moe": GPT_OSS,
}


class AsPublished(transformers.Qwen3VLMoeForConditionalGeneration):
    """Writes experts as published files hold them, transposed. Transformers reads that and writes them as they are."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)
        for file in Path(save_directory).glob("*.safetensors"):
            tensors = load_file(file)
            turned = {name: tensors[name].mT.contiguous() for name in tensors if ".mlp.experts." in name}
            save_file(tensors | turned, file, metadata={"format": "pt"})


def config_of(name: str, *, vision: Any = (), text: Any = (), **top: Any) -> Any:
    """Return the configuration of one of MODELS, with other options of its sections and at its top."""
    values, more = MODELS[name], {"vision_config": dict(vision), "text_config": dict(text)}
    sections = {section: {**values[section], **given} for section, given in more.items() if section in values}
    return transformers.AutoConfig.for_model(**{**values, **sections, **top})


def tiny(name: str, **options: Any) -> Any:
    """Return a model of this configuration."""
    config = config_of(name, **options)
    if name == "qwen3-vl-moe":
        return AsPublished(config)
    if name.startswith("text-"):
        return pronounced(transformers.AutoModelForCausalLM.from_config(config))
    model = transformers.AutoModelForImageTextToText.from_config(config)
    if hasattr(config.text_config, "first_k_dense_replace"):  # biases that change which experts are chosen
        for number, layer in enumerate(model.model.language_model.layers[1:]):
            bias = layer.mlp.gate.e_score_correction_bias
            bias.copy_(torch.linspace(-0.2, 0.2, 8).roll(3 * number))
    for number, module in enumerate(model.modules()):  # by default a state is forgotten within a token
        if hasattr(module, "A_log"):
            module.A_log.data.copy_(torch.linspace(-5, 0, 6))
        if hasattr(module, "layer_scalar"):
            module.layer_scalar.fill_(0.6 + number % 7 / 10)
        if hasattr(module, "std_scale"):
            module.std_scale.copy_(torch.linspace(0.5, 1.5, 48))
            module.std_bias.copy_(torch.linspace(-2, 2, 48))
    return scaled(pronounced(model))


def pronounced(model: Any) -> Any:
    """Return the model; heads of gpt-oss have unlike sinks, and its activations reach beyond their bounds."""
    for module in model.modules():
        if hasattr(module, "sinks"):
            module.sinks.data.copy_(torch.linspace(-1, 2, len(module.sinks)))
        if hasattr(module, "gate_up_proj_bias"):
            bias = module.gate_up_proj_bias.data
            bias.copy_((1.3 * torch.arange(bias.numel())).sin().pow(3).mul(9).view(bias.shape))
    return model


def scaled(model: Any) -> Any:
    """Return the model with what Transformers leaves out: Cohere's factor of logits, the masks of Gemma 4 12B, videos
    of Kimi-K2.5.
    """
    if scale := getattr(model.config.get_text_config(), "logit_scale", None):
        model.lm_head.register_forward_hook(lambda head, given, logits: logits * scale)
    if model.config.model_type == "gemma4_unified":
        GEMMA4_UNIFIED.complete(model)
    if model.config.model_type == "kimi_k25":
        KIMI_K25.complete(model)
    return model


# For each micro-batch the images (height, width) of its samples, by the beginnings of names; one has none. Of a sliced
# image these are the sizes of its small copy, of its arrangement and of a slice.
IMAGES: dict[str, Any] = {
    "text": ([[], []], [[], []]),
    # One image a sample: up to two tiles wide or high, with padding above and below, left and right, or none.
    "llava-next": ([[(6, 24)], [(12, 12)]], [[(24, 7)], []], [[], []], [[(12, 24)], [(9, 20)]]),
    # An image has at most about 2 tiles' worth: 36 × 36 is reduced, 20 × 33 and 40 × 14 lose padding, 12 × 12 is one
    # tile; images that are not alone are their base tiles.
    "llava-onevision": ([[(20, 33)], [(12, 12), (9, 30)]], [[(40, 14)], []], [[], []], [[(36, 36)], [(12, 12)]]),
    **dict.fromkeys(
        ("llava", "internvl", "qianfan", "gemma3", "deepseek", "paligemma", "aya", "cohere2"),
        ([[(32, 32), (32, 32)], []], [[], []], [[(32, 32)], [(32, 32)]]),
    ),
    # Transformers takes images of one size at a time: the tower's own (6 × 6 patches), larger ones, smaller ones, none.
    **dict.fromkeys(
        ("smolvlm", "idefics3"),
        ([[(24, 24), (24, 24)], []], [[(32, 32)], [(32, 32)]], [[(16, 16)] * 3, [(16, 16)]], [[], []]),
    ),
    **dict.fromkeys(
        ("pixtral", "mistral3", "ministral3", "video-llama"),
        ([[(16, 16), (24, 8)], []], [[], []], [[(8, 16)], [(16, 8)]]),
    ),
    # Of 5 × 3 patches of 4 pixels there are 2 × 1 features.
    "lighton": ([[(16, 16), (20, 12)], []], [[], []], [[(12, 20)], [(16, 8)]]),
    # A feature covers 12 × 12 pixels.
    "gemma4": ([[(24, 36), (36, 12)], []], [[], []], [[(12, 12)], [(24, 24)]]),
    # A feature covers 16 × 16 pixels. Three pairs are a small copy, rows and columns of slices, and a slice.
    "minicpmv": (
        *([[((16, 32), (2, 3), (32, 16)), (48, 16)], [(32, 32)]], [[], [((16, 16), (1, 2), (16, 32))]], [[], []]),
    ),
    # Each micro-batch with sounds has a whole chunk, to which Transformers pads all.
    "omni3": (*([[(117,), (16, 24), (8, 8)], [(4,), (12,)]], [[(209,)], []], [[], []], [[(24, 40)], [(100,), (5,)]]),),
    # Sounds of one feature, of whole chunks, and of one and a half, with images, without, and none.
    "omni": (*([[(17,), (24, 40), (8, 8)], [(4,), (12,)]], [[(9,)], []], [[], []], [[(24, 40)], [(18,), (5,)]]),),
    # With patches of 4 and windows of 16 pixels, 24 × 40 has windows of all four kinds; 8 × 8 is one feature.
    **dict.fromkeys(
        ("qwen", "cosmos3", "glm", "exaone", "paddleocr", "kimi", "muse"),
        ([[(24, 40), (8, 8)], [(32, 16)]], [[(16, 16)], []], [[], []]),
    ),
}
# (frames, height, width) of videos beside images. Qwen: three frames fill two groups, of which the second repeats the
# last; the second micro-batch has none, so that its patches are narrower. Transformers takes OneVision's of one length.
VIDEOS: dict[str, Any] = {
    "omni3": ([[(117,), (3, 16, 16)], []], [[(2, 8, 8), (8, 8)], [(4, 16, 24)]], [[], [(8, 16)]]),
    "minicpmv": ([[(2, 32, 16), (16, 16)], [(32, 48)]], [[], [(1, 16, 32), (2, 16, 16)]]),
    **dict.fromkeys(
        ("qwen", "cosmos3", "exaone", "muse"),
        ([[(4, 24, 40), (8, 8)], [(3, 16, 32)]], [[(16, 16)], []], [[(16, 16)], [(2, 8, 8), (2, 8, 8)]]),
    ),
    "gemma4": ([[(2, 24, 36), (36, 12)], [(3, 12, 24)]], [[(12, 12)], []]),
    # Chunks of four frames, of the two or three that are left, and of one.
    "kimi": ([[(4, 24, 40), (8, 8)], [(6, 16, 32)]], [[(5, 8, 16)], []], [[(16, 16)], [(3, 24, 24), (1, 8, 8)]]),
    "llava-onevision": (
        *([[(2, 20, 33)], [(12, 12), (2, 9, 30)]], [[(3, 40, 14), (3, 12, 12)], []], [[(20, 33)], [(1, 12, 12)]]),
    ),
}


def images_of(name: str, table: dict[str, Any] = IMAGES) -> Any:
    """Return the images of a model, or its videos."""
    return next(images for start, images in table.items() if name.startswith(start))


def _at_layouts(name: str) -> Any:
    """Return micro-batches with equally many trained tokens."""
    model = name.removesuffix("-videos")
    images = images_of(model)
    if name == "llava-onevision-videos":
        return images_of(model, VIDEOS)[:2]
    if name.startswith("kimi"):
        return (*images_of(model, VIDEOS), images[2])
    if name != model:
        return (*images_of(model, VIDEOS), images[1])
    if name.startswith(("qwen", "cosmos3", "glm", "exaone", "paddleocr", "muse")):
        return (*images, [[], [(16, 8)]])
    if name.startswith("minicpmv"):
        return (*images, [[], [(16, 32)]])
    if name.startswith(("llava-onevision", "smolvlm", "idefics3", "omni")):
        return images
    return (images[0], images[-1])


# What runs at all layouts: models and their micro-batches.
FAMILIES: dict[str, tuple[Callable[[], Any], Any]] = {
    name: (partial(tiny, name.removesuffix("-videos")), _at_layouts(name))
    for name in (*MODELS, "llava-onevision-videos", "qwen2.5-vl-videos", "qwen3-vl-videos", "exaone4.5-videos")
    if name not in ("llava-siglip", "ministral3-tied", "aya-cohere")
}
MIXTURES = [name for name in FAMILIES if name.endswith("-moe")]
# One model of each family, and InternVL's mixture of experts.
SINGLE = [name for name in FAMILIES if not name.endswith(("-tied", "-6b", "-videos", "-4.6")) and "text" not in name]


def square(name: str) -> str:
    """Return the side of the first square image of a family, for synthetic images that its model can take."""
    sizes = (size for batch in FAMILIES[name][1] for sample in batch for size in sample)
    return str(next(size[0] for size in sizes if len(size) == 2 and size[0] == size[1]))
