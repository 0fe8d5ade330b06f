"""Configurations and tables of Llama, Mistral, Ministral, Qwen2, Qwen3, DeepSeek-V3 and gpt-oss language models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megavlm.arch.layers import EMBEDDING, LANGUAGE_LAYER, LANGUAGE_NORM, MTP_INPUT, MTP_NORM, OUTPUT
from megavlm.config.derived import is_latent, is_linear, of_layer
from megavlm.config.schema import ExpertsConfig, LanguageConfig, ModelConfig
from megavlm.errors import UserError
from megavlm.families.shared.experts import (
    ExpertFiles,
    biased_experts,
    biased_experts_table,
    experts_table,
    gemma_experts_table,
    glm_experts,
    qwen_experts,
)
from megavlm.families.shared.family import NamePrefixes
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import QKV, Grouped, Rename, Share, Table, gated, linear, module

# Defaults of the configuration classes: config.json omits settings that equal them.
_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048}
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8}
_QWEN = {**_LLAMA, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "intermediate_size": 11008, "vocab_size": 32000},
    "mistral": {**_MISTRAL, "vocab_size": 32000, "max_position_embeddings": 131072, "sliding_window": 4096},
    "ministral3": {
        **_MISTRAL,
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "deepseek_v3": {
        **{"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 4096},
        **{"intermediate_size": 18432, "vocab_size": 129280, "num_key_value_heads": 128, "n_group": 8, "topk_group": 4},
        **{
            "num_experts_per_tok": 8,
            "n_routed_experts": 256,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
        },
        "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {
        **{"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "vocab_size": 201088},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True},
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        },
    },
    "qwen3_moe": {
        **_QWEN,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
    },
}
_YARN_ROPE = ("factor", "original_max_position_embeddings")
_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def language(settings: Settings, *, kind: str | None = None, tied: bool | None = None) -> LanguageConfig:
    """Return the language model of a text configuration.

    `kind` overrides its model_type, and `tied` its tie_word_embeddings (from an enclosing configuration).
    """
    kind = kind or settings.get("model_type", "llama")
    if kind not in _DEFAULTS:
        refuse(settings, "model_type", f"known language models are {', '.join(_DEFAULTS)}")
    settings = _with_defaults(settings, kind)
    settings.require("hidden_act", "silu", why="only SwiGLU language models are known here")
    sinks = _sinks(settings) if kind == "gpt_oss" else {}
    if not sinks:
        settings.require("attention_bias", False, why="a bias on the attention output is not known here")
    settings.require("mlp_bias", False, why="biases in the language MLP are not known here")
    heads = settings.need("num_attention_heads")
    width = settings.get("head_dim", None) or settings.need("hidden_size") // heads
    rope = _latents(settings, heads) if kind == "deepseek_v3" else {"kv_channels": width, **_rope(settings, width)}
    return LanguageConfig(
        num_layers=settings.need("num_hidden_layers"),
        hidden_size=settings.need("hidden_size"),
        ffn_hidden_size=settings.need("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=settings.get("num_key_value_heads", heads),
        vocab_size=settings.need("vocab_size"),
        norm_epsilon=settings.get("rms_norm_eps", 1e-6),
        qk_norm=kind.startswith("qwen3"),
        tie_embeddings=settings.get("tie_word_embeddings", False) if tied is None else tied,
        max_positions=_max_positions(settings, kind),
        **{**{"add_qkv_bias": kind == "qwen2"}, **rope, **sinks},
    )


def _with_defaults(settings: Settings, kind: str) -> Settings:
    """Return the settings with the defaults of their class; those of rotary embedding go in one piece."""
    given = _given(settings.values)
    if "rope_scaling" in given:
        given.setdefault("rope_parameters", {})
    return Settings({**_DEFAULTS[kind], **given}, settings.where)


def _sinks(settings: Settings) -> dict[str, Any]:
    """Return the options of gpt-oss: sinks, windows in every second layer from the first on, biases, its activation."""
    usual = ["sliding_attention", "full_attention"] * settings.need("num_hidden_layers")
    usual = usual[: settings.need("num_hidden_layers")]
    biased = settings.get("attention_bias", True)
    return {
        "attention_sinks": True,
        "window_size": settings.need("sliding_window"),
        "full_attention_layers": types_of_layers(settings, usual, "full_attention", "sliding_attention"),
        **{"add_qkv_bias": biased, "add_proj_bias": biased, "activation": "clamped_swiglu"},
    }


def _latents(settings: Settings, heads: int) -> dict[str, Any]:
    """Return the options of latent attention. YaRN scales all scores (by mscale_all_dim) and the rotated channels."""
    if settings.get("num_key_value_heads", heads) != heads:
        refuse(settings, "num_key_value_heads", "each head of latent attention has a key of its own")
    turning = settings.get("qk_rope_head_dim", 64)
    width = settings.get("qk_nope_head_dim", 128) + turning
    found, rope = _rope(settings, turning), _rope_settings(settings)
    scaling = found.get("rope_scaling", "none")
    overall = rope.get("mscale_all_dim") if scaling != "none" else None
    direct = settings.values.get("q_lora_rank", 0) is None
    return found | {
        "kv_channels": width,
        "kv_lora_rank": settings.get("kv_lora_rank", 512),
        "q_lora_rank": None if direct else settings.get("q_lora_rank", 1536),
        "qk_pos_emb_head_dim": turning,
        "v_head_dim": settings.get("v_head_dim", 128),
        "rotary_interleaved": settings.get("rope_interleave", True),
        "softmax_scale": _growth(rope, overall) ** 2 / math.sqrt(width) if overall else None,
        "rope_attention_factor": _attention_factor(rope) if scaling == "yarn" else 1.0,
    }


def is_tied(settings: Settings, text: Settings) -> bool:
    """Return whether a configuration or its text section ties the embedding and the output layer."""
    return any(section.get("tie_word_embeddings", False) for section in (settings, text))


def types_of_layers(text: Settings, usual: Sequence[str], first: str, other: str) -> tuple[int, ...]:
    """Return the numbers of the layers of type `first`; the others have type `other`. `usual`: the default types."""
    types = text.get("layer_types", usual)
    if len(types) != len(usual) or not {*types} <= {first, other}:
        refuse(text, "layer_types", f"layers are known with {first} and {other}, one type for each")
    return tuple(number for number, kind in enumerate(types) if kind == first)


def experts(settings: Settings) -> ExpertsConfig:
    """Return the mixture of experts of a text configuration; an `ExpertsConfig` without experts for dense models."""
    if settings.get("model_type", "llama") == "deepseek_v3":
        settings = Settings({**_DEFAULTS["deepseek_v3"], **_given(settings.values)}, settings.where)
        return glm_experts(settings, layers=settings.need("num_hidden_layers"))
    if settings.get("model_type", "llama") == "gpt_oss":
        return biased_experts(settings)
    if settings.get("model_type", "llama") != "qwen3_moe":
        return ExpertsConfig()
    layers = settings.get("num_hidden_layers", _DEFAULTS["qwen3_moe"]["num_hidden_layers"])
    return qwen_experts(settings, layers=layers, normalized=settings.get("norm_topk_prob", False))


def _given(values: Any) -> dict[str, Any]:
    """Return the settings that are not null, and null ones whose null means "none" instead of the default."""
    absent = ("sliding_window", "q_lora_rank")
    return {name: value for name, value in values.items() if value is not None or name in absent}


def _max_positions(settings: Settings, kind: str) -> int | None:
    """Return the longest sequence for which full attention computes the same as the model.

    In longer sequences a sliding window would mask tokens, and Ministral would scale its queries.
    """
    longest = settings.get("max_position_embeddings", None)
    window = settings.get("sliding_window", None)
    slides = settings.get("use_sliding_window", False) if kind.startswith("qwen") else window is not None
    slides = slides and kind != "gpt_oss"  # whose windows are masks here
    rope = _rope_settings(settings)
    unscaled = rope.get("original_max_position_embeddings") if rope.get("llama_4_scaling_beta") else None
    limits = [limit for limit in (longest, window if slides else None, unscaled) if limit is not None]
    return min(limits) if limits else None


def _rope_settings(settings: Settings) -> dict[str, Any]:
    """Return the rotary settings: `rope_parameters` of Transformers 5, or `rope_scaling` of earlier versions."""
    return {**settings.get("rope_scaling", {}), **settings.get("rope_parameters", {})}


def _rope(settings: Settings, width: int) -> dict[str, Any]:
    """Return the options of rotary embeddings for attention heads of the given width."""
    rope = _rope_settings(settings)
    found: dict[str, Any] = {"rotary_base": float(rope.get("rope_theta", settings.get("rope_theta", 10000.0)))}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling in ("default", "dynamic", "mrope"):  # dynamic: unscaled within max_position_embeddings
        return found
    needed = {"linear": ("factor",), "llama3": _LLAMA3_ROPE, "yarn": _YARN_ROPE}.get(scaling, ())
    if missing := [name for name in needed if rope.get(name) is None]:
        raise UserError(f"{settings.where}: {scaling} rope_parameters have no {missing[0]}: the file is incomplete")
    if scaling == "linear":
        return found | {"rope_scaling": "linear", "rope_scaling_factor": float(rope["factor"])}
    if scaling == "llama3":
        return found | {
            "rope_scaling": "llama3",
            "rope_scaling_factor": float(rope["factor"]),
            "rope_low_freq_factor": float(rope["low_freq_factor"]),
            "rope_high_freq_factor": float(rope["high_freq_factor"]),
            "rope_original_positions": int(rope["original_max_position_embeddings"]),
        }
    if scaling == "yarn":
        return found | _yarn(rope, width)
    refuse(settings, "rope_parameters", "known rotary scalings are default, dynamic, linear, llama3 and yarn")


def _growth(rope: Mapping[str, Any], scale: float) -> float:
    """Return the factor by which YaRN scales queries and keys for an mscale."""
    return 0.1 * scale * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """Return the factor by which YaRN multiplies the rotated channels."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    return _growth(rope, scales[0]) / _growth(rope, scales[1]) if scales[0] and scales[1] else _growth(rope, 1)


