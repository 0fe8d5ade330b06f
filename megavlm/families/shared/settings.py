"""Read the settings of a `config.json`: nested sections, defaults of Transformers' classes, type and range checks.

The tables hold the type of each setting, and a range far beyond any model of today. A name means the same in all
families and sections. A setting that is not in the tables is compared with known values where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from megavlm.errors import UserError
from megavlm.json_files import FLAG, OBJECT, TEXT, Expected, check, listed, number, whole

_LAYERS = whole(1, 2_000)
_WIDTH = whole(1, 2**20)
_HEADS = whole(1, 2**14)
_SIDE = whole(1, 2**14)
_TOKEN = whole(0, 2**31 - 1)
_SQUARE = _SIDE | listed(_SIDE, 1, 2)
_EPSILON = number(0, 1)
_LAYER = whole(-2_000, 2_000)
_EXPERTS = whole(0, 2**14)


def _each(expected: Expected, names: str) -> dict[str, Expected]:
    return dict.fromkeys(names.split(), expected)


_SETTINGS: dict[str, Expected] = {
    **_each(
        TEXT,
        "model_type hidden_act norm_type vision_feature_select_strategy vision_aspect_ratio "
        "projector_hidden_act hidden_activation downsample_mode activation_function",
    ),
    **_each(_LAYERS, "num_hidden_layers depth encoder_layers"),
    **_each(
        _WIDTH,
        "hidden_size intermediate_size out_hidden_size projection_dim embed_dim moe_intermediate_size "
        "shared_expert_intermediate_size alignment_intermediate_size kv_lora_rank q_lora_rank projection_hidden_size "
        "mm_hidden_size d_model encoder_ffn_dim output_dim mm_embed_dim output_proj_dims projector_hidden_size",
    ),
    **_each(
        _HEADS,
        "num_attention_heads num_key_value_heads num_heads linear_num_key_heads linear_num_value_heads "
        "num_global_key_value_heads encoder_attention_heads",
    ),
    **_each(
        whole(1, 2**14),
        "head_dim linear_key_head_dim linear_value_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "global_head_dim",
    ),
    **_each(whole(1, 2**24), "vocab_size num_position_embeddings position_embedding_size mm_posemb_size"),
    **_each(whole(1, 2**31 - 1), "max_position_embeddings sliding_window"),
    **_each(
        FLAG,
        "use_sliding_window tie_word_embeddings multimodal_projector_bias use_absolute_position_embeddings "
        "use_mean_pooling use_qk_norm attention_bias mlp_bias norm_topk_prob "
        "attn_output_gate use_bias rope_interleave attention_k_eq_v enable_moe_block use_clipped_linears standardize",
    ),
    "use_bidirectional_attention": FLAG | TEXT,
    **_each(whole(0, 2**14), "hidden_size_per_layer_input num_kv_shared_layers"),
    **_each(_EPSILON, "rms_norm_eps layer_norm_eps adapter_layer_norm_eps projection_layer_norm_eps projector_ln_eps"),
    "post_norm_eps": _EPSILON,
    **_each(number(1e-3, 1e15), "rope_theta rope_local_base_freq"),
    **_each(OBJECT, "rope_scaling rope_parameters per_layer_config audio_config"),
    **_each(
        _TOKEN,
        "image_token_id image_token_index video_token_id video_token_index image_start_id image_end_id slice_start_id "
        "slice_end_id newline_id media_placeholder_token_id audio_token_id audio_token_index",
    ),
    "insert_layer_id": _LAYER,
    **_each(_SQUARE, "merge_kernel_size window_kernel_size"),
    "merger_times": whole(1, 64),
    **_each(number(1e-3, 1e6), "tokens_per_second position_id_per_seconds"),
    "num_mel_bins": whole(1, 2**12),
    **_each(whole(1, 2**16), "n_window n_window_infer downsample_hidden_size"),
    **_each(_SQUARE, "image_size patch_size temporal_patch_size"),
    **_each(
        whole(1, 64),
        "num_channels in_channels spatial_merge_size scale_factor in_chans n_shared_experts linear_conv_kernel_dim "
        "downsample_factor pooling_kernel_size merge_size patch_temporal",
    ),
    **_each(_SIDE, "window_size pos_emb_height pos_emb_width"),
    **_each(listed(_LAYER, 0, 2_000), "fullatt_block_indexes deepstack_visual_indexes mlp_only_layers"),
    "vision_feature_layer": _LAYER | listed(_LAYER, 1, 2_000),
    "image_grid_pinpoints": listed(listed(_SIDE, 2, 2), 1, 1_024),
    "downsample_ratio": number(1 / 64, 1),
    **_each(number(1e-3, 1e9), "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"),
    **_each(number(1e-6, 1e6), "logit_scale output_multiplier qk_scale_factor"),
    **_each(
        whole(1, 2_000), "sliding_window_pattern _sliding_window_pattern decoder_sparse_step full_attention_interval"
    ),
    "layer_types": listed(TEXT, 0, 2_000),
    "layer_rope_theta": listed(number(0, 1e15), 0, 2_000),
    "mm_tokens_per_image": whole(1, 2**16),
    **_each(number(1e-3, 1e3), "mlp_ratio routed_scaling_factor"),
    **_each(_EXPERTS, "num_experts num_local_experts n_routed_experts"),
    **_each(whole(1, 2**10), "num_experts_per_tok top_k_experts n_group topk_group"),
    "first_k_dense_replace": whole(0, 2_000),
}
# Settings in `rope_scaling` and `rope_parameters`, and in their sections.
_ROPE: dict[str, Expected] = {
    "rope_theta": number(1e-3, 1e15),
    **_each(TEXT, "rope_type type"),
    **_each(number(1e-3, 1e6), "factor beta_fast beta_slow"),
    **_each(number(1e-6, 1e6), "low_freq_factor high_freq_factor"),
    "original_max_position_embeddings": whole(1, 2**31 - 1),
    **_each(number(0, 1e3), "mscale mscale_all_dim llama_4_scaling_beta"),
    "attention_factor": number(1e-3, 1e3),
    "truncate": FLAG,
    "partial_rotary_factor": number(1e-3, 1),
    "mrope_section": listed(whole(0, 2**14), 1, 8),
}


def check_setting(name: str, value: Any, where: str) -> None:
    """Raise UserError if a setting of a config.json or of one of its sections has a wrong type or is out of range."""
    kind = _SETTINGS.get(name) or _ROPE.get(name)
    if kind is not None:
        check({name: value}, {name: kind}, where)
    if name in ("rope_scaling", "rope_parameters"):
        check(value or {}, _ROPE, f"{where}: {name}")


@dataclass(frozen=True)
class Settings:
    """Section of a `config.json`. `where` names the section in messages."""

    values: Mapping[str, Any]
    where: str

    def get(self, name: str, default: Any) -> Any:
        """Return a setting, or `default` (that of the configuration class) if it is absent or null.

        Raises UserError if the setting has a wrong type or is out of range.
        """
        value = self.values.get(name)
        check_setting(name, value, self.where)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """Return a setting that has no default. Raises UserError if it is absent or null."""
        value = self.get(name, None)
        if value is None:
            raise UserError(f"{self.where} has no {name!r}: this folder is incomplete or of another kind")
        return value

    def section(self, name: str) -> Settings:
        """Return a nested section; an empty one if it is absent."""
        values = self.get(name, {})
        if not isinstance(values, Mapping):
            raise UserError(f"{self.where}: {name!r} is no section: the file is damaged")
        return Settings(values, f"{self.where}: {name}")

    def square(self, name: str, default: int) -> int:
        """Return a side length that may be written as [side, side]. Raises UserError if the sides differ."""
        value = self.get(name, default)
        sides = {value} if isinstance(value, int) else set(value)
        if len(sides) != 1:
            refuse(self, name, "only square ones are known here")
        return int(sides.pop())

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Return a setting translated by `choices` to its value in `ModelConfig`. Raises UserError for other values."""
        value = self.get(name, default)
        if value not in choices:
            refuse(self, name, f"known are {', '.join(choices)}")
        return choices[value]

    def require(self, name: str, *expected: Any, why: str) -> None:
        """Raise UserError if a setting is present and its value is not one of `expected`."""
        if self.get(name, expected[0]) not in expected:
            refuse(self, name, why)


def refuse(settings: Settings, name: str, why: str) -> NoReturn:
    """Raise UserError for a setting with an unsupported value, so that nothing else is computed in its place."""
    raise UserError(f"{settings.where}: {name} = {settings.values.get(name)!r:.200} is not supported: {why}")
