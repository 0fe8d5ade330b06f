"""Selection of the linear layers that get LoRA adapters, by names and patterns.

An adapter's name is the layer's global name and Hugging Face's name of the linear layer: `language.layers.3.q_proj`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from megavlm.config.derived import has_experts, has_vision, is_gated, is_latent, is_linear, of_layer
from megavlm.config.schema import Config, LoraConfig

PARTS = ("vision", "projector", "language")
ADAPTABLE = ("vision", "audio", "language")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
LATENT_ATTENTION = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP, GATED_MLP = ("fc1", "fc2"), ("gate_proj", "up_proj", "down_proj")
SHARED_EXPERT, ROUTED_EXPERTS = "shared_experts", "experts"


def parts_of(config: Config) -> tuple[str, ...]:
    """Return the parts that the model has, with the audio encoder as one of its own; or the language model alone."""
    audio = ("audio",) * (config.model.audio.num_layers > 0)
    return (PARTS[0], *audio, *PARTS[1:]) if has_vision(config.model) else ("language",)


def linears_of(config: Config, part: str, number: int) -> tuple[str, ...]:
    """Return the names of the linear layers that can have adapters in layer `number` of an encoder or of "language".

    Routed experts have adapters of two parameters: gate and up together, and down.
    """
    if part != "language":
        return (*ATTENTION, *(GATED_MLP if part == "vision" and is_gated(config.model.vision) else MLP))
    language = of_layer(config.model.language, number)
    attention: tuple[str, ...] = LINEAR_ATTENTION if is_linear(language, number) else ATTENTION
    if language.keys_as_values:
        attention = tuple(name for name in attention if name != "v_proj")
    if is_latent(language):
        queries = ("q_proj",) if language.q_lora_rank is None else ("q_a_proj", "q_b_proj")
        attention = (*queries, *LATENT_ATTENTION)
    if not has_experts(config.model, number):
        return (*attention, *GATED_MLP)
    shared = config.model.experts.shared_ffn_hidden_size is not None
    of_all_tokens = (f"{SHARED_EXPERT}.{linear}" for linear in GATED_MLP if shared)
    return (*attention, *of_all_tokens, *(f"{ROUTED_EXPERTS}.{param}" for param in ("gate_up_proj", "down_proj")))


def is_target(lora: LoraConfig, layer: str, linear: str) -> bool:
    """Return whether a linear layer has an adapter.

    A target is a full name, which may contain * and ?, a prefix of names (`language`, `vision.layers.0`), or the name
    of a linear layer (`q_proj`) in all layers. Routed experts, most of a model, are targets by their own name only
    (`experts`, `experts.down_proj`, `language.layers.3.experts`).
    """
    return lora.rank > 0 and any(_matches(f"{layer}.{linear}", target) for target in lora.targets)


def _matches(name: str, target: str) -> bool:
    if f".{ROUTED_EXPERTS}." in name:
        named = ROUTED_EXPERTS in target.split(".")
        return named and any(fnmatchcase(name, f"{start}{target}{end}") for start in ("", "*.") for end in ("", ".*"))
    linear = name.rpartition(".")[2]
    return target == linear or fnmatchcase(name, target) or fnmatchcase(name, f"{target}.*")


def all_names(config: Config) -> list[str]:
    """Return the names of all linear layers that can have adapters."""
    layers = {part: getattr(config.model, part).num_layers for part in ADAPTABLE}
    return [
        f"{part}.layers.{number}.{linear}"
        for part, count in layers.items()
        for number in range(count)
        for linear in linears_of(config, part, number)
    ]


def unmatched(config: Config) -> list[str]:
    """Return the targets that match no linear layer."""
    names = all_names(config)
    return [target for target in config.lora.targets if not any(_matches(name, target) for name in names)]


def adapted_parts(config: Config) -> tuple[str, ...]:
    """Return the parts of the model with adapters; their other weights are frozen."""
    if not config.lora.rank:
        return ()
    targets = config.lora.targets
    found = {name.partition(".")[0] for name in all_names(config) if any(_matches(name, target) for target in targets)}
    return tuple(part for part in ADAPTABLE if part in found)


def frozen_parts(config: Config) -> tuple[str, ...]:
    """Return the parts of the model that `--freeze` names. By default with LoRA: parts without adapters, except a
    projector with random initial weights.
    """
    if config.model.freeze is not None or not config.lora.rank:
        return config.model.freeze or ()
    trained = (*adapted_parts(config), *(("projector",) if new_projector(config) else ()))
    return tuple(part for part in parts_of(config) if part not in trained)


def new_projector(config: Config) -> bool:
    """Return whether the projector between given parts has random initial weights."""
    checkpoint = config.checkpoint
    return bool(checkpoint.vision_from or checkpoint.language_from) and checkpoint.projector_from is None


def trained_whole(config: Config) -> tuple[str, ...]:
    """Return the parts of the model of which all weights are trained, not only adapters."""
    return tuple(part for part in parts_of(config) if part not in (*frozen_parts(config), *adapted_parts(config)))


def clipped_parts(config: Config) -> tuple[str, ...]:
    """Return the parts of the model in which `--qk-clip` scales query and key projections: those that are trained whole
    and have no norms of queries and keys, which would undo the scaling.
    """
    model = config.model
    normalised = {"vision": model.vision.qk_norm != "none", "audio": False, "language": model.language.qk_norm}
    if not config.optimizer.qk_clip:
        return ()
    return tuple(part for part in trained_whole(config) if not normalised.get(part, True))


def beyond_adapters(config: Config) -> str | None:
    """Return a warning if a run trains weights besides adapters, which a file of adapters cannot hold; else None."""
    whole = trained_whole(config)
    if not adapted_parts(config) or not whole:
        return None
    left = " ".join(part for part in parts_of(config) if part in (*frozen_parts(config), *whole))
    return (
        f"beside the adapters, {' and '.join(whole)} {'trains' if len(whole) == 1 else 'train'} whole, with gradients "
        f"and optimizer state for every weight, and export-lora refuses that: use --freeze {left}, or export by "
        "merge-lora"
    )


def trains_router(config: Config, number: int) -> bool:
    """Return whether the router of language layer `number` is trained in addition to adapters."""
    return config.lora.train_router and "language" in adapted_parts(config) and has_experts(config.model, number)


def adapts_experts(config: Config) -> bool:
    """Return whether any routed experts have adapters."""
    routed = (name for name in all_names(config) if f".{ROUTED_EXPERTS}." in name)
    return config.lora.rank > 0 and any(_matches(name, target) for name in routed for target in config.lora.targets)


def is_adapter(key: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return ".lora." in key
