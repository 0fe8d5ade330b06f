"""Table of the torch-free layer kinds, and the parameters, FLOPs and bytes of a layer by its name.

`model/layer_kinds.py` is the torch half, which builds and runs layers. Both tables must have an entry for every
kind of `layers.py`, or the import fails.

FLOPs are counted here, by one formula for plans, throughput and MFU. A matrix product of an [n, k] weight with t tokens
takes 2·n·k·t operations. Attention over a sequence of l tokens takes 2·l²·d for the scores and as much for the values
(d = heads × head width), half of both where attention is causal. The backward pass takes as much again for the gradient
of the weight (if it is trained) and for the gradient of the input (if anything before is trained): 2, 4 or 6 operations
per parameter and token, by what actually runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import TypeVar

from megavlm.arch.audio import AudioEmbed, AudioLayer, AudioProjector
from megavlm.arch.ends import (
    DeepstackMerger,
    Embedding,
    LanguageNorm,
    MtpInput,
    Output,
    PatchEmbed,
    Projector,
    VisionMerger,
    VisionNorm,
)
from megavlm.arch.kind import Communication, HiddenWeight, LayerCost, LayerKind, Stream, stream_bytes
from megavlm.arch.layer_sizes import LayerSizes
from megavlm.arch.layers import (
    AUDIO_EMBED,
    AUDIO_LAYER,
    AUDIO_PROJECTOR,
    DEEPSTACK,
    EMBEDDING,
    LANGUAGE_LAYER,
    LANGUAGE_NORM,
    MTP_INPUT,
    MTP_NORM,
    OUTPUT,
    PART_OF_KIND,
    PATCH_EMBED,
    PROJECTOR,
    VISION_LAYER,
    VISION_MERGER,
    VISION_NORM,
    carried_before,
    encoder_names,
    is_merged,
    kind_of,
    layer_names,
    name_and_path,
    number_of,
    states_before,
    trained_below,
    trained_layers,
    trains_weights,
)
from megavlm.arch.mixers import LATENT, LINEAR, SOFTMAX, UNWINDOWED, Mixer, mixer_of
from megavlm.arch.objectives import objective_of
from megavlm.arch.scenario import Recompute, Scenario
from megavlm.arch.transformer import LanguageLayer, MixtureLayer, TransformerKind, VisionLayer
from megavlm.arch.workload import Workload, of_merged
from megavlm.config.derived import has_experts
from megavlm.config.lora_config import ROUTED_EXPERTS, SHARED_EXPERT, is_target
from megavlm.config.schema import Config, LoraConfig, ModelConfig

Entry = TypeVar("Entry")


def for_every_kind(table: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Return `table` unchanged. Raises TypeError unless it has exactly one entry for each kind of layer."""
    if table.keys() != PART_OF_KIND.keys():
        raise TypeError(f"a table of layer kinds lacks or adds {sorted(table.keys() ^ PART_OF_KIND.keys())}")
    return table


KINDS: Mapping[str, LayerKind] = for_every_kind(
    {
        AUDIO_EMBED: AudioEmbed(),
        AUDIO_LAYER: AudioLayer(),
        AUDIO_PROJECTOR: AudioProjector(),
        PATCH_EMBED: PatchEmbed(),
        VISION_LAYER: VisionLayer(),
        VISION_MERGER: VisionMerger(),
        DEEPSTACK: DeepstackMerger(),
        VISION_NORM: VisionNorm(),
        PROJECTOR: Projector(),
        EMBEDDING: Embedding(),
        LANGUAGE_LAYER: LanguageLayer(),
        LANGUAGE_NORM: LanguageNorm(),
        MTP_INPUT: MtpInput(),
        MTP_NORM: LanguageNorm(),
        OUTPUT: Output(),
    }
)


_MIXERS: tuple[Mixer, ...] = (SOFTMAX, UNWINDOWED, LATENT, LINEAR)
_LANGUAGE = {
    (mixer, experts): kind(mixer)
    for mixer in _MIXERS
    for experts, kind in ((False, LanguageLayer), (True, MixtureLayer))
}


def layer_kind(name: str) -> LayerKind:
    """Return the kind of a layer by its name alone, which does not tell a language layer's attention or experts."""
    return KINDS[kind_of(name)]


def kind_in(model: ModelConfig, name: str) -> LayerKind:
    """Return the kind of a model's layer, for language layers by their attention and experts."""
    if kind_of(name) != LANGUAGE_LAYER:
        return layer_kind(name)
    number = number_of(name)
    return _LANGUAGE[mixer_of(model.language, number), has_experts(model, number)]


def _at(name: str, scenario: Scenario) -> Scenario:
    """Return a scenario with the patches that a layer reads, which are fewer after the tower's merger."""
    vision = scenario.model.vision
    return replace(scenario, work=of_merged(scenario.work, vision)) if is_merged(name, vision) else scenario


