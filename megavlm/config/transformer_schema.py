"""Options of the shapes of the language model. Part of the schema (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megavlm.config.option import SHARE, Count, Natural, Needs, Positive, option
from megavlm.config.vision_schema import LAYERS

LATENTS = Needs(
    lambda config: config.model.language.kv_lora_rank is not None,
    "without latent attention",
    "add --set model.language.kv_lora_rank=512",
)
GLOBAL_LAYERS = Needs(
    lambda config: config.model.language.window_size is not None,
    "without layers with a sliding window",
    "set model.language.window_size and model.language.full_attention_layers",
)
QK_NORM = Needs(
    lambda config: config.model.language.qk_norm,
    "without norms of queries and keys",
    "add --set model.language.qk_norm=true",
)
POST_NORMS = Needs(
    lambda config: config.model.language.post_norms,
    "without norms of outputs",
    "add --set model.language.post_norms=true",
)


@dataclass(frozen=True)
class LanguageConfig:
    """A decoder-only transformer; covers Llama, Mistral, Qwen2, Qwen3, Gemma 3, GLM-4, and those inside their VLMs."""

    num_layers: int = option(4, "Layers of the language model.", valid=LAYERS)
    hidden_size: Count = option(128, "Hidden size of the language model.")
    ffn_hidden_size: Count = option(256, "Inner width of the language MLP.")
    num_attention_heads: Count = option(8, "Query heads of the language model.")
    num_query_groups: Count = option(
        None, "Number of key/value heads (grouped-query attention); default: the number of query heads."
    )
    kv_channels: Count = option(None, "Width of a head; default: hidden size / attention heads.")
    global_kv_channels: Count | None = option(
        None, "Head width in layers without a window; default: kv_channels.", needs=GLOBAL_LAYERS
    )
    global_query_groups: Count | None = option(
        None, "Key heads in layers without a window; default: num_query_groups.", needs=GLOBAL_LAYERS
    )
    keys_as_values: bool = option(
        False,
        "Use keys, before norm and rotation, as values in layers without a window (Gemma 4).",
        needs=(GLOBAL_LAYERS, QK_NORM),
    )
    vocab_size: Count = option(
        None, "Vocabulary size; default: the tokenizer's. Rows that pad it to a multiple of TP do not change results."
    )
    rotary_base: Positive = option(10000.0, "Base of the rotary position embedding.")
    rope_scaling: Literal["none", "linear", "llama3", "yarn", "proportional"] = option(
        "none",
        "Scaling of the rotary frequencies for longer contexts: linear divides all by the factor, llama3 and yarn only "
        "low ones; proportional: only a head's highest frequencies, rotary_percent of them, rotate (Gemma 4).",
    )
    rope_scaling_factor: Positive = option(1.0, "Divisor of scaled rotary frequencies.")
    rope_low_freq_factor: Positive = option(
        1.0, "llama3 scaling: divide frequencies with a wavelength above original positions / this."
    )
    rope_high_freq_factor: Positive = option(
        4.0,
        "llama3 scaling: keep frequencies with a wavelength below original positions / this; interpolate between "
        "the two bounds.",
    )
    rope_beta_fast: Positive = option(
        32.0, "yarn scaling: keep frequencies that make at least this many turns within the original positions."
    )
    rope_beta_slow: Positive = option(
        1.0,
        "yarn scaling: divide frequencies that make at most this many turns within the original positions; interpolate "
        "between the two bounds.",
    )
    rope_truncate: bool = option(True, "yarn: round the bounds to whole pairs.")
    rope_original_positions: Count = option(
        8192, "llama3 and yarn scaling: context length in tokens before scaling (original positions)."
    )
    rotary_percent: float = option(
        1.0, "Share of the channels of an attention head that rotate, its first ones (GLM: 0.5).", valid=SHARE
    )
    rotary_interleaved: bool = option(
        False, "Rotate pairs of neighbouring channels (GLM); off: channels of the first and the second half of a head."
    )
    local_rotary_base: Positive | None = option(
        None,
        "Base of the rotary position embedding in layers with a sliding window, where frequencies are not scaled "
        "(Gemma 3); default: positions rotate alike in all layers.",
    )
    max_positions: Count | None = option(
        None, "Maximum --seq-length that the model supports, in tokens; default: that of a given folder, else no limit."
    )
    mrope_section: tuple[Natural, ...] = option(
        (),
        "M-RoPE: numbers of channel pairs that rotate with time, height and width (Qwen-VL); default: all pairs "
        "rotate with the token position.",
    )
    mrope_interleaved: bool = option(
        False,
        "M-RoPE: interleave time, height and width over the channel pairs (Qwen3-VL); off: one block of pairs each.",
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = option(
        "RMSNorm", "Type of the language model's norm layers of hidden states; LayerNorm has no bias (Cohere)."
    )
    norm_epsilon: Positive = option(1e-6, "Epsilon of the model's norm layers.")
    add_qkv_bias: bool = option(False, "Add biases to the query, key and value projections (Qwen2).")
    add_proj_bias: bool = option(False, "Add a bias to attention's output.")
    qk_norm: bool = option(False, "Apply RMSNorm to queries and keys per head.")
    qk_norm_weights: bool = option(True, "Give these norms weights.", needs=QK_NORM)
    value_norm: bool = option(False, "Normalize values (RMSNorm, no weights).")
    layer_scalar: bool = option(False, "Scale layer outputs by fixed numbers.")
    post_norms: bool = option(
        False,
        "Apply a norm to the output of attention and of the MLP too, before it is added to the residual (Gemma).",
    )
    post_norm_epsilon: Positive | None = option(None, "Their epsilon; default: norm_epsilon.", needs=POST_NORMS)
    input_norms: bool = option(
        True,
        "Apply a norm to the input of attention and of the MLP; off: only to their outputs (EXAONE 4).",
        needs=POST_NORMS,
    )
    parallel_block: bool = option(
        False, "Apply attention and MLP in parallel to one normed input (Cohere); off: in sequence, each after a norm."
    )
    apply_layernorm_1p: bool = option(
        False, "Multiply by 1 + weight in the language model's norm layers, instead of by the weight (Gemma)."
    )
    final_norm_1p: bool = option(
        True,
        "Do so in the last norm, too.",
        needs=Needs(
            lambda config: config.model.language.apply_layernorm_1p,
            "without such norm layers",
            "add --set model.language.apply_layernorm_1p=true",
        ),
    )
    activation: Literal["swiglu", "geglu", "clamped_swiglu"] = option(
        "swiglu",
        "Gated activation of the MLP: SiLU, tanh GELU (Gemma), or clamped quick GELU (gpt-oss).",
    )
    softmax_scale: Positive | None = option(None, "Factor of attention scores; default: 1/√(head width).")
    attention_softcap: Positive | None = option(None, "Bound c of scores x, c·tanh(x / c); default: none.")
    attention_sinks: bool = option(False, "Learn a sink score per head.")
    final_softcap: Positive | None = option(None, "Bound c of logits x, c · tanh(x / c); default: none.")
    logit_scale: Positive = option(1.0, "Factor of logits (Cohere).")
    embedding_scale: Positive = option(
        1.0, "Factor of token embeddings, but not of image features (Gemma: √hidden size)."
    )
    embedding_norm: bool = option(
        False, "Apply an RMS norm to token embeddings and image features before the first layer."
    )
    window_size: Count | None = option(
        None,
        "Sliding window: each token attends to at most this many tokens, itself and those before it; default: to all "
        "tokens before it.",
    )
    full_attention_layers: tuple[Natural, ...] = option(
        (),
        "Indices (from 0) of language layers that attend to all tokens despite model.language.window_size; default: "
        "none.",
    )
    no_rope_layers: tuple[Natural, ...] = option(
        (), "Indices (from 0) of language layers without rotary positions (NoPE, EXAONE 4); default: no layer."
    )
    kv_lora_rank: Count | None = option(
        None,
        "Multi-head latent attention (MLA, DeepSeek-V2): width of the latent that keys and values of all heads are "
        "projected from; default: they are projected from the hidden states.",
    )
    q_lora_rank: Count | None = option(
        None,
        "Latent attention: width of the latent that queries are projected from; default: the hidden states.",
        needs=LATENTS,
    )
    qk_pos_emb_head_dim: Count = option(
        64,
        "Latent attention: channels of a query and key that rotate, the last of kv_channels; all heads share those of "
        "a key.",
        needs=LATENTS,
    )
    v_head_dim: Count = option(128, "Latent attention: width of a value head.", needs=LATENTS)
    rope_attention_factor: Positive = option(
        1.0,
        "Factor of the channels that rotate, where others do not (YaRN's, of latent attention and partial rotation).",
    )
    attention_output_gate: bool = option(
        False, "Multiply the output of attention by the sigmoid of a projection of its input (Qwen3.5)."
    )
    linear_attention_layers: tuple[Natural, ...] = option(
        (),
        "Indices (from 0) of language layers with linear attention, GatedDeltaNet, in place of softmax attention "
        "(Qwen3.5); default: no layer.",
    )
    linear_num_key_heads: Count = option(16, "Linear attention: query and key heads.")
    linear_num_value_heads: Count = option(32, "Linear attention: number of value heads, a multiple of the key heads.")
    linear_key_head_dim: Count = option(128, "Linear attention: width of a key head.")
    linear_value_head_dim: Count = option(128, "Linear attention: value head width.")
    linear_conv_kernel_dim: Count = option(4, "Linear attention: width in tokens of its causal convolution.")
    mtp_layers: Natural = option(
        0,
        "Number of trained layers after the last one, each of which predicts a token further ahead (multi-token "
        "prediction); default 0: such layers of a given folder are exported unchanged.",
    )
    bidirectional_images: bool = option(
        False, "Let tokens of an image attend to all tokens of the same image, also to later ones (Gemma 3)."
    )
    bidirectional_windows: bool = option(
        False, "Let tokens of an image attend both ways in layers with a window alone (Gemma 4).", needs=GLOBAL_LAYERS
    )
    bidirectional_prefix: bool = option(
        False, "Let the tokens before a sample's first trained one attend to one another both ways (PaliGemma)."
    )
    tie_embeddings: bool = option(False, "Share one weight between the input embedding and the output layer.")
