"""Rules about the model on its own. `rules.py` says what a rule is."""

from __future__ import annotations

from collections.abc import Callable

from megavlm.config.schema import Config
from megavlm.config.words import divisors, nearest


def vision_heads_divide_hidden(config: Config) -> str | None:
    vision = config.model.vision
    if vision.hidden_size % vision.num_attention_heads:
        return (
            f"--vision-hidden-size {vision.hidden_size} is not divisible by --vision-num-attention-heads "
            f"{vision.num_attention_heads}: {nearest(vision.hidden_size, vision.num_attention_heads)}"
        )
    return None


def vision_rotary_pairs(config: Config) -> str | None:
    """2-D rotary positions turn pairs of channels, half of them by row and half by column: 4 divides the head."""
    vision = config.model.vision
    head = vision.hidden_size // vision.num_attention_heads
    if vision.position_embedding == "rope2d" and head % 4:
        return (
            f"--vision-position-embedding rope2d needs a head width divisible by 4, but --vision-hidden-size "
            f"{vision.hidden_size} / --vision-num-attention-heads {vision.num_attention_heads} is {head}: change "
            f"either, or use learned"
        )
    return None


def language_heads_divide_hidden(config: Config) -> str | None:
    language = config.model.language
    if language.kv_channels is None and language.hidden_size % language.num_attention_heads:
        return (
            f"--language-hidden-size {language.hidden_size} is not divisible by --language-num-attention-heads "
            f"{language.num_attention_heads}: change either, or set --language-kv-channels"
        )
    return None


def language_rotary_pairs(config: Config) -> str | None:
    """Rotary positions turn pairs of channels."""
    language = config.model.language
    if language.kv_channels is not None and language.kv_channels % 2:
        return f"--language-kv-channels {language.kv_channels} must be even for rotary positions: add or take 1"
    if language.kv_channels is None and (head := language.hidden_size // language.num_attention_heads) % 2:
        return (
            f"--language-hidden-size {language.hidden_size} / --language-num-attention-heads "
            f"{language.num_attention_heads} is {head}, and rotary positions need an even head width: change either, "
            f"or set --language-kv-channels"
        )
    return None


def rope_scaling_has_a_middle(config: Config) -> str | None:
    language = config.model.language
    if language.rope_scaling == "llama3" and language.rope_high_freq_factor <= language.rope_low_freq_factor:
        return (
            f"--language-rope-high-freq-factor {language.rope_high_freq_factor} must be above "
            f"--language-rope-low-freq-factor {language.rope_low_freq_factor}: raise it (Llama 3.1 has 4 and 1)"
        )
    return None


def sequence_is_not_too_long(config: Config) -> str | None:
    longest = config.model.language.max_positions
    if longest is not None and config.train.seq_length > longest:
        return (
            f"--seq-length {config.train.seq_length} is longer than the {longest} positions that the language model is "
            "made for: lower it, or set --language-max-positions none to extrapolate"
        )
    return None


def query_groups_divide_heads(config: Config) -> str | None:
    language = config.model.language
    if language.num_query_groups is not None and language.num_attention_heads % language.num_query_groups:
        return (
            f"--language-num-query-groups {language.num_query_groups} must divide --language-num-attention-heads "
            f"{language.num_attention_heads}: use {divisors(language.num_attention_heads)}"
        )
    return None


def feature_layer_exists(config: Config) -> str | None:
    vision = config.model.vision
    if not -vision.num_layers <= vision.feature_layer <= -1:
        return (
            f"--vision-feature-layer {vision.feature_layer} must be between -1 (the last layer) and "
            f"{-vision.num_layers} (the first of --vision-num-layers {vision.num_layers})"
        )
    return None


def patches_tile_images(config: Config) -> str | None:
    vision, shuffle = config.model.vision, config.model.projector.pixel_shuffle
    sides = [("--vision-image-size", vision.image_size)]
    if config.data.source == "synthetic":
        sides += [("--image-sizes", side) for side in config.data.image_sizes]
    for flag, side in sides:
        count, remedy = side // vision.patch_size, nearest(side, vision.patch_size * shuffle)
        if side % vision.patch_size:
            return f"{flag} {side} is not a multiple of --vision-patch-size {vision.patch_size}: {remedy}"
        if count % shuffle:
            return (
                f"{flag} {side} is {count} patches of --vision-patch-size {vision.patch_size} a side, which "
                f"--projector-pixel-shuffle {shuffle} does not divide: {remedy}"
            )
    return None


def something_trains(config: Config) -> str | None:
    if {"vision", "projector", "language"} <= set(config.model.freeze):
        return "--freeze vision projector language leaves nothing to train: take one of them out"
    return None


MODEL_RULES: tuple[Callable[[Config], str | None], ...] = (
    vision_heads_divide_hidden,
    vision_rotary_pairs,
    language_heads_divide_hidden,
    language_rotary_pairs,
    rope_scaling_has_a_middle,
    sequence_is_not_too_long,
    query_groups_divide_heads,
    feature_layer_exists,
    patches_tile_images,
    something_trains,
)
