"""Rules about the model. `rules.py` defines what a rule is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megavlm.config.derived import masks_attention, rotary_channels
from megavlm.config.lora import adapted_parts, adapts_experts, frozen_parts, never_run, unmatched
from megavlm.config.messages import divisors, nearest
from megavlm.config.option import data_kind
from megavlm.config.registry import registered
from megavlm.config.schema import Config
from megavlm.rules.defaults import is_set, resolve_model
from megavlm.rules.expert_rules import EXPERT_MODEL_RULES


def vision_heads_divide_hidden(config: Config) -> str | None:
    vision = config.model.vision
    if vision.hidden_size % vision.num_attention_heads:
        return (
            f"model.vision.hidden_size {vision.hidden_size} is not divisible by model.vision.num_attention_heads "
            f"{vision.num_attention_heads}: {nearest(vision.hidden_size, vision.num_attention_heads)}"
        )
    return None


def vision_rotary_pairs(config: Config) -> str | None:
    """2-D rotary embedding rotates pairs of channels, half by row and half by column: 4 must divide the head width."""
    vision = config.model.vision
    head = vision.hidden_size // vision.num_attention_heads
    if vision.position_embedding != "learned" and head % 4:
        return (
            f"model.vision.position_embedding {vision.position_embedding} needs a head width divisible by 4, but "
            f"model.vision.hidden_size {vision.hidden_size} / model.vision.num_attention_heads "
            f"{vision.num_attention_heads} is {head}: change either, or use learned"
        )
    return None


def language_heads_divide_hidden(config: Config) -> str | None:
    language = config.model.language
    if not is_set(language, "kv_channels") and language.hidden_size % language.num_attention_heads:
        return (
            f"model.language.hidden_size {language.hidden_size} is not divisible by model.language.num_attention_heads "
            f"{language.num_attention_heads}: change either, or set model.language.kv_channels"
        )
    return None


def language_rotary_pairs(config: Config) -> str | None:
    """Rotary embedding rotates pairs of channels, so that the number of channels that rotate must be even."""
    language = config.model.language
    channels = rotary_channels(resolve_model(config.model).language)
    if language.rotary_percent < 1 and (channels % 2 or not channels):
        return (
            f"model.language.rotary_percent {language.rotary_percent} rotates {channels} channels of a head, and "
            "rotary embedding needs pairs: set another share"
        )
    if is_set(language, "kv_channels") and language.kv_channels % 2:
        return f"model.language.kv_channels {language.kv_channels} must be even for rotary embedding: add or subtract 1"
    if not is_set(language, "kv_channels") and (head := language.hidden_size // language.num_attention_heads) % 2:
        return (
            f"model.language.hidden_size {language.hidden_size} / model.language.num_attention_heads "
            f"{language.num_attention_heads} is {head}, and rotary embedding needs an even head width: change either, "
            f"or set model.language.kv_channels"
        )
    return None


def rope_scaling_has_a_middle(config: Config) -> str | None:
    language = config.model.language
    if language.rope_scaling == "llama3" and language.rope_high_freq_factor <= language.rope_low_freq_factor:
        return (
            f"model.language.rope_high_freq_factor {language.rope_high_freq_factor} must be above "
            f"model.language.rope_low_freq_factor {language.rope_low_freq_factor}: raise it (Llama 3.1 has 4 and 1)"
        )
    if language.rope_scaling == "yarn" and language.rope_beta_fast <= language.rope_beta_slow:
        return (
            f"model.language.rope_beta_fast {language.rope_beta_fast} must be above model.language.rope_beta_slow "
            f"{language.rope_beta_slow}: raise it (YaRN has 32 and 1)"
        )
    return None


def sequence_is_not_too_long(config: Config) -> str | None:
    language = config.model.language
    longest = language.max_positions
    if longest is None or config.train.seq_length <= longest:
        return None
    remedy = "add --set model.language.max_positions=null"
    # A folder decides the limit, and the programs that read an exported model take it from the same config.json.
    if folder := config.checkpoint.init_from or config.checkpoint.language_from:
        # A window of full attention is a limit (families/shared/language.py); Gemma's belongs to the model.
        window = " (and sliding_window, if it is less)" if language.window_size is None else ""
        remedy = f"raise max_position_embeddings{window} in {folder}/config.json"
        if language.rope_scaling == "yarn" and longest == language.rope_original_positions:
            remedy += " (but not where llama_4_scaling_beta is set: how queries are scaled beyond is not known here)"
    return (
        f"--seq-length {config.train.seq_length} is longer than the {longest} positions that the language model "
        f"supports: lower it, or {remedy} to extrapolate"
    )


def mrope_sections_fill_the_head(config: Config) -> str | None:
    """The three M-RoPE sections must cover all channel pairs of a head."""
    language = config.model.language
    sections = language.mrope_section
    if language.mrope_interleaved and not sections:
        return (
            "model.language.mrope_interleaved sets the order of M-RoPE sections: add --set "
            "model.language.mrope_section=[T,H,W]"
        )
    pairs = rotary_channels(resolve_model(config.model).language) // 2
    if sections and (len(sections) != 3 or sum(sections) != pairs):
        return (
            f"model.language.mrope_section {' '.join(map(str, sections))} must be three numbers (time, height, width) "
            f"that add up to {pairs}, the channel pairs of a language head that rotate"
        )
    return None


def query_groups_divide_heads(config: Config) -> str | None:
    language = config.model.language
    if is_set(language, "num_query_groups") and language.num_attention_heads % language.num_query_groups:
        return (
            f"model.language.num_query_groups {language.num_query_groups} must divide "
            f"model.language.num_attention_heads {language.num_attention_heads}: use "
            f"{divisors(language.num_attention_heads)}"
        )
    return None


def feature_layer_exists(config: Config) -> str | None:
    vision = config.model.vision
    if not -vision.num_layers <= vision.feature_layer <= -1:
        return (
            f"model.vision.feature_layer {vision.feature_layer} must be between -1 (the last layer) and "
            f"{-vision.num_layers} (the first of model.vision.num_layers {vision.num_layers})"
        )
    return None


def windows_hold_features(config: Config) -> str | None:
    """A window holds at least one feature (a block of merged patches) and no class token."""
    vision, shuffle = config.model.vision, config.model.projector.pixel_shuffle
    if vision.window_size is None:
        if vision.full_attention_layers:
            return (
                "model.vision.full_attention_layers are exceptions from windowed attention: add --set "
                "model.vision.window_size=N"
            )
        return None
    if vision.window_size < vision.patch_size * shuffle:
        return (
            f"model.vision.window_size {vision.window_size} is smaller than a feature: set it to at least "
            f"model.vision.patch_size {vision.patch_size} × model.projector.pixel_shuffle {shuffle}"
        )
    if vision.class_token:
        return "model.vision.window_size and model.vision.class_token cannot be combined: a class token is in no window"
    return None


def deepstack_layers_exist(config: Config) -> str | None:
    """The features of the j-th DeepStack layer are added after language layer j."""
    vision, language = config.model.vision, config.model.language
    layers, last = vision.deepstack_layers, vision.num_layers + vision.feature_layer
    shown = f"model.vision.deepstack_layers {' '.join(map(str, layers))}"
    if list(layers) != sorted(set(layers)):
        return f"{shown} must be in ascending order: list each layer once"
    if layers and layers[-1] > last:
        return (
            f"{shown} must be layers that run, 0 to {last}: see model.vision.num_layers and model.vision.feature_layer"
        )
    if len(layers) > language.num_layers:
        return f"{shown} are more than model.language.num_layers {language.num_layers}: list fewer"
    return None


def patches_tile_images(config: Config) -> str | None:
    vision, shuffle = config.model.vision, config.model.projector.pixel_shuffle
    sides = [("model.vision.image_size", vision.image_size)]
    if data_kind(config) == "synthetic":
        sides += [("--image-sizes", side) for side in config.data.image_sizes]
    for flag, side in sides:
        count, remedy = side // vision.patch_size, nearest(side, vision.patch_size * shuffle)
        if side % vision.patch_size:
            return f"{flag} {side} is not a multiple of model.vision.patch_size {vision.patch_size}: {remedy}"
        if count % shuffle:
            return (
                f"{flag} {side} is {count} patches of model.vision.patch_size {vision.patch_size} a side, which "
                f"model.projector.pixel_shuffle {shuffle} does not divide: {remedy}"
            )
    return None


def full_attention_layers_exist(config: Config) -> str | None:
    layers, last = config.model.language.full_attention_layers, config.model.language.num_layers - 1
    if layers and max(layers) > last:
        shown = " ".join(map(str, layers))
        return f"model.language.full_attention_layers {shown} must be layers that exist, 0 to {last}: name those alone"
    return None


def masks_are_expressible(config: Config) -> str | None:
    """A sliding window and images that attend both ways need masks, which depend on a micro-batch's images."""
    language = config.model.language
    flag = "model.language.bidirectional_images" if language.bidirectional_images else "model.language.window_size"
    if not masks_attention(language):
        return None
    if language.bidirectional_images and data_kind(config) == "digits":
        return f"{flag} and --data digits, which has an image token of its own, cannot be combined: leave one out"
    if language.bidirectional_images and config.model.image_token is None:
        return f"{flag} knows images by their token: add --image-token"
    return None


