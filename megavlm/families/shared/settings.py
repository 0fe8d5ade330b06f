"""`config.json` as its families read it: nested, with the defaults of Transformers' classes, strict about meanings.

Of each name it says what the setting may be: types, and ranges far beyond any model of today. A name means the same in
all families and sections; what is not here is compared with known values where it is used.
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

_SETTINGS: dict[str, Expected] = {
    "model_type": TEXT,
    "num_hidden_layers": _LAYERS,
    "depth": _LAYERS,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "out_hidden_size": _WIDTH,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "num_heads": _HEADS,
    "head_dim": whole(1, 2**14),
    "vocab_size": whole(1, 2**24),
    "max_position_embeddings": whole(1, 2**31 - 1),
    "sliding_window": whole(1, 2**31 - 1),
    "use_sliding_window": FLAG,
    "tie_word_embeddings": FLAG,
    "hidden_act": TEXT,
    "rms_norm_eps": _EPSILON,
    "layer_norm_eps": _EPSILON,
    "norm_type": TEXT,
    "rope_theta": number(1e-3, 1e15),
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    "image_token_id": _TOKEN,
    "image_token_index": _TOKEN,
    "video_token_id": _TOKEN,
    "video_token_index": _TOKEN,
    "tokens_per_second": number(1e-3, 1e6),
    "image_size": _SQUARE,
    "patch_size": _SQUARE,
    "temporal_patch_size": _SQUARE,
    "num_channels": whole(1, 64),
    "in_channels": whole(1, 64),
    "spatial_merge_size": whole(1, 64),
    "window_size": _SIDE,
    "fullatt_block_indexes": listed(_LAYER, 0, 2_000),
    "deepstack_visual_indexes": listed(_LAYER, 0, 2_000),
    "num_position_embeddings": whole(1, 2**24),
    "vision_feature_layer": _LAYER | listed(_LAYER, 1, 2_000),
    "vision_feature_select_strategy": TEXT,
    "vision_aspect_ratio": TEXT,
    "image_grid_pinpoints": listed(listed(_SIDE, 2, 2), 1, 1_024),
    "projector_hidden_act": TEXT,
    "multimodal_projector_bias": FLAG,
    "downsample_ratio": number(1 / 64, 1),
    "scale_factor": whole(1, 64),
    "use_absolute_position_embeddings": FLAG,
    "use_mean_pooling": FLAG,
    "use_qk_norm": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "use_bidirectional_attention": FLAG,
    "hidden_activation": TEXT,
    "query_pre_attn_scalar": number(1e-3, 1e9),
    "sliding_window_pattern": whole(1, 2_000),
    "_sliding_window_pattern": whole(1, 2_000),
    "layer_types": listed(TEXT, 0, 2_000),
    "rope_local_base_freq": number(1e-3, 1e15),
    "mm_tokens_per_image": whole(1, 2**16),
    "embed_dim": _WIDTH,
    "mlp_ratio": number(1e-3, 1e3),
    "in_chans": whole(1, 64),
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "n_shared_experts": whole(1, 64),
    "num_experts_per_tok": whole(1, 2**10),
    "moe_intermediate_size": _WIDTH,
    "decoder_sparse_step": whole(1, 2_000),
    "mlp_only_layers": listed(_LAYER, 0, 2_000),
    "first_k_dense_replace": whole(0, 2_000),
    "norm_topk_prob": FLAG,
    "routed_scaling_factor": number(1e-3, 1e3),
    "n_group": whole(1, 2**10),
    "topk_group": whole(1, 2**10),
}
# Of `rope_scaling` and `rope_parameters`, and of sections in them.
_ROPE: dict[str, Expected] = {
    "rope_theta": number(1e-3, 1e15),
    "rope_type": TEXT,
    "type": TEXT,
    "factor": number(1e-3, 1e6),
    "low_freq_factor": number(1e-6, 1e6),
    "high_freq_factor": number(1e-6, 1e6),
    "original_max_position_embeddings": whole(1, 2**31 - 1),
    "beta_fast": number(1e-3, 1e6),
    "beta_slow": number(1e-3, 1e6),
    "mscale": number(0, 1e3),
    "mscale_all_dim": number(0, 1e3),
    "attention_factor": number(1e-3, 1e3),
    "llama_4_scaling_beta": number(0, 1e3),
    "truncate": FLAG,
    "partial_rotary_factor": number(1e-3, 1),
    "mrope_section": listed(whole(0, 2**14), 1, 8),
}


def check_setting(name: str, value: Any, where: str) -> None:
    """Raise UserError for a setting of a config.json, or of a section of it, that is of another type or size."""
    kind = _SETTINGS.get(name) or _ROPE.get(name)
    if kind is not None:
        check({name: value}, {name: kind}, where)
    if name in ("rope_scaling", "rope_parameters"):
        check(value or {}, _ROPE, f"{where}: {name}")


@dataclass(frozen=True)
class Settings:
    """Holds a section of a `config.json`. `where` names it in messages."""

    values: Mapping[str, Any]
    where: str

    def get(self, name: str, default: Any) -> Any:
        """Return a setting; what is absent or null has the default of the configuration's class.

        Raises UserError for a type or size that no model has.
        """
        value = self.values.get(name)
        check_setting(name, value, self.where)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """Return a setting without a default."""
        value = self.get(name, None)
        if value is None:
            raise UserError(f"{self.where} has no {name!r}: this folder is incomplete or of another kind")
        return value

    def section(self, name: str) -> Settings:
        """Return a nested section, empty where it is absent."""
        values = self.get(name, {})
        if not isinstance(values, Mapping):
            raise UserError(f"{self.where}: {name!r} is no section: the file is damaged")
        return Settings(values, f"{self.where}: {name}")

    def square(self, name: str, default: int) -> int:
        """Return a side length that may be written as [side, side]."""
        value = self.get(name, default)
        sides = {value} if isinstance(value, int) else set(value)
        if len(sides) != 1:
            refuse(self, name, "only square ones are known here")
        return int(sides.pop())

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Return a setting translated to the value of `ModelConfig` for it."""
        value = self.get(name, default)
        if value not in choices:
            refuse(self, name, f"known are {', '.join(choices)}")
        return choices[value]

    def require(self, name: str, *expected: Any, why: str) -> None:
        """Refuse anything but the given values; absent is fine."""
        if self.get(name, expected[0]) not in expected:
            refuse(self, name, why)


def refuse(settings: Settings, name: str, why: str) -> NoReturn:
    """Raise UserError for a setting that is known but not supported: nothing else is computed in its place."""
    raise UserError(f"{settings.where}: {name} = {settings.values.get(name)!r:.200} is not supported: {why}")
