"""The VLM as a list of named layers, in the order that data passes them. Names know no layout."""

from __future__ import annotations

from megavlm.config.schema import ModelConfig, VisionConfig

PATCH_EMBED = "patch_embed"
VISION_NORM = "vision.norm"
PROJECTOR = "projector"
EMBEDDING = "embedding"
LANGUAGE_NORM = "language.norm"
OUTPUT = "output"
VISION_LAYER = "vision.layers."
LANGUAGE_LAYER = "language.layers."


def vision_layers_run(vision: VisionConfig) -> int:
    """Layers whose output is needed: `feature_layer=-2` leaves the last one out altogether."""
    return vision.num_layers + 1 + vision.feature_layer


def layer_names(model: ModelConfig) -> tuple[str, ...]:
    """Every layer that a stage plan may cut between."""
    return (
        PATCH_EMBED,
        *(f"{VISION_LAYER}{i}" for i in range(vision_layers_run(model.vision))),
        VISION_NORM,
        PROJECTOR,
        EMBEDDING,
        *(f"{LANGUAGE_LAYER}{i}" for i in range(model.language.num_layers)),
        LANGUAGE_NORM,
        OUTPUT,
    )


def module_of(name: str) -> str:
    """Which part of the model a layer or parameter belongs to: "vision", "projector" or "language"."""
    if name.startswith((PATCH_EMBED, "vision.")):
        return "vision"
    return "projector" if name.startswith(PROJECTOR) else "language"
