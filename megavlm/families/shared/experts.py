"""Mixtures of experts in language models of Transformers: their configuration and the table of their weights."""

from __future__ import annotations

from typing import Literal

from megavlm.config.schema import ExpertsConfig
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Concat, Interleaved, Rename, Stack, Table, TransposeEach, gated, module

# How a file stores experts: one tensor for each matrix of each expert, or two tensors for all experts of a layer, as
# [experts, outputs, inputs] (the order of the modules' weights) or transposed.
ExpertFiles = Literal["apart", "stacked", "transposed"]


def qwen_experts(text: Settings, *, layers: int, normalized: bool) -> ExpertsConfig:
    """Return the experts of a Qwen3MoeConfig or Qwen3VLMoeTextConfig.

    `normalized`: whether the weights of a token's experts add up to 1. Transformers writes `num_local_experts`,
    published files have `num_experts`.
    """
    number = text.get("num_local_experts", text.get("num_experts", 128))
    step, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers", [])
    without = tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)
    if number == 0 or len(without) == layers:
        return ExpertsConfig()
    return ExpertsConfig(
        num_experts=number,
        router_topk=text.get("num_experts_per_tok", 8),
        ffn_hidden_size=text.get("moe_intermediate_size", 768),
        dense_layers=without,
        router_pre_softmax=not normalized,
    )