def tiled_images_are_expressible(config: Config) -> str | None:
    """Features of tiled images are rearranged after the projector; options that use their order are excluded."""
    model, data = config.model, config.data
    if model.projector.anyres_max_tiles is None:
        return None
    if model.vision.deepstack_layers:
        return (
            "model.projector.anyres_max_tiles and model.vision.deepstack_layers cannot be combined: leave one of them "
            "out"
        )
    if model.language.mrope_section:
        return (
            "model.projector.anyres_max_tiles and model.language.mrope_section cannot be combined: leave one of them "
            "out"
        )
    if data_kind(config) == "digits":
        return "--data digits has no tiled images: leave model.projector.anyres_max_tiles out, or use --data synthetic"
    for side in data.image_sizes:
        if side % model.vision.image_size:
            return (
                f"--image-sizes {side} is not a multiple of model.vision.image_size {model.vision.image_size}, "
                f"which model.projector.anyres_max_tiles needs: {nearest(side, model.vision.image_size)}"
            )
    return None


def connector_takes_the_model(config: Config) -> str | None:
    """Features that do not lie as in the image have no tiles, no rows and columns for M-RoPE, and no DeepStack; what
    else a connector needs, it says.
    """
    model = resolve_model(config.model)
    connector: Any = registered("connectors")[model.projector.kind]
    flag = f"--projector-kind {connector.name}"
    if not connector.keeps_grid and model.vision.deepstack_layers:
        return f"{flag} and model.vision.deepstack_layers cannot be combined: leave one of them out"
    if not connector.keeps_grid and model.language.mrope_section:
        return (
            f"{flag} and model.language.mrope_section cannot be combined, as its features have no rows: leave one out"
        )
    return next(iter(connector.problems(replace(config, model=model))), None)


