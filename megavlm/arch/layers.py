"""The model as a list of named layers, in the order of the forward pass. Names do not depend on the layout.

A name is its kind, followed by a number where the kind is numbered: `vision.layers.` and `vision.layers.3`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from megavlm.config.derived import audio_tower, has_vision, layer_precision
from megavlm.config.lora_config import (
    ROUTED_EXPERTS,
    adapted_parts,
    frozen_parts,
    is_target,
    linears_of,
    trains_router,
)
from megavlm.config.schema import Config, ModelConfig, VisionConfig

AUDIO_EMBED = "audio_embed"
AUDIO_LAYER = "audio.layers."
AUDIO_PROJECTOR = "audio.projector"
PATCH_EMBED = "patch_embed"
VISION_NORM = "vision.norm"
PROJECTOR = "projector"
EMBEDDING = "embedding"
LANGUAGE_NORM = "language.norm"
OUTPUT = "output"
VISION_LAYER = "vision.layers."
VISION_MERGER = "vision.merger"
DEEPSTACK = "deepstack."
LANGUAGE_LAYER = "language.layers."
# The k-th pair around language layer num_layers + k, which predicts the token k + 2 positions ahead.
MTP_INPUT = "language.mtp."
MTP_NORM = "language.mtp_norm."

# The part of the model that each kind of layer belongs to; "vision" is all encoders.
PART_OF_KIND = {
    AUDIO_EMBED: "vision",
    AUDIO_LAYER: "vision",
    AUDIO_PROJECTOR: "projector",
    PATCH_EMBED: "vision",
    VISION_LAYER: "vision",
    VISION_MERGER: "vision",
    DEEPSTACK: "projector",
    VISION_NORM: "vision",
    PROJECTOR: "projector",
    EMBEDDING: "language",
    LANGUAGE_LAYER: "language",
    LANGUAGE_NORM: "language",
    MTP_INPUT: "language",
    MTP_NORM: "language",
    OUTPUT: "language",
}
TRANSFORMER_LAYERS = (AUDIO_LAYER, VISION_LAYER, LANGUAGE_LAYER)  # those that can have adapters
_OF_AUDIO = (AUDIO_EMBED, AUDIO_LAYER, AUDIO_PROJECTOR)
_CARRIED = {DEEPSTACK: 1, LANGUAGE_LAYER: -1}  # by how many DeepStack features a layer changes the carried ones
_NAME = re.compile("|".join(rf"({re.escape(kind)})" + r"(\d+)" * kind.endswith(".") for kind in PART_OF_KIND))


@lru_cache(maxsize=65536)
def split_name(key: str) -> tuple[str, int]:
    """Return a layer's kind and number (0 if it has none), from its name or that of one of its parameters."""
    match = _NAME.match(key)
    assert match is not None, f"{key} belongs to no layer"
    kind, *number = (group for group in match.groups() if group is not None)
    return kind, int(number[0]) if number else 0


def kind_of(key: str) -> str:
    """Return the kind of a layer, from its name or that of one of its parameters."""
    return split_name(key)[0]


def number_of(key: str) -> int:
    """Return a layer's number among those of its kind; 0 if the kind is not numbered."""
    return split_name(key)[1]


def name_and_path(key: str) -> tuple[str, str]:
    """Return the name of the layer that a parameter belongs to, and the parameter's name within it."""
    match = _NAME.match(key)
    assert match is not None, f"{key} belongs to no layer"
    return match[0], key[match.end() :].lstrip(".")


def part_of(key: str) -> str:
    """Return the part of the model that a layer or parameter belongs to: "vision", "projector" or "language"."""
    return PART_OF_KIND[kind_of(key)]


def trained_part(key: str) -> str:
    """Return the part as `--freeze` and `--lora-targets` name it: `part_of`, or "audio" for the audio encoder."""
    return "audio" if kind_of(key) in (AUDIO_EMBED, AUDIO_LAYER) else part_of(key)


def vision_layers_run(vision: VisionConfig) -> int:
    """Return the number of vision layers whose output is needed; `feature_layer=-2` leaves the last one out."""
    return vision.num_layers + 1 + vision.feature_layer


@lru_cache(maxsize=256)
def layer_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of all layers, in order; the pipeline may be cut before each but the first."""
    encoder = (PATCH_EMBED, *_tower(model.vision), VISION_NORM, PROJECTOR) if has_vision(model) else ()
    sounds = model.audio.num_layers
    return (
        *encoder,
        *((AUDIO_EMBED, *(f"{AUDIO_LAYER}{i}" for i in range(sounds)), AUDIO_PROJECTOR) if sounds else ()),
        EMBEDDING,
        *(f"{LANGUAGE_LAYER}{i}" for i in range(model.language.num_layers)),
        LANGUAGE_NORM,
        *_predictors(model),
        OUTPUT,
    )


def _predictors(model: ModelConfig) -> Iterator[str]:
    """Yield the layers that predict further tokens: three for each token."""
    first = model.language.num_layers
    for depth in range(model.language.mtp_layers):
        yield from (f"{MTP_INPUT}{depth}", f"{LANGUAGE_LAYER}{first + depth}", f"{MTP_NORM}{depth}")


def is_audio(name: str) -> bool:
    """Return whether a layer belongs to the audio encoder or its projector."""
    return kind_of(name) in _OF_AUDIO


def is_merged(name: str, vision: VisionConfig) -> bool:
    """Return whether a layer comes after the tower's merger, so that it reads merged patches."""
    kind, number = split_name(name)
    behind = kind in (VISION_NORM, PROJECTOR) or (kind == VISION_LAYER and number > (vision.merger_layer or 0))
    return vision.merger_layer is not None and behind