def shared_qwen_experts(text: Settings) -> ExpertsConfig:
    """Return the experts of a Qwen3_5MoeTextConfig.

    Every layer has experts with weights that add up to 1, and one gated shared expert.
    """
    return ExpertsConfig(
        num_experts=text.get("num_local_experts", text.need("num_experts")),
        router_topk=text.need("num_experts_per_tok"),
        ffn_hidden_size=text.need("moe_intermediate_size"),
        shared_ffn_hidden_size=text.need("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def glm_experts(text: Settings, *, layers: int) -> ExpertsConfig:
    """Return the experts of a Glm4vMoeTextConfig or DeepseekV3Config.

    They have sigmoid scores, a bias that only affects which experts are selected, and shared experts.
    """
    topk, width = text.get("num_experts_per_tok", 8), text.get("moe_intermediate_size", 1408)
    groups, of_groups = text.get("n_group", 1), text.get("topk_group", 1)
    if not text.get("norm_topk_prob", True) or topk == 1:
        refuse(text, "norm_topk_prob", "weights of several experts are only known to add up to 1 here")
    if groups > 1 and topk // of_groups != 2:
        refuse(text, "topk_group", "groups are known with two experts of each chosen group")
    scaling = text.get("routed_scaling_factor", 1.0)
    dense = min(text.get("first_k_dense_replace", 1), layers)
    if dense == layers:
        return ExpertsConfig()
    return ExpertsConfig(
        num_experts=text.get("n_routed_experts", 128),
        router_topk=topk,
        ffn_hidden_size=width,
        shared_ffn_hidden_size=width * text.get("n_shared_experts", 1),
        dense_layers=tuple(range(dense)),
        router_score_function="sigmoid",
        router_topk_scaling_factor=None if scaling == 1 else scaling,
        router_num_groups=groups if groups > 1 else None,
        router_group_topk=of_groups if groups > 1 else None,
        router_enable_expert_bias=True,
    )


def gemma_experts(text: Settings) -> ExpertsConfig:
    """Return the `ExpertsConfig` of a Gemma4TextConfig, whose dense MLP with norms of its own is the shared expert."""
    if not text.get("enable_moe_block", False):
        return ExpertsConfig()
    return ExpertsConfig(
        num_experts=text.need("num_experts"),
        router_topk=text.need("top_k_experts"),
        ffn_hidden_size=text.need("moe_intermediate_size"),
        shared_ffn_hidden_size=text.get("intermediate_size", 9216),
        own_norms=True,
    )


def gemma_experts_table(layer: str, hf_layer: str) -> Table:
    """Return the table of a layer's experts with norms of their own, and of the MLP beside them."""
    names = {
        "input_norm.weight": "pre_feedforward_layernorm_2.weight",
        "output_norm.weight": "post_feedforward_layernorm_2.weight",
        "shared_input_norm.weight": "pre_feedforward_layernorm.weight",
        "shared_output_norm.weight": "post_feedforward_layernorm_1.weight",
        "router.weight": "router.proj.weight",
        "router.input_scale": "router.scale",
        "router.expert_scale": "router.per_expert_scale",
        "experts.experts.linear_fc1.weight": "experts.gate_up_proj",
        "experts.experts.linear_fc2.weight": "experts.down_proj",
    }
    table = gated(f"{layer}mlp.shared_experts", f"{hf_layer}mlp", bias=False)
    return table | {f"{layer}mlp.{own}": Rename(f"{hf_layer}{name}") for own, name in names.items()}


def biased_experts(text: Settings) -> ExpertsConfig:
    """Return the experts of a GptOssConfig: all layers have some, with biases, and weights that add up to 1."""
    for name, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        text.require(name, known, why="another activation of experts is not known here")
    return ExpertsConfig(
        num_experts=text.get("num_local_experts", text.get("num_experts", 128)),
        router_topk=text.get("num_experts_per_tok", 4),
        ffn_hidden_size=text.get("intermediate_size", 2880),
        add_bias=True,
    )


def biased_experts_table(experts: ExpertsConfig, layer: str, hf_layer: str, *, hidden_size: int) -> Table:
    """Return the table of a layer's router and experts with biases (gpt-oss)."""
    held, stored = f"{layer}mlp.experts.experts.linear_fc", f"{hf_layer}mlp.experts."
    number, inner = experts.num_experts, experts.ffn_hidden_size
    return module(f"{layer}mlp.router", f"{hf_layer}mlp.router", "weight", "bias") | {
        f"{held}1.weight": Interleaved(f"{stored}gate_up_proj", view=(number, hidden_size, 2 * inner)),
        f"{held}1.bias": Interleaved(f"{stored}gate_up_proj_bias", view=(number, 2 * inner)),
        f"{held}2.weight": TransposeEach(f"{stored}down_proj", view=(number, inner, hidden_size)),
        f"{held}2.bias": Rename(f"{stored}down_proj_bias"),
    }


def experts_table(experts: ExpertsConfig, layer: str, hf_layer: str, *, hidden_size: int, stored: ExpertFiles) -> Table:
    """Return the table of a layer's mixture of experts; `stored` says how files store the experts."""
    held, hf_held = f"{layer}mlp.experts.experts.", f"{hf_layer}mlp.experts."
    number, inner = experts.num_experts, experts.ffn_hidden_size
    table: Table = {f"{layer}mlp.router.weight": Rename(f"{hf_layer}mlp.gate.weight")}
    if stored == "apart":
        apart = [f"{hf_held}{expert}." for expert in range(number)]
        gates_and_ups = (Concat((f"{expert}gate_proj.weight", f"{expert}up_proj.weight")) for expert in apart)
        table[f"{held}linear_fc1.weight"] = Stack(tuple(gates_and_ups))
        table[f"{held}linear_fc2.weight"] = Stack(tuple(Rename(f"{expert}down_proj.weight") for expert in apart))
    else:
        rule = TransposeEach if stored == "transposed" else Rename
        first, second = (number, 2 * inner, hidden_size), (number, hidden_size, inner)
        if stored == "transposed":
            first, second = (number, hidden_size, 2 * inner), (number, inner, hidden_size)
        table[f"{held}linear_fc1.weight"] = rule(f"{hf_held}gate_up_proj", view=first)
        table[f"{held}linear_fc2.weight"] = rule(f"{hf_held}down_proj", view=second)
    if experts.router_enable_expert_bias:
        table[f"{layer}mlp.router.expert_bias"] = Rename(f"{hf_layer}mlp.gate.e_score_correction_bias")
    if experts.shared_ffn_hidden_size is not None:
        shared, hf_shared = f"{layer}mlp.shared_experts", f"{hf_layer}mlp.shared_experts"
        if experts.shared_gate:  # Qwen has a single shared expert
            hf_shared = f"{hf_layer}mlp.shared_expert"
            table[f"{shared}.gate_weight"] = Rename(f"{hf_layer}mlp.shared_expert_gate.weight")
        table |= gated(shared, hf_shared, bias=False)
    return table