def lora_targets_exist(config: Config) -> str | None:
    if not config.lora.rank:
        return None
    if not config.lora.targets:
        return "--lora-targets is empty: name layers, for example --lora-targets language, or set --lora-rank 0"
    if missing := unmatched(config):
        if "," in missing[0]:
            return f"--lora-targets {missing[0]} is one name: write spaces between names"
        return (
            f"--lora-targets {missing[0]} matches no linear layer: try language, vision, q_proj or "
            "language.layers.*.q_proj"
        )
    if idle := never_run(config):
        vision = config.model.vision
        return (
            f"--lora-targets {idle[0]} matches only vision layers that never run, because model.vision.feature_layer "
            f"{vision.feature_layer} uses the output of layer {vision.num_layers + vision.feature_layer}: name layers "
            "up to that one"
        )
    return None


def adapters_of_experts_have_no_dropout(config: Config) -> str | None:
    """PEFT adds B·A to the weights of all experts, of which no single input can be left out."""
    if config.lora.dropout and adapts_experts(config):
        return (
            f"--lora-dropout {config.lora.dropout} cannot be combined with adapters of routed experts, for which PEFT "
            "has none: set it to 0, or remove experts from --lora-targets"
        )
    return None


def adapters_are_not_frozen(config: Config) -> str | None:
    for part in adapted_parts(config):
        if part in frozen_parts(config):
            return (
                f"--freeze {part} would freeze its adapters (--lora-targets {' '.join(config.lora.targets)}) as well: "
                f"remove {part} from --freeze; adapters freeze the other weights anyway"
            )
    return None


def something_trains(config: Config) -> str | None:
    if {"vision", "projector", "language"} <= {*frozen_parts(config)}:
        return "--freeze vision projector language leaves nothing to train: remove one of them"
    return None


MODEL_RULES: tuple[Callable[[Config], str | None], ...] = (
    vision_heads_divide_hidden,
    vision_rotary_pairs,
    language_heads_divide_hidden,
    language_rotary_pairs,
    rope_scaling_has_a_middle,
    sequence_is_not_too_long,
    mrope_sections_fill_the_head,
    query_groups_divide_heads,
    feature_layer_exists,
    windows_hold_features,
    deepstack_layers_exist,
    patches_tile_images,
    full_attention_layers_exist,
    masks_are_expressible,
    tiled_images_are_expressible,
    connector_takes_the_model,
    *EXPERT_MODEL_RULES,
    lora_targets_exist,
    adapters_of_experts_have_no_dropout,
    adapters_are_not_frozen,
    something_trains,
)
