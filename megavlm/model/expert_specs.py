"""The spec of a layer with experts in place of its MLP, and what megatron-core's config says of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megavlm.arch.dims import Dims
from megavlm.config.schema import Config
from megavlm.model.experts import GroupedExperts
from megavlm.model.layer_modules import LayerModules
from megavlm.model.router import Router


def with_experts(layer_config: TransformerConfig, config: Config, dims: Dims) -> TransformerConfig:
    """Return the config of a layer with experts: what megatron-core's layer and its token dispatchers read."""
    experts = config.model.experts
    return replace(
        layer_config,
        num_moe_experts=experts.num_experts,
        moe_ffn_hidden_size=experts.ffn_hidden_size,
        moe_router_topk=experts.router_topk,
        moe_router_score_function=experts.router_score_function,
        moe_router_pre_softmax=experts.router_pre_softmax,
        moe_shared_expert_intermediate_size=experts.shared_ffn_hidden_size,
        moe_shared_expert_gate=experts.shared_gate,
        moe_token_dispatcher_type=config.parallel.moe_token_dispatcher_type,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.expert_tp,
    )


def experts_spec(modules: LayerModules, config: Config, dense: MLPSubmodules) -> ModuleSpec:
    """Return the spec of a router with its experts; a shared expert is an MLP as `dense` layers have."""
    activation = dense.activation_func
    submodules = MoESubmodules(
        router=partial(Router, experts=config.model.experts),
        experts=ModuleSpec(module=GroupedExperts, params={"activation": activation, "products": modules.products}),
        shared_experts=ModuleSpec(
            module=SharedExpertMLP, submodules=replace(dense, linear_fc1=modules.column_linear_alone)
        ),
    )
    return ModuleSpec(module=MoELayer, submodules=submodules)