def is_transformer(name: str) -> bool:
    """Return whether a layer is a transformer layer."""
    return isinstance(layer_kind(name), TransformerKind)


def layer_sizes(name: str, scenario: Scenario) -> LayerSizes:
    """Return the sizes of a transformer layer's tensors on one tensor-parallel rank."""
    kind = kind_in(scenario.model, name)
    assert isinstance(kind, TransformerKind), name
    return kind.sizes(_at(name, scenario))


def model_parameters(name: str, model: ModelConfig) -> int:
    """Return the number of the model's parameters in a layer, without padding."""
    return kind_in(model, name).model_parameters(model) + _expert_parameters(name, model, 1)


def layout_parameters(name: str, layout: Scenario) -> int:
    """Return a layer's parameters on a rank that one of `Scenario.layouts` covers, exactly as `model/specs.py` builds
    them: routed experts, or all others, with their adapters.
    """
    count = _expert_parameters if layout.experts_alone else _own_parameters
    return count(name, layout.model, layout.dims.tp) + adapter_parameters(name, layout)


def adapter_parameters(name: str, layout: Scenario) -> int:
    """Return the parameters of a layer's adapters on a rank that one of `Scenario.layouts` covers, without padding.

    Of an expert's adapter, ETP is taken to divide both factors.
    """
    adapted = layout.lora.rank > 0 and name in layout.trained and not layout.trains(name)
    return _adapter_parameters(name, layout.model, layout.lora, layout.dims.tp, layout.experts_alone) if adapted else 0


def updated_parameters(name: str, layout: Scenario) -> int:
    """Return a layer's trained parameters on a rank that one of `Scenario.layouts` covers: its own or its adapters'."""
    return (layout_parameters if layout.trains(name) else adapter_parameters)(name, layout)


def rank_parameters(name: str, scenario: Scenario) -> int:
    """Return the number of a layer's parameters on a rank."""
    return sum(layout_parameters(name, layout) for layout in scenario.layouts)


@lru_cache(maxsize=65536)
def _own_parameters(name: str, model: ModelConfig, tp: int) -> int:
    return kind_in(model, name).parameters(model, tp)


@lru_cache(maxsize=65536)
def _expert_parameters(name: str, model: ModelConfig, ranks: int) -> int:
    return kind_in(model, name).expert_parameters(model, ranks)


# Linear layers, by their names in Transformers, that the bands of rows of each weight belong to. The linear layer of
# any other weight has its name, without `linear_`.
_LINEARS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "in_proj": ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "gated linear_fc1": ("gate_proj", "up_proj"),
    "gated linear_fc2": ("down_proj",),
    "experts' linear_fc1": ("gate_up_proj", "gate_up_proj"),
    "experts' linear_fc2": ("down_proj",),
}


@lru_cache(maxsize=65536)
def _adapter_parameters(name: str, model: ModelConfig, lora: LoraConfig, tp: int, experts: bool) -> int:
    """Return the elements of A [r, K] and B [M, r] of a layer's adapters on a rank. TP divides A where it divides the
    inputs of the linear layer, and B where it divides the outputs.
    """
    total, weights = 0.0, _hidden_weights(name, model)
    gated = any(len(each.bands) == 2 for path, each in weights.items() if path.endswith("linear_fc1.weight"))
    for path, weight in weights.items():
        owner, module = path.split(".")[-3:-1]
        if bool(weight.experts) != experts or module == "router":
            continue
        kind = ("experts' " if experts else "gated " * gated) * module.startswith("linear_fc")
        linears = _LINEARS.get(kind + module, (module.removeprefix("linear_"),))
        layer = f"{name}.{owner}" if owner in (SHARED_EXPERT, ROUTED_EXPERTS) else name
        rows = [
            (linear, band.before(weight.rows))
            for linear, band in zip(linears, weight.bands, strict=False)
            if is_target(lora, layer, linear)
        ]
        by_inputs = experts or module in ("linear_proj", "out_proj", "linear_fc2")
        by_outputs = experts or not (by_inputs or module.endswith("down_proj"))
        a, b = weight.columns * len({linear for linear, _ in rows}), sum(count for _, count in rows)
        total += (weight.experts or 1) * (a / (tp if by_inputs else 1) + b / (tp if by_outputs else 1))
    return ceil(lora.rank * total)


def hidden_weight_of(key: str, model: ModelConfig) -> HiddenWeight | None:
    """Return the matrices in the parameter of this global name; None if it has no matrix between hidden states.

    Adapters count as having none: the scale of their updates is that of recipes for elementwise rules.
    """
    name, path = name_and_path(key)
    return _hidden_weights(name, model).get(path)


