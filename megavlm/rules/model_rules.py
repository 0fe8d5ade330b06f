"""Rules about the model: sizes that must match, and combinations that are not supported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megavlm.arch.connector import connector_of
from megavlm.arch.objectives import objective_of
from megavlm.config.derived import has_vision, is_latent, needs_eager_attention, rotary_channels, tower_merge
from megavlm.config.lora_config import clipped_parts, trained_whole
from megavlm.config.messages import indivisible, nearest, no_divisor
from megavlm.config.option import data_kind
from megavlm.config.schema import Config
from megavlm.rules import Rule
from megavlm.rules.defaults import is_set, resolve_model
from megavlm.rules.expert_rules import router


def vision_tower(config: Config) -> Iterator[str]:
    """Check the vision encoder. 2-D rotary embedding rotates pairs of channels, half by row and half by column: 4 must
    divide the head width. A window holds at least one feature and no class token. The j-th DeepStack layer adds to
    language layer j.
    """
    vision, shuffle = config.model.vision, config.model.projector.pixel_shuffle
    hidden, heads, layers = vision.hidden_size, vision.num_attention_heads, vision.num_layers
    if not has_vision(config.model):
        return
    for name, there in (
        ("num_layers", layers > 0),
        ("temporal_patch_size", vision.temporal_patch_size > 1),
        ("window_size", vision.window_size is not None),
        ("class_token", vision.class_token),
    ):
        if vision.encoder_free and there:
            yield f"model.vision.encoder_free and model.vision.{name} cannot be combined: leave one of them out"
    if hidden % heads:
        yield indivisible("model.vision.hidden_size", hidden, "model.vision.num_attention_heads", heads)
    groups = vision.num_query_groups or heads
    if heads % groups:
        whole = f"model.vision.num_attention_heads {heads}"
        yield no_divisor("model.vision.num_query_groups", groups, whole, heads)
    if vision.qk_norm == "full" and groups != heads:
        yield (
            f"model.vision.qk_norm full and model.vision.num_query_groups {groups} cannot be combined, as its norm is "
            "of as many keys as queries: set qk_norm to head, or leave num_query_groups out"
        )
    if vision.position_embedding != "learned" and (head := hidden // heads) % 4:
        yield (
            f"model.vision.position_embedding {vision.position_embedding} needs a head width divisible by 4, but "
            f"model.vision.hidden_size {hidden} / model.vision.num_attention_heads {heads} is {head}: change either, "
            "or use learned"
        )
    if vision.rotary_neighbours and (vision.rotary_interleaved or vision.position_embedding == "learned"):
        yield (
            "model.vision.rotary_neighbours goes with 2-D rotary embedding, and not with model.vision."
            "rotary_interleaved: leave it out"
        )
    if not -max(layers, 1) <= vision.feature_layer <= -1:
        yield (
            f"model.vision.feature_layer {vision.feature_layer} must be between -1 (the last layer) and {-layers} (the "
            f"first of model.vision.num_layers {layers})"
        )
    if vision.window_size is not None and vision.window_size < vision.patch_size * shuffle:
        yield (
            f"model.vision.window_size {vision.window_size} is smaller than a feature: set it to at least "
            f"model.vision.patch_size {vision.patch_size} × model.projector.pixel_shuffle {shuffle}"
        )
    if vision.window_size is not None and vision.class_token:
        yield "model.vision.window_size and model.vision.class_token cannot be combined: a class token is in no window"
    if vision.position_embedding == "axes_rope2d" and vision.image_size // vision.patch_size > vision.axis_positions:
        yield (
            f"model.vision.image_size {vision.image_size} has more patches a side than model.vision.axis_positions "
            f"{vision.axis_positions}: raise axis_positions"
        )
    for name in ("class_token", "rotary_interleaved", "rotary_neighbours"):
        if vision.position_embedding == "axes_rope2d" and getattr(vision, name):
            yield f"model.vision.position_embedding axes_rope2d and {name} cannot be combined: leave {name} out"
    if vision.layer_scale and vision.post_norms:
        yield "model.vision.layer_scale and model.vision.post_norms cannot be combined: leave one of them out"
    option = f"model.vision.deepstack_layers {_listed(vision.deepstack_layers)}"
    last, count = layers + vision.feature_layer, config.model.language.num_layers
    if list(vision.deepstack_layers) != sorted(set(vision.deepstack_layers)):
        yield f"{option} must be in ascending order: list each layer once"
    if vision.deepstack_layers and vision.deepstack_layers[-1] > last:
        yield (
            f"{option} must be layers that run, 0 to {last}: see model.vision.num_layers and model.vision.feature_layer"
        )
    if len(vision.deepstack_layers) > count:
        yield f"{option} are more than model.language.num_layers {count}: list fewer"


def vision_merger(config: Config) -> Iterator[str]:
    """Check the vision encoder's merger. It supports only patches with learned positions, without windows, class token
    and DeepStack; the projector merges its output further.
    """
    vision, shuffle = config.model.vision, config.model.projector.pixel_shuffle
    if not has_vision(config.model) or vision.merger_layer is None:
        return
    option, last = f"model.vision.merger_layer {vision.merger_layer}", vision.num_layers + vision.feature_layer
    if vision.merger_layer > last:
        yield f"{option} must be a layer that runs, 0 to {last}: see model.vision.num_layers"
    if shuffle % tower_merge(vision):
        yield f"{option} merges 2×2 patches: model.projector.pixel_shuffle {shuffle} is odd: set it to {shuffle + 1}"
    for name, given in (
        ("vision.window_size", vision.window_size is not None),
        ("vision.class_token", vision.class_token),
        ("vision.deepstack_layers", vision.deepstack_layers),
        ("vision.position_embedding", vision.position_embedding != "learned"),
        ("vision.num_query_groups", vision.num_query_groups not in (None, vision.num_attention_heads)),
        ("vision.qk_norm", vision.qk_norm != "none"),
        ("vision.layer_scale", vision.layer_scale),
        ("vision.post_norms", vision.post_norms),
        ("projector.anyres_max_tiles", config.model.projector.anyres_max_tiles is not None),
    ):
        if given:
            yield f"{option} and model.{name} cannot be combined: leave one of them out"


def language_model(config: Config) -> Iterator[str]:
    """Check the language model. Rotary embedding rotates pairs of channels, so that an even number of them must rotate;
    the three sections of M-RoPE must add up to these pairs.
    """
    language = config.model.language
    hidden, heads = language.hidden_size, language.num_attention_heads
    sizes = f"model.language.hidden_size {hidden} / model.language.num_attention_heads {heads}"
    given = is_set(language, "kv_channels")
    if not given and hidden % heads:
        yield (
            f"model.language.hidden_size {hidden} is not divisible by model.language.num_attention_heads {heads}: "
            "change either, or set model.language.kv_channels"
        )
    channels = rotary_channels(resolve_model(config.model).language)
    if language.rotary_percent < 1 and (channels % 2 or not channels):
        yield (
            f"model.language.rotary_percent {language.rotary_percent} rotates {channels} channels of a head, and "
            "rotary embedding needs pairs: set another share"
        )
    if given and language.kv_channels % 2:
        yield f"model.language.kv_channels {language.kv_channels} must be even for rotary embedding: add or subtract 1"
    if not given and (head := hidden // heads) % 2:
        yield (
            f"{sizes} is {head}, and rotary embedding needs an even head width: change either, or set "
            "model.language.kv_channels"
        )
    for scaling, high, low, known in (
        ("llama3", "rope_high_freq_factor", "rope_low_freq_factor", "Llama 3.1 has 4 and 1"),
        ("yarn", "rope_beta_fast", "rope_beta_slow", "YaRN has 32 and 1"),
    ):
        above, below = getattr(language, high), getattr(language, low)
        if language.rope_scaling == scaling and above <= below:
            yield f"model.language.{high} {above} must be above model.language.{low} {below}: raise it ({known})"
    sections = language.mrope_section
    if sections and (len(sections) != 3 or sum(sections) != channels // 2):
        yield (
            f"model.language.mrope_section {_listed(sections)} must be three numbers (time, height, width) that add up "
            f"to {channels // 2}, the channel pairs of a language head that rotate"
        )
    whole = f"model.language.num_attention_heads {heads}"
    for name in ("num_query_groups", "global_query_groups"):
        if is_set(language, name) and heads % getattr(language, name):
            yield no_divisor(f"model.language.{name}", getattr(language, name), whole, heads)
    if (wide := language.global_kv_channels) is not None and wide % 2:
        yield f"model.language.global_kv_channels {wide} must be even for rotary embedding: add or subtract 1"
    if language.layer_scalar and language.parallel_block:
        yield "model.language.layer_scalar and model.language.parallel_block cannot be combined: leave one of them out"
    option = f"model.language.{'attention_sinks' if language.attention_sinks else 'attention_softcap'}"
    if needs_eager_attention(language) and config.model.attention_dropout:
        yield f"{option} and --attention-dropout cannot be combined: set one of them to its default"
    if needs_eager_attention(language) and "language" in clipped_parts(config):
        yield f"{option} and --qk-clip, which bounds scores too, cannot be combined: leave one of them out"
    values, keys = language.linear_num_value_heads, language.linear_num_key_heads
    if language.linear_attention_layers and values % keys:
        whole = f"model.language.linear_num_value_heads {values}"
        yield no_divisor("model.language.linear_num_key_heads", keys, whole, values)


def latent_attention(config: Config) -> Iterator[str]:
    """Check multi-head latent attention: each head has its own key and value, part of the key rotates, and options of
    other kinds of attention are not supported.
    """
    language = config.model.language
    if not is_latent(language):
        return
    option, turning = f"model.language.kv_lora_rank {language.kv_lora_rank}", language.qk_pos_emb_head_dim
    width = resolve_model(config.model).language.kv_channels
    if turning % 2 or turning >= width:
        yield (
            f"model.language.qk_pos_emb_head_dim {turning} must be even and less than model.language.kv_channels "
            f"{width}, the width of a query: set another"
        )
    if is_set(language, "num_query_groups") and language.num_query_groups != language.num_attention_heads:
        heads = language.num_attention_heads
        yield f"{option} gives each head a key of its own: set model.language.num_query_groups to {heads}"
    for name, given in (
        ("linear_attention_layers", language.linear_attention_layers),
        ("qk_norm", language.qk_norm),
        ("add_qkv_bias", language.add_qkv_bias),
        ("add_proj_bias", language.add_proj_bias),
        ("attention_sinks", language.attention_sinks),
        ("attention_output_gate", language.attention_output_gate),
        ("rotary_percent", language.rotary_percent < 1),
        ("input_norms=false", not language.input_norms),
        ("local_rotary_base", language.local_rotary_base is not None),
        ("parallel_block", language.parallel_block),
        ("global_kv_channels", language.global_kv_channels is not None),
        ("global_query_groups", language.global_query_groups is not None),
        ("keys_as_values", language.keys_as_values),
        ("value_norm", language.value_norm),
    ):
        if given:
            yield f"{option} and model.language.{name} cannot be combined: leave one of them out"


def further_tokens(config: Config) -> Iterator[str]:
    """Check multi-token prediction: its layers are trained only if the language model is trained whole, and only
    folders of whole models have their weights.
    """
    option = f"model.language.mtp_layers {config.model.language.mtp_layers}"
    if not config.model.language.mtp_layers:
        return
    if objective_of(config.model).embeds:
        yield f"{option} predicts tokens, and --objective {config.model.objective.kind} embeds texts: set it to 0"
    if "language" not in trained_whole(config):
        yield (
            f"{option} is trained with the whole language model, which this run freezes or adapts by LoRA: set it to 0 "
            "(layers of a given folder are then exported as they came), or train the language model"
        )
    for both_ways in ("bidirectional_images", "bidirectional_windows", "bidirectional_prefix"):
        if getattr(config.model.language, both_ways):
            yield (
                f"{option} reads later tokens, which model.language.{both_ways} would show to those that predict them: "
                "set it to 0"
            )
    if config.checkpoint.language_from is not None:
        yield f"{option} and --language-from cannot be combined: use --init-from, or set it to 0"


def sequence_is_not_too_long(config: Config) -> Iterator[str]:
    language = config.model.language
    longest = language.max_positions
    if longest is None or config.train.seq_length <= longest:
        return
    remedy = "add --set model.language.max_positions=null"
    # A folder decides the limit, and the programs that read an exported model take it from the same config.json.
    if folder := config.checkpoint.init_from or config.checkpoint.language_from:
        # A window of full attention is a limit (families/shared/language.py); Gemma's belongs to the model.
        window = " (and sliding_window, if it is less)" if language.window_size is None else ""
        remedy = f"raise max_position_embeddings{window} in {folder}/config.json"
    yield (
        f"--seq-length {config.train.seq_length} is longer than the {longest} positions that the language model "
        f"supports: lower it, or {remedy} to extrapolate"
    )


def images(config: Config) -> Iterator[str]:
    """Check image sizes: patches must tile images. Tiled images (anyres) exclude features that depend on the order of
    vision features, which is changed after the projector. Images with bidirectional attention need masks, which are
    built from image tokens.
    """
    model, vision, kind = config.model, config.model.vision, data_kind(config)
    if not has_vision(model):
        return
    shuffle, patch = model.projector.pixel_shuffle, vision.patch_size
    drawn = config.data.image_sizes if kind == "synthetic" else ()
    for flag, side in (("model.vision.image_size", vision.image_size), *(("--image-sizes", side) for side in drawn)):
        remedy = nearest(side, patch * shuffle)
        if side % patch:
            yield f"{flag} {side} is not a multiple of model.vision.patch_size {patch}: {remedy}"
        if side // patch % shuffle and (side != vision.image_size or vision.position_interpolation != "fraction"):
            yield (
                f"{flag} {side} is {side // patch} patches of model.vision.patch_size {patch} a side, which "
                f"model.projector.pixel_shuffle {shuffle} does not divide: {remedy}"
            )
    for name in ("bidirectional_images", "bidirectional_windows"):
        option, given = f"model.language.{name}", getattr(model.language, name)
        if given and kind == "digits":
            yield (
                f"{option} and --data digits, which has an image token of its own, cannot be combined: add --set "
                f"{option}=false"
            )
        if given and model.image_token is None:
            yield f"{option} knows images by their token: add --image-token"
    if model.projector.anyres_max_tiles is None:
        return
    for name, given in (("vision.deepstack_layers", vision.deepstack_layers), _mrope(config)):
        if given:
            yield f"model.projector.anyres_max_tiles and model.{name} cannot be combined: leave one of them out"
    if kind == "digits":
        yield "--data digits has no tiled images: leave model.projector.anyres_max_tiles out, or use --data synthetic"
    for side in config.data.image_sizes:
        if side % vision.image_size:
            problem = indivisible("--image-sizes", side, "model.vision.image_size", vision.image_size)
            yield f"{problem}, or leave model.projector.anyres_max_tiles out"


def sounds(config: Config) -> Iterator[str]:
    """Check the audio encoder, whose features are merged at tokens of their own, within the pipeline."""
    model, audio = config.model, config.model.audio
    if not audio.num_layers:
        return
    option = f"model.audio.num_layers {audio.num_layers}"
    if audio.hidden_size % audio.num_attention_heads:
        heads = audio.num_attention_heads
        yield indivisible("model.audio.hidden_size", audio.hidden_size, "model.audio.num_attention_heads", heads)
    for name, size in (("hidden_size", audio.hidden_size), ("chunk_frames", audio.chunk_frames)):
        if size % 2:
            yield f"model.audio.{name} {size} is odd: set it to {size + 1}"
    if model.audio_token is None or model.audio_token in (model.image_token, model.video_token):
        yield f"{option} needs a token of its own for the features of sounds: set model.audio_token"
    if not has_vision(model):
        yield f"{option} needs a vision encoder, too: set model.vision.num_layers"
    for name, given in (
        (f"--objective {model.objective.kind}", model.objective.kind != "next-token"),
        ("--qk-clip", not {"vision", "audio"}.isdisjoint(clipped_parts(config))),
    ):
        if given:
            yield f"{option} and {name} cannot be combined yet: leave one of them out"


def connector_takes_the_model(config: Config) -> Iterator[str]:
    """Check that the connector supports the model: M-RoPE, DeepStack and the merger need features in a grid."""
    model = resolve_model(config.model)
    if not has_vision(model):
        return
    connector = connector_of(model.projector)
    merger = ("vision.merger_layer", model.vision.merger_layer is not None)
    for name, given in (("vision.deepstack_layers", model.vision.deepstack_layers), merger, _mrope(config)):
        if given and not connector.keeps_grid:
            yield (
                f"--projector-kind {connector.name} and model.{name} cannot be combined, as its features have no rows: "
                "leave one of them out"
            )
    yield from connector.problems(replace(config, model=model))


def _mrope(config: Config) -> tuple[str, object]:
    return "language.mrope_section", config.model.language.mrope_section


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


MODEL_RULES: tuple[Rule, ...] = (
    vision_tower,
    vision_merger,
    language_model,
    latent_attention,
    further_tokens,
    sequence_is_not_too_long,
    images,
    sounds,
    connector_takes_the_model,
    router,
)