def tower_of(key: str, model: ModelConfig) -> VisionConfig:
    """Return the encoder that a layer or parameter belongs to."""
    return audio_tower(model) if kind_of(key) == AUDIO_LAYER else model.vision


def encoder_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the layers that turn images and sounds into features: all before the embedding."""
    names = layer_names(model)
    return names[: names.index(EMBEDDING)]


def _tower(vision: VisionConfig) -> Iterator[str]:
    """Yield the vision layers, each followed by the DeepStack merger of its output and by the tower's, if any."""
    for number in range(vision_layers_run(vision)):
        yield f"{VISION_LAYER}{number}"
        if number in vision.deepstack_layers:
            yield f"{DEEPSTACK}{vision.deepstack_layers.index(number)}"
        if number == vision.merger_layer:
            yield VISION_MERGER


def trains_weights(name: str, config: Config) -> bool:
    """Return whether a layer's own weights are trained: the part of the model is neither frozen nor adapted by LoRA."""
    return trained_part(name) not in (*frozen_parts(config), *adapted_parts(config))


def is_trained(key: str, config: Config) -> bool:
    """Return whether the model's weight of this global name is trained: with adapters, routers and heads can be."""
    routes = ".mlp.router." in key and trains_router(config, number_of(key))
    return routes or trains_weights(key, config) or key.startswith(f"{OUTPUT}.head.")


def keeps_fp8(name: str, config: Config) -> bool:
    """Return whether a layer's linear layers store their weights only in FP8 (`--fp8-param-gather`)."""
    in_fp8 = config.precision.fp8_param_gather and layer_precision(name, config) == "fp8"
    return in_fp8 and trains_weights(name, config)


def trained_layers(config: Config) -> frozenset[str]:
    """Return the names of layers with trained weights: their own, adapters, or a router in a part with adapters."""
    return frozenset(
        name for name in layer_names(config.model) if trains_weights(name, config) or _has_adapters(name, config)
    )


def kept_inputs(name: str, config: Config) -> Iterator[str]:
    """Yield a layer's name if the inputs of its linear layers stay in memory for its adapters, and with `.experts` if
    those of routed experts do. The widest input decides, that of the MLP's second layer, or any of routed experts.
    """
    for linear in linears_of(config, trained_part(name), number_of(name)):
        owner, _, last = linear.rpartition(".")
        if (owner == ROUTED_EXPERTS or last in ("fc2", "down_proj")) and is_target(config.lora, name, linear):
            yield f"{name}.{owner}" if owner == ROUTED_EXPERTS else name


def _has_adapters(name: str, config: Config) -> bool:
    part = trained_part(name)
    if kind_of(name) not in TRANSFORMER_LAYERS or part in frozen_parts(config):
        return False
    number = number_of(name)
    adapted = any(is_target(config.lora, name, linear) for linear in linears_of(config, part, number))
    return adapted or (part == "language" and trains_router(config, number))


def trained_below(name: str, earlier: Sequence[str], trained: Collection[str]) -> bool:
    """Return whether the input of layer `name` depends on one of the `trained` layers among the `earlier` ones.

    Features of images and of DeepStack's mergers go to the language model only; no other encoder depends on them.
    """
    inner = (other for other in earlier if kind_of(other) != DEEPSTACK and is_audio(other) == is_audio(name))
    return any(other in trained for other in (earlier if part_of(name) == "language" else inner))


def carried_features(earlier: Sequence[str]) -> int:
    """Return how many DeepStack features the `earlier` layers pass on together with the hidden states.

    Each merger adds one, and each language layer takes one, in order.
    """
    kinds = [kind_of(name) for name in earlier]
    return max(0, kinds.count(DEEPSTACK) - kinds.count(LANGUAGE_LAYER))


@lru_cache(maxsize=256)
def carried_before(names: tuple[str, ...]) -> tuple[int, ...]:
    """Return `carried_features` before each layer and after the last."""
    balance = accumulate((_CARRIED.get(kind_of(name), 0) for name in names), initial=0)
    return tuple(max(0, count) for count in balance)


@lru_cache(maxsize=256)
def states_before(names: tuple[str, ...]) -> tuple[int, ...]:
    """Return how many states a cut before each layer, and after the last, passes on together with the hidden states.

    Within the audio encoder, these are the features of images. From the embedding on they are states of all text
    positions for multi-token prediction: the embeddings, until the last `MTP_INPUT` layer has read them, and the hidden
    states that each of these layers has read; the output layer predicts from all of them.
    """
    depths = sum(kind_of(name) == MTP_INPUT for name in names)
    added = {AUDIO_EMBED: 1, AUDIO_PROJECTOR: -1, EMBEDDING: depths > 0, MTP_INPUT: 1}
    counts = accumulate((added.get(kind_of(name), 0) for name in names), initial=0)
    return tuple(count - (count > depths > 0) for count in counts)
