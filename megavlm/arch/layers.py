"""The VLM as a list of named layers, in the order that data passes them. Names know no layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megavlm.config.derived import layer_precision
from megavlm.config.lora import adapted_parts, is_target, linears_of
from megavlm.config.schema import Config, ModelConfig, VisionConfig

PATCH_EMBED = "patch_embed"
VISION_NORM = "vision.norm"
PROJECTOR = "projector"
EMBEDDING = "embedding"
LANGUAGE_NORM = "language.norm"
OUTPUT = "output"
VISION_LAYER = "vision.layers."
DEEPSTACK = "deepstack."
LANGUAGE_LAYER = "language.layers."


def vision_layers_run(vision: VisionConfig) -> int:
    """Layers whose output is needed: `feature_layer=-2` leaves the last one out altogether."""
    return vision.num_layers + 1 + vision.feature_layer


def layer_names(model: ModelConfig) -> tuple[str, ...]:
    """Every layer that a stage plan may cut between."""
    return (
        PATCH_EMBED,
        *_tower(model.vision),
        VISION_NORM,
        PROJECTOR,
        EMBEDDING,
        *(f"{LANGUAGE_LAYER}{i}" for i in range(model.language.num_layers)),
        LANGUAGE_NORM,
        OUTPUT,
    )


def encoder_names(model: ModelConfig) -> tuple[str, ...]:
    """The layers that make features of images: all before the embedding."""
    names = layer_names(model)
    return names[: names.index(EMBEDDING)]


def _tower(vision: VisionConfig) -> Iterator[str]:
    """Vision layers, and after those that DeepStack taps, the merger that turns their output into features."""
    for number in range(vision_layers_run(vision)):
        yield f"{VISION_LAYER}{number}"
        if number in vision.deepstack_layers:
            yield f"{DEEPSTACK}{vision.deepstack_layers.index(number)}"


def trains_weights(name: str, config: Config) -> bool:
    """Whether a layer's own weights are trained: its part is not frozen, and has no adapters anywhere."""
    return module_of(name) not in (*config.model.freeze, *adapted_parts(config))


def keeps_fp8(name: str, config: Config) -> bool:
    """Whether a layer's linears keep their weights in FP8 alone: `--fp8-param-gather`, where there is gathering."""
    in_fp8 = config.precision.fp8_param_gather and layer_precision(name, config) == "fp8"
    return in_fp8 and trains_weights(name, config)


def trained_layers(config: Config) -> frozenset[str]:
    """The layers that have anything to train, own weights or adapters: what gradients are computed for."""
    return frozenset(
        name for name in layer_names(config.model) if trains_weights(name, config) or _has_adapters(name, config)
    )


def _has_adapters(name: str, config: Config) -> bool:
    part = module_of(name)
    if not name.startswith((VISION_LAYER, LANGUAGE_LAYER)) or part in config.model.freeze:
        return False
    return any(is_target(config.lora, name, linear) for linear in linears_of(config, part))


def trained_below(name: str, earlier: Sequence[str], trained: Collection[str]) -> bool:
    """Whether what layer `name` reads depends on one of the `trained` layers, given all layers before it.

    DeepStack's mergers hand their features to the language model alone: the tower goes on without them.
    """
    takes_all = module_of(name) == "language"
    return any(other in trained for other in earlier if takes_all or not other.startswith(DEEPSTACK))


def module_of(name: str) -> str:
    """Which part of the model a layer or parameter belongs to: "vision", "projector" or "language"."""
    if name.startswith((PATCH_EMBED, "vision.")):
        return "vision"
    return "projector" if name.startswith((PROJECTOR, DEEPSTACK)) else "language"
