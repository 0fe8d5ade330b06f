"""Parameters and floating-point operations of each named layer: pure arithmetic, the one formula for plans and MFU.

A matrix product of a [n, k] weight with t tokens costs 2·n·k·t. Attention of a sequence of l tokens costs
2·l²·d for the scores and as much for the values (d = heads × head width), half of it where it is causal.
Backward costs as much again for the weight's gradient (if it is trained) and for the input's gradient (if
anything below is trained): 2, 4 or 6 FLOPs per parameter and token, by what actually runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavlm.arch.layers import (
    DEEPSTACK,
    EMBEDDING,
    LANGUAGE_LAYER,
    OUTPUT,
    PATCH_EMBED,
    PROJECTOR,
    VISION_LAYER,
    layer_names,
    module_of,
    trained_below,
    trained_layers,
    trains_weights,
)
from megavlm.config.derived import projector_width, query_groups, vocab_size
from megavlm.config.schema import Config, LanguageConfig, ModelConfig, VisionConfig


@dataclass(frozen=True)
class Workload:
    """Tokens that pass the model in one step, and the sums of squared lengths that attention needs."""

    patches: int  # all images' patches (class tokens included)
    patch_squares: int  # Σ over images of patches²
    window_squares: int  # Σ over their windows of patches²; read where the tower has windows
    tokens: int  # language positions that are not padding
    token_squares: int  # Σ over samples of length²


@dataclass(frozen=True)
class LayerCost:
    parameters: int
    forward_flops: float
    attention_flops: float = 0.0  # of those, the products of scores and values


def layer_cost(name: str, model: ModelConfig, work: Workload) -> LayerCost:
    """Parameters and forward FLOPs of one named layer for a workload."""
    vision, language = model.vision, model.language
    if name.startswith(VISION_LAYER):
        params = _vision_layer_matrices(vision)
        windowed = attends_in_windows(vision, int(name.removeprefix(VISION_LAYER)))
        attention = 4.0 * (work.window_squares if windowed else work.patch_squares) * vision.hidden_size
        return LayerCost(params, 2.0 * params * work.patches + attention, attention)
    if name.startswith(LANGUAGE_LAYER):
        params = _language_layer_matrices(language)
        attention = 2.0 * work.token_squares * head_width(language) * language.num_attention_heads
        return LayerCost(params, 2.0 * params * work.tokens + attention, attention)
    if name == PATCH_EMBED:
        pixels = vision.in_channels * vision.patch_size**2
        table = (vision.image_size // vision.patch_size) ** 2 if vision.position_embedding != "rope2d" else 0
        params = (vision.temporal_patch_size * pixels + table) * vision.hidden_size
        return LayerCost(params, 2.0 * pixels * vision.hidden_size * work.patches)
    if name == PROJECTOR or name.startswith(DEEPSTACK):
        params = _projector_matrices(model)
        return LayerCost(params, 2.0 * params * work.patches / model.projector.pixel_shuffle**2)
    vocab = vocab_size(language) * language.hidden_size
    if name == EMBEDDING:
        return LayerCost(vocab, 0.0)
    if name == OUTPUT:
        return LayerCost(0 if language.tie_embeddings else vocab, 2.0 * vocab * work.tokens)
    return LayerCost(vision.hidden_size if module_of(name) == "vision" else language.hidden_size, 0.0)


def step_flops(config: Config, work: Workload) -> float:
    """FLOPs of one training step over a workload, backward included, frozen layers counted as they run.

    Left out are the adapters' own products (LoRA), a share of about rank / width, and what gradients cost between the
    matrices of the first trained layer.
    """
    return sum(layer_flops(config, work).values())


def layer_flops(config: Config, work: Workload) -> dict[str, float]:
    """Return each layer's FLOPs of one training step over a workload: of its forward pass, once more where its own
    weights are trained, and once more where anything before it is.
    """
    names, trained = layer_names(config.model), trained_layers(config)
    return {
        name: (1 + trains_weights(name, config) + trained_below(name, names[:place], trained))
        * layer_cost(name, config.model, work).forward_flops
        for place, name in enumerate(names)
    }


def window_patches(model: ModelConfig) -> int:
    """Side of the vision tower's windows in patches, a multiple of what is merged into one feature; 0: no windows."""
    if model.vision.window_size is None:
        return 0
    merged = model.projector.pixel_shuffle
    return model.vision.window_size // (model.vision.patch_size * merged) * merged


def attends_in_windows(vision: VisionConfig, layer: int) -> bool:
    return vision.window_size is not None and layer not in vision.full_attention_layers


def window_squares(grid: tuple[int, int], side: int) -> int:
    """Σ over the windows of an image of patches². A window's area is a product, so the sum is one too: Σr² · Σc²."""

    def squares(length: int) -> int:
        return length // side * side**2 + (length % side) ** 2

    return squares(grid[0]) * squares(grid[1])


def head_width(language: LanguageConfig) -> int:
    return language.kv_channels or language.hidden_size // language.num_attention_heads


def _vision_layer_matrices(vision: VisionConfig) -> int:
    gates = 3 if vision.activation == "swiglu" else 2
    return 4 * vision.hidden_size**2 + gates * vision.hidden_size * vision.ffn_hidden_size


def _language_layer_matrices(language: LanguageConfig) -> int:
    groups = query_groups(language)
    heads = 2 * language.num_attention_heads + 2 * groups
    return language.hidden_size * (heads * head_width(language) + 3 * language.ffn_hidden_size)


def _projector_matrices(model: ModelConfig) -> int:
    inputs = model.vision.hidden_size * model.projector.pixel_shuffle**2
    outputs = model.language.hidden_size
    if model.projector.kind == "linear":
        return inputs * outputs
    hidden = projector_width(model)
    return inputs * hidden + hidden * outputs
