"""Options of the shapes of the vision and the audio encoder. Part of the schema (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megavlm.config.option import Count, Natural, Needs, Positive, Valid, option

LAYERS = Valid("from 1 to 10,000", lambda value: 1 <= value <= 10_000)  # plans and dry runs visit each layer
TOWER = Valid("from 0 to 10,000", lambda value: 0 <= value <= 10_000)
AUDIO = Needs(
    lambda config: config.model.audio.num_layers > 0,
    "without an audio encoder",
    "add --set model.audio.num_layers=32",
)


@dataclass(frozen=True)
class VisionConfig:
    """A pre-norm ViT; covers CLIP, SigLIP, InternViT and the encoders of Qwen2.5-VL and Qwen3-VL.

    Without layers there is no projector, and the other options of both have no effect, unless `encoder_free` is set.
    """

    num_layers: int = option(4, "Layers of the vision encoder; 0: none, text only.", valid=TOWER)
    hidden_size: Count = option(128, "Hidden size of the vision encoder.")
    ffn_hidden_size: Count = option(256, "Inner width of the vision MLP.")
    num_attention_heads: Count = option(8, "Heads; padded with zeros for TP.")
    num_query_groups: Count | None = option(
        None, "Number of key/value heads of the vision encoder (grouped-query attention); default: the number of heads."
    )
    image_size: Count = option(32, "Side in pixels of the images that the table of learned positions is for.")
    patch_size: Count = option(8, "Side of a patch in pixels.")
    in_channels: Count = option(
        3, "Number of channels of an image; with given weights, as many as theirs or more (see new_channels)."
    )
    new_channels: Literal["zeros", "repeat"] = option(
        "zeros",
        "Weights of the channels that in_channels adds to given ones: zeros, so that training starts from "
        "the given model's outputs, or repeat: the given channels' weights in turn, scaled to keep the sum.",
        needs=Needs(
            lambda config: bool(config.checkpoint.init_from or config.checkpoint.vision_from),
            "without given weights of a vision encoder",
            "name them with --init-from or --vision-from",
        ),
    )
    temporal_patch_size: Count = option(
        1, "Number of video frames in a patch; a still image is repeated to fill them (Qwen-VL: 2)."
    )
    class_token: bool = option(False, "Prepend a learned class token to each image; the projector does not receive it.")
    position_embedding: Literal["learned", "rope2d", "learned_rope2d", "axes_rope2d"] = option(
        "learned",
        "Position encoding of patches: a learned table, 2-D rotary embedding, or both (Qwen3-VL); axes_rope2d: a "
        "learned column plus a learned row, each of which rotates half of a head (Gemma 4).",
    )
    axis_positions: Count = option(
        10240,
        "Number of learned columns and of rows.",
        needs=Needs(
            lambda config: config.model.vision.position_embedding == "axes_rope2d",
            "without learned columns and rows",
            "add --set model.vision.position_embedding=axes_rope2d",
        ),
    )
    position_interpolation: Literal[
        "bicubic", "bilinear", "bilinear_unaligned", "bilinear_zeros", "bucket", "fraction"
    ] = option(
        "bicubic",
        "Method that adapts the learned position table to other image sizes: bicubic, bilinear with aligned corners "
        "(Qwen3-VL) or without (PaddleOCR-VL; with zeros around: Muse-Glimmer), or bucket, the table entry that "
        "contains the patch (SmolVLM); fraction: the same, but its place is rounded once less (MiniCPM-V).",
    )
    rotary_base: Positive = option(10000.0, "Base of the 2-D rotary position embedding.")
    rotary_interleaved: bool = option(
        False, "2-D rotary embedding: rows use even, columns odd frequencies (Pixtral); off: both use even ones."
    )
    rotary_neighbours: bool = option(
        False, "2-D rotary embedding: rotate neighbouring channels, by column and row in turn (MoonViT); off: halves."
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = option("LayerNorm", "Type of norm layers.")
    norm_epsilon: Positive = option(1e-5, "Epsilon of the encoder's norm layers.")
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu", "geglu"] = option(
        "gelu", "Activation function of the vision MLP."
    )
    softmax_scale: Positive | None = option(None, "Factor of attention scores; default: 1/√(head width).")
    add_bias_linear: bool = option(True, "Add biases to the attention output projection and the MLP.")
    add_qkv_bias: bool = option(True, "Add biases to queries, keys and values.")
    qk_norm: Literal["none", "head", "head_and_values", "full"] = option(
        "none",
        "RMS normalization of queries and keys: none, per head (also of values, without weights: Gemma 4), or full "
        "(over all heads at once, InternViT-6B).",
    )
    post_norms: bool = option(False, "Normalize outputs of attention and MLP.")
    layer_scale: bool = option(
        False, "Multiply the output of each residual branch by a learned per-channel scale (InternViT)."
    )
    patch_bias: bool = option(True, "Bias of the patch embedding (CLIP: none).")
    pre_norm: bool = option(False, "Add a norm after the patch embedding (CLIP).")
    norm_before_position: bool = option(
        False, "Apply the norm of model.vision.pre_norm before learned positions are added (GLM-4.1V); off: after."
    )
    post_norm: bool = option(
        True, "Add a norm layer after the last layer; it has no effect if model.vision.feature_layer is not -1."
    )
    encoder_free: bool = option(False, "Embed patches without encoder layers.")
    feature_layer: int = option(
        -1, "Layer whose output the projector receives, from the end: -1 is the last layer, -2 the one before it."
    )
    window_size: Count | None = option(
        None, "Side in pixels of the windows for windowed attention; default: each layer attends to the whole image."
    )
    full_attention_layers: tuple[Natural, ...] = option(
        (), "Indices (from 0) of layers that attend to the whole image despite window_size; default: no layer."
    )
    deepstack_layers: tuple[Natural, ...] = option(
        (),
        "Indices (from 0) of vision layers whose projected features are added after the first language layers "
        "(Qwen3-VL's DeepStack); default: no layer.",
    )
    merger_layer: Natural | None = option(
        None,
        "Index (from 0) of the vision layer after which each 2×2 neighbouring patches become one, by attention among "
        "them and an MLP (MiniCPM-V 4.6); default: no layer.",
    )


@dataclass(frozen=True)
class AudioConfig:
    """A Whisper encoder with attention in chunks: two convolutions, layers, a mean over pairs (Qwen2.5-Omni).

    With `conv_channels`: three convolutions, layers, an MLP (Qwen3-Omni).
    """

    num_layers: int = option(0, "Layers of the audio encoder; 0: none.", valid=TOWER)
    hidden_size: Count = option(128, "Hidden size of the audio encoder, even.", needs=AUDIO)
    ffn_hidden_size: Count = option(256, "Inner width of the audio encoder's MLP.", needs=AUDIO)
    num_attention_heads: Count = option(8, "Heads; padded with zeros for TP.", needs=AUDIO)
    mel_bins: Count = option(128, "Mel frequencies; 100 frames a second.", needs=AUDIO)
    chunk_frames: Count = option(
        200, "Mel frames per chunk, even; convolutions, positions and attention stay within a chunk.", needs=AUDIO
    )
    conv_channels: Count | None = option(
        None,
        "Channels of three convolutions over time and frequencies, which turn eight frames into a feature "
        "(Qwen3-Omni); default: two over time, and features of two positions.",
        needs=AUDIO,
    )
    window_chunks: Count = option(1, "Chunks per attention window.", needs=AUDIO)