def _yarn(rope: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return YaRN's options. It scales queries and keys by a factor; the softmax scale has its square."""
    grown = _attention_factor(rope)
    return {
        "rope_scaling": "yarn",
        "rope_scaling_factor": float(rope["factor"]),
        "rope_original_positions": int(rope["original_max_position_embeddings"]),
        "rope_truncate": rope.get("truncate", True),
        "rope_beta_fast": float(rope.get("beta_fast") or 32),
        "rope_beta_slow": float(rope.get("beta_slow") or 1),
        "softmax_scale": None if grown == 1 else grown**2 / math.sqrt(width),
    }


def partly_turning(language: LanguageConfig, text: Settings, usual: float) -> LanguageConfig:
    """Return a model of which a share of each head's channels rotates, by default `usual`: YaRN scales these alone."""
    rope = _rope_settings(text)
    share = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor", usual)
    scaled: dict[str, Any] = {}
    if share < 1 and language.rope_scaling == "yarn":
        scaled = {"softmax_scale": None, "rope_attention_factor": _attention_factor(rope)}
    return replace(language, rotary_percent=share, **scaled)


def attention_table(language: LanguageConfig, held: str, stored: str) -> Table:
    """Return the table of a layer's softmax attention; module names begin with `held`, file names with `stored`."""
    if is_latent(language):
        whole = {"linear_q_proj": "q_proj"}
        if language.q_lora_rank is not None:
            whole = {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj"}
        whole |= {"linear_kv_down_proj": "kv_a_proj_with_mqa", "kv_layernorm": "kv_a_layernorm"}
        whole |= {"linear_kv_up_proj": "kv_b_proj", "linear_proj": "o_proj"}
        return {f"{held}{own}.weight": Rename(f"{stored}{name}.weight") for own, name in whole.items()}
    groups, width = language.num_query_groups, language.kv_channels
    parts = "qk" if language.keys_as_values else "qkv"
    table: Table = {
        f"{held}linear_qkv.{leaf}": QKV(f"{stored}{{}}_proj.{leaf}", groups, width, parts)
        for leaf in (("weight", "bias") if language.add_qkv_bias else ("weight",))
    }
    if language.qk_norm and language.qk_norm_weights:
        table |= linear(f"{held}q_layernorm", f"{stored}q_norm", bias=False)
        table |= linear(f"{held}k_layernorm", f"{stored}k_norm", bias=False)
    if language.attention_sinks:
        table |= module(f"{held}core_attention", stored.removesuffix("."), "sinks")
    return table | linear(f"{held}linear_proj", f"{stored}o_proj", bias=language.add_proj_bias)


def linear_attention_table(language: LanguageConfig, held: str, stored: str) -> Table:
    """Return the table of a layer's linear attention; module names begin with `held`, file names with `stored`.

    A file has the rows of all queries, then of all keys, then of all values. The module keeps the rows of a key head
    together: its values, query and key, then the gates, β and decays of its values.
    """
    groups, width = language.linear_num_key_heads, language.linear_key_head_dim
    each = language.linear_num_value_heads // groups
    values = each * language.linear_value_head_dim

    def convolved(name: str) -> tuple[Share, ...]:
        return Share(name, values, 2 * groups * width), Share(name, width), Share(name, width, groups * width)

    gates = (("in_proj_z", values), ("in_proj_b", each), ("in_proj_a", each))
    projected = (Share(f"{stored}{name}.weight", count) for name, count in gates)
    taps = (1, language.linear_conv_kernel_dim)
    return {
        f"{held}in_proj.weight": Grouped((*convolved(f"{stored}in_proj_qkv.weight"), *projected), groups),
        f"{held}conv1d.weight": Grouped(convolved(f"{stored}conv1d.weight"), groups, columns=taps),
        f"{held}A_log": Rename(f"{stored}A_log"),
        f"{held}dt_bias": Rename(f"{stored}dt_bias"),
        **linear(f"{held}out_norm", f"{stored}norm", bias=False),
        **linear(f"{held}out_proj", f"{stored}out_proj", bias=False),
    }


def layer_table(model: ModelConfig, number: int, hf_layer: str, *, stored: ExpertFiles) -> Table:
    """Return the table of language layer `number`; its file names begin with `hf_layer`."""
    language, experts, layer = of_layer(model.language, number), model.experts, f"{LANGUAGE_LAYER}{number}."
    table: Table = module(layer[:-1], hf_layer[:-1], "layer_scalar") if language.layer_scalar else {}
    if language.input_norms:
        table |= linear(f"{layer}input_layernorm", f"{hf_layer}input_layernorm", bias=False)
    routed = bool(experts.num_experts) and number not in experts.dense_layers
    if language.input_norms and not language.parallel_block and not (routed and experts.own_norms):
        before_mlp = "pre_feedforward_layernorm" if language.post_norms else "post_attention_layernorm"
        table |= linear(f"{layer}pre_mlp_layernorm", f"{hf_layer}{before_mlp}", bias=False)
    if is_linear(language, number):
        table |= linear_attention_table(language, f"{layer}self_attention.", f"{hf_layer}linear_attn.")
    else:
        table |= attention_table(language, f"{layer}self_attention.", f"{hf_layer}self_attn.")
    if language.post_norms:
        table |= linear(f"{layer}self_attn_bda.norm", f"{hf_layer}post_attention_layernorm", bias=False)
        table |= linear(f"{layer}mlp_bda.norm", f"{hf_layer}post_feedforward_layernorm", bias=False)
    if routed and experts.own_norms:
        return table | gemma_experts_table(layer, hf_layer)
    if routed and experts.add_bias:
        return table | biased_experts_table(experts, layer, hf_layer, hidden_size=language.hidden_size)
    if routed:
        width = language.hidden_size
        return table | experts_table(experts, layer, hf_layer, hidden_size=width, stored=stored)
    return table | gated(f"{layer}mlp", f"{hf_layer}mlp", bias=False)


def predictor_table(model: ModelConfig, depth: int, names: tuple[str, str, str, str], **layer: Any) -> Table:
    """Return the table of the layer that predicts a further token at prediction depth `depth` (from 0), and its norms.

    `names` are the file names of the norm of embeddings, the norm of hidden states, the projection matrix and the last
    norm; `layer` are arguments of `layer_table`.
    """
    ours = ("embedding_norm", "hidden_norm", "projection")
    table = layer_table(model, model.language.num_layers + depth, **layer)
    for own, name in zip(ours, names[:3], strict=True):
        table |= linear(f"{MTP_INPUT}{depth}.{own}", name, bias=False)
    return table | linear(f"{MTP_NORM}{depth}", names[3], bias=False)


def language_table(model: ModelConfig, prefixes: NamePrefixes, *, layers: str = "layers") -> Table:
    """Return the table of a language model below `prefixes.language`, and of its output layer if that is not tied.

    `layers` is what file names call its layers.
    """
    language, prefix = model.language, prefixes.language
    table: Table = {f"{EMBEDDING}.word_embeddings.weight": Rename(f"{prefix}embed_tokens.weight")}
    for number in range(language.num_layers):
        table |= layer_table(model, number, f"{prefix}{layers}.{number}.", stored=prefixes.experts)
    table |= linear(LANGUAGE_NORM, f"{prefix}norm", bias=False)
    if not language.tie_embeddings:
        table[f"{OUTPUT}.linear.weight"] = Rename(prefixes.head)
    return table