@lru_cache(maxsize=65536)
def _hidden_weights(name: str, model: ModelConfig) -> Mapping[str, HiddenWeight]:
    return kind_in(model, name).hidden_weights(model)


def layer_cost(name: str, model: ModelConfig, work: Workload) -> LayerCost:
    """Return the matrices' parameters and the forward FLOPs of a layer."""
    seen = of_merged(work, model.vision) if is_merged(name, model.vision) else work
    return kind_in(model, name).cost(model, seen, number_of(name))


def saved_bytes(name: str, scenario: Scenario, recompute: Recompute = "none") -> float:
    """Return the bytes that one micro-batch keeps until a layer's backward pass, on one tensor-parallel rank.

    The formulas follow what autograd saves in `model/`; a test counts the tensors that torch keeps. The bytes are 0
    if no gradient passes the layer.
    """
    kind, own = kind_in(scenario.model, name), scenario.trains(name)
    if name not in scenario.trained and not scenario.gradient_reaches[scenario.names.index(name)]:
        return 0.0
    if recompute == "full" and kind.is_recomputed(scenario.model):
        return hidden_bytes(name, scenario)
    read = own or name in scenario.adapted
    saved = kind.saved_bytes(_at(name, scenario), trained=read, core_attention=recompute == "selective")
    if isinstance(kind, MixtureLayer) and (own or f"{name}.{ROUTED_EXPERTS}" in scenario.adapted):
        saved += kind.sizes(scenario).rows_read()
    return saved


def leaves_weight_gradient(name: str, scenario: Scenario) -> bool:
    """Return whether a layer's backward pass may delay its weight gradients (`model/weight_gradients.py`)."""
    reached = scenario.gradient_reaches[scenario.names.index(name)]
    halves = name == OUTPUT or (is_transformer(name) and name not in scenario.fp8)
    return scenario.trains(name) and reached and halves


def waiting_bytes(name: str, scenario: Scenario) -> float:
    """Return the bytes that a micro-batch keeps after a layer's backward pass for its delayed weight gradients."""
    waits = leaves_weight_gradient(name, scenario)
    return kind_in(scenario.model, name).waiting_bytes(_at(name, scenario)) if waits else 0.0


def hidden_bytes(name: str, scenario: Scenario) -> float:
    """Return the bytes of the input of a layer, on one tensor-parallel rank."""
    reads = layer_kind(name).reads
    whole = stream_bytes(reads, _at(name, scenario))
    return whole if reads in (Stream.IMAGES, Stream.FEATURES) else whole / scenario.sequence_shards


def carried_bytes(scenario: Scenario) -> list[float]:
    """Return the bytes per rank that a cut before each layer, and after the last, sends besides hidden states."""
    each = stream_bytes(Stream.IMAGES, scenario)
    features = (count * each for count in carried_before(scenario.names))
    return [sum(pair) for pair in zip(features, state_bytes(scenario), strict=True)]


def state_bytes(scenario: Scenario) -> list[float]:
    """Return the part of `carried_bytes` that `layers.states_before` counts."""
    images, text = (stream_bytes(stream, scenario) for stream in (Stream.IMAGES, Stream.TEXT))
    first = scenario.names.index(EMBEDDING)
    each = [images if place <= first else text / scenario.sequence_shards for place in range(len(scenario.names) + 1)]
    return [count * size for count, size in zip(states_before(scenario.names), each, strict=True)]


def communication(name: str, scenario: Scenario) -> Communication:
    """Return the tensors that a layer's forward pass communicates among tensor-parallel ranks."""
    kind = kind_in(scenario.model, name)
    return kind.communication(_at(name, scenario)) if scenario.dims.tp > 1 else Communication()


def step_flops(config: Config, work: Workload) -> float:
    """Return the forward and backward FLOPs of one training step; frozen layers count only the products that run.

    Not counted are the adapters' own products (LoRA), a share of about rank / width, and the gradients between the
    matrices of the first trained layer.
    """
    return sum(layer_flops(config, work).values())


def layer_flops(config: Config, work: Workload) -> dict[str, float]:
    """Return each layer's FLOPs of one training step.

    They are the FLOPs of its forward passes (two with a gradient cache, but one in a colocated encoder), those of one
    pass if its own weights are trained, and those of one pass if anything before it is trained.
    """
    names, trained = layer_names(config.model), trained_layers(config)
    once = set(encoder_names(config.model)) if config.placement.encoder == "colocated" else set[str]()
    passes = 2 if objective_of(config.model).embeds else 1

    def products(place: int, name: str) -> int:
        forward = 1 if name in once else passes
        return forward + trains_weights(name, config) + trained_below(name, names[:place], trained)

    return {
        name: products(place, name) * layer_cost(name, config.model, work).forward_flops
        for place, name in enumerate(names)
    }
