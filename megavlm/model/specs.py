"""Layer specs and megatron-core configurations of the vision tower and the language model.

Legend of the layers these build: hidden states are [S, B, H]; packed vision sequences lie along S with B = 1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megavlm.arch.connector import connector_of
from megavlm.arch.layers import AUDIO_LAYER, LANGUAGE_LAYER, VISION_LAYER, kind_of, number_of, tower_of
from megavlm.arch.tensor_split import HeadSplit, delta_split, language_split, mlp_share, vision_split
from megavlm.config.derived import (
    attends_in_window,
    has_experts,
    is_gated,
    is_latent,
    is_linear,
    masks_all_layers,
    of_layer,
    sequence_parallel,
    unwindowed,
)
from megavlm.config.lora_config import clipped_parts
from megavlm.config.schema import Config, LanguageConfig
from megavlm.model.attention import Attention, CoreAttention, LogitAttention, without_padding
from megavlm.model.context_attention import across_context
from megavlm.model.experts import experts_spec, with_experts
from megavlm.model.latent_attention import LatentAttention
from megavlm.model.layer_modules import ActivationModule, LayerModules, accumulation_fields, fp8_fields, modules_of
from megavlm.model.linear_attention import GatedDeltaNet
from megavlm.model.norm import FullRMSNorm, LayerScale, Norm, ParallelLayer, PostNorm, ScaledLayer
from megavlm.model.packing import WIDEST
from megavlm.parallel.groups import Groups

HEAD_NORM = ModuleSpec(module=Norm, params={"normalization": "RMSNorm"})  # of each query or key head (Qwen3)
UNIT_HEAD_NORM = ModuleSpec(module=Norm, params={"weighted": False})  # the same without weights
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def common_config(config: Config, *, tp: int, padded: bool = False, **overrides: Any) -> TransformerConfig:
    """Return the configuration that vision layers, language layers and the pipeline share.

    `weights.py` draws the weights, but the initialisers here must run: they mark tensor-parallel weights, which the
    gradient norm relies on. `padded` weights begin as zeros, so that their padding is zero. So do weights that are kept
    in FP8: Transformer Engine rounds them when it builds them, and uninitialised memory would enter scaling histories.
    """
    dtype = DTYPES[config.precision.dtype]
    begin = nn.init.zeros_ if padded or overrides.get("fp8_param") else _leave_as_is
    recompute = config.execution.recompute_granularity
    return TransformerConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel(config),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        hidden_dropout=config.model.hidden_dropout,
        attention_dropout=config.model.attention_dropout,
        init_method=begin,
        output_layer_init_method=begin,
        embedding_init_method=_leave_as_is,
        use_te_activation_func=True,  # the activation is in the layer's spec; the one named here is not run
        activation_func=F.silu,
        calculate_per_token_loss=True,
        recompute_granularity="selective" if recompute == "selective" else None,
        recompute_modules=["core_attn"],
        **overrides,
    )


def _leave_as_is(weight: Tensor) -> Tensor:
    return weight


def vision_config(config: Config, *, tp: int, name: str = f"{VISION_LAYER}0") -> TransformerConfig:
    """Return megatron-core's configuration of the encoder that layer `name` belongs to."""
    vision = tower_of(name, config.model)
    split, ffn = vision_split(vision, tp), mlp_share(vision.ffn_hidden_size, tp) * tp
    return common_config(
        config,
        tp=tp,
        padded=ffn != vision.ffn_hidden_size or (split.groups != split.heads and not split.is_even),
        num_layers=vision.num_layers,
        hidden_size=vision.hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=split.local_heads * tp,
        num_query_groups=split.slots * tp,
        kv_channels=split.width,
        normalization=vision.normalization,
        layernorm_epsilon=vision.norm_epsilon,
        gated_linear_unit=is_gated(vision),
        add_bias_linear=vision.add_bias_linear,
        add_qkv_bias=vision.add_qkv_bias,
        qk_layernorm=vision.qk_norm != "none",
        softmax_scale=vision.softmax_scale,
        **fp8_fields(config, name.partition(".")[0]),
    )


def language_config(config: Config, *, tp: int) -> TransformerConfig:
    """Return megatron-core's configuration of the language model."""
    language = config.model.language
    split, ffn = language_split(language, tp), mlp_share(language.ffn_hidden_size, tp) * tp
    even = split.is_even and language_split(unwindowed(language), tp).is_even
    return common_config(
        config,
        tp=tp,
        padded=not even or bool(language.linear_attention_layers) or ffn != language.ffn_hidden_size,
        num_layers=language.num_layers,
        hidden_size=language.hidden_size,
        ffn_hidden_size=ffn,
        **_head_fields(language, tp),
        normalization=language.normalization,
        layernorm_epsilon=language.norm_epsilon,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=language.add_qkv_bias,
        qk_layernorm=language.qk_norm,
        layernorm_zero_centered_gamma=language.apply_layernorm_1p,
        softmax_scale=language.softmax_scale,
        attention_output_gate=language.attention_output_gate,
        **fp8_fields(config, "language"),
    )


def _head_fields(language: LanguageConfig, tp: int) -> dict[str, int]:
    """Return numbers and width of heads, TP padding included, for the TransformerConfig of language layers.

    `language` is the language model as these layers see it (`config.derived.of_layer`).
    """
    split = language_split(language, tp)
    heads, groups = split.local_heads * tp, split.slots * tp
    return {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": language.kv_channels}


def projector_config(config: Config, *, tp: int) -> TransformerConfig:
    """Return the configuration of connectors' linear layers: tensor-parallel, without sequence parallelism.

    Connectors have no heads, but megatron-core requires a number of heads that TP divides. TP may not divide the number
    of the language model, because a colocated encoder has a TP of its own.
    """
    layer_config = common_config(
        config,
        tp=tp,
        padded=connector_of(config.model.projector).is_padded(config.model, tp),
        num_layers=1,
        hidden_size=config.model.language.hidden_size,
        num_attention_heads=tp,
        normalization=config.model.projector.normalization.removeprefix("Unit"),
        layernorm_zero_centered_gamma=config.model.projector.apply_layernorm_1p,
    )
    return replace(layer_config, sequence_parallel=False)


@dataclass(frozen=True)
class LayerBuilder:
    """Configurations and groups to build a chunk's layers from. `ties_locally`: the chunk also holds the embedding."""

    config: Config
    groups: Groups
    vocab_size: int
    ties_locally: bool

    @cached_property
    def audio(self) -> TransformerConfig:
        """Return the configuration of the audio encoder, with gradient accumulation in its layers."""
        found = vision_config(self.config, tp=self.groups.dims.tp, name=f"{AUDIO_LAYER}0")
        return replace(found, **accumulation_fields(self.config, "audio"))

    @cached_property
    def vision(self) -> TransformerConfig:
        """Return the configuration of the vision tower."""
        return vision_config(self.config, tp=self.groups.dims.tp)

    @cached_property
    def language(self) -> TransformerConfig:
        """Return the configuration of the language model."""
        return language_config(self.config, tp=self.groups.dims.tp)

    @cached_property
    def connector(self) -> TransformerConfig:
        """Return the configuration of connectors."""
        return projector_config(self.config, tp=self.groups.dims.tp)

    @cached_property
    def vision_layers(self) -> TransformerConfig:
        """Return the configuration of vision layers, with gradient accumulation."""
        return replace(self.vision, **accumulation_fields(self.config, "vision"))

    @cached_property
    def language_layers(self) -> TransformerConfig:
        """Return the configuration of language layers, with gradient accumulation."""
        return replace(self.language, **accumulation_fields(self.config, "language"))


def vision_layer(config: Config, layer_config: TransformerConfig, groups: Groups, name: str) -> TransformerLayer:
    """Build a layer of an encoder: bidirectional attention within each packed image, window, or chunk of a sound."""
    vision = tower_of(name, config.model)
    branch: Any = get_bias_dropout_add
    if vision.layer_scale:
        branch = ModuleSpec(module=LayerScale, params={"config": layer_config})
    qk_norm: Any = None
    if vision.qk_norm in ("head", "head_and_values"):
        qk_norm = HEAD_NORM
    elif vision.qk_norm == "full":
        params = {"real_heads": vision.num_attention_heads, "tp_group": groups.tp}
        qk_norm = ModuleSpec(module=FullRMSNorm, params=params)
    modules = modules_of(name, config, groups)
    if vision.post_norms:
        branch = ModuleSpec(module=PostNorm, params={"config": layer_config, "norm": modules.post_norm})
    split = vision_split(vision, groups.dims.tp)
    clips = "vision" in clipped_parts(config) and kind_of(name) != AUDIO_LAYER
    core = LogitAttention if clips else modules.core_attention
    modules = replace(modules, core_attention=_discarding_padding(core, split, groups.tp.rank()))
    submodules = layer_submodules(
        modules,
        AttnMaskType.no_mask,
        split=split,
        qk_norm=qk_norm,
        value_norm=vision.norm_epsilon if vision.qk_norm == "head_and_values" else None,
        branch=branch,
        qkv_bias=vision.add_qkv_bias,
        activation=vision.activation,
    )
    return _layer(layer_config, submodules, groups, number_of(name), TransformerLayer)


def language_layer(config: Config, layer_config: TransformerConfig, groups: Groups, number: int) -> TransformerLayer:
    """Build language layer `number` (from 0): causal, or masked (window, images both ways, prefix, softcap, sinks)."""
    language = of_layer(config.model.language, number)
    layer_config = replace(layer_config, **_head_fields(language, groups.dims.tp))
    modules = modules_of(f"{LANGUAGE_LAYER}{number}", config, groups)
    split = language_split(language, groups.dims.tp)
    core: Any = modules.core_attention
    masked = masks_all_layers(language) or attends_in_window(language, number)
    if masked or groups.context.split.groups > 1 or language.kv_channels > WIDEST:
        core = CoreAttention
    if "language" in clipped_parts(config):
        core = LogitAttention
    params: dict[str, Any] = {}
    if is_latent(language):  # Transformer Engine asks for them
        params |= {"k_channels": language.kv_channels, "v_channels": language.v_head_dim}
    if language.attention_softcap is not None:
        params |= {"softcap": language.attention_softcap}
    if language.attention_sinks:
        params |= {"sinks": split.local_heads}
    if groups.dims.cp > 1:
        core = across_context(core)
        params |= {"context": groups.context}
    core = ModuleSpec(module=core, params=params) if params else core
    modules = replace(modules, core_attention=_discarding_padding(core, split, groups.tp.rank()))
    branch: Any = get_bias_dropout_add
    if language.post_norms:
        epsilon = language.post_norm_epsilon or language.norm_epsilon
        normed = replace(layer_config, layernorm_epsilon=epsilon)
        branch = ModuleSpec(module=PostNorm, params={"config": normed, "norm": modules.post_norm})
    head_norm = HEAD_NORM if language.qk_norm_weights else UNIT_HEAD_NORM
    submodules = layer_submodules(
        modules,
        AttnMaskType.causal,
        split=split,
        qk_norm=head_norm if language.qk_norm else None,
        value_norm=language.norm_epsilon if language.value_norm else None,
        branch=branch,
        qkv_bias=language.add_qkv_bias,
        proj_bias=language.add_proj_bias,
        activation=language.activation,
    )
    if is_linear(language, number):
        attention = ModuleSpec(
            module=GatedDeltaNet,
            params={
                "split": delta_split(language, groups.dims.tp),
                "taps": language.linear_conv_kernel_dim,
                "groups": groups,
                "column_linear": modules.column_linear,
                "row_linear": modules.row_linear,
            },
        )
        submodules = replace(submodules, self_attention=attention)
    elif is_latent(language):
        attention = ModuleSpec(
            module=LatentAttention,
            params={"language": language, "modules": modules, "groups": groups},
            submodules=submodules.self_attention.submodules,
        )
        # Latents are projected from the norm's output, not by a linear layer that contains the norm.
        submodules = replace(submodules, input_layernorm=modules.norm_alone, self_attention=attention)
    if has_experts(config.model, number):
        layer_config = with_experts(layer_config, config, groups.dims)
        mlp = experts_spec(modules, config, submodules.mlp.submodules)
        norm = IdentityOp if config.model.experts.own_norms else modules.norm_alone
        submodules = replace(submodules, pre_mlp_layernorm=norm, mlp=mlp)
    if not language.parallel_block:
        kind = ScaledLayer if language.layer_scalar else TransformerLayer
        return _layer(layer_config, submodules, groups, number, kind)
    submodules = replace(submodules, pre_mlp_layernorm=IdentityOp)
    return _layer(layer_config, submodules, groups, number, ParallelLayer)


def _discarding_padding(core: Any, split: HeadSplit, rank: int) -> Any:
    """Return core attention, or its spec, whose output is zero for a rank's query heads that are padding."""
    if not split.padded_heads(rank):
        return core
    spec = core if isinstance(core, ModuleSpec) else ModuleSpec(module=core)
    return ModuleSpec(module=without_padding(spec.module), params={**spec.params, "split": split, "rank": rank})


def _layer(
    layer_config: TransformerConfig, submodules: TransformerLayerSubmodules, groups: Groups, number: int, kind: Any
) -> TransformerLayer:
    # The layer's config says pipeline size 1 and its number is global: megatron-core would add stage offsets itself.
    layer = kind(layer_config, submodules, layer_number=number + 1, pg_collection=groups.collection)
    # Branches are added in this context. megatron-core's, `torch.enable_grad`, keeps graphs of norms in evaluations.
    drops_apart = layer_config.sequence_parallel and layer_config.hidden_dropout > 0
    layer.bias_dropout_add_exec_handler = _own_draws if drops_apart else nullcontext
    return layer


def _own_draws() -> AbstractContextManager[Any]:
    """Return the context in which each tensor-parallel rank draws its own numbers, for its part of the sequence."""
    return get_cuda_rng_tracker().fork()


def layer_submodules(
    modules: LayerModules,
    mask: AttnMaskType,
    *,
    split: HeadSplit,
    qk_norm: Any,
    branch: Any,
    qkv_bias: bool,
    activation: str,
    proj_bias: bool = False,
    value_norm: float | None = None,
) -> TransformerLayerSubmodules:
    rows = split.local_rows * split.tp
    ours = {"rotary": modules.rotary, "split": split, "value_norm": value_norm, "proj_bias": proj_bias}
    attention = SelfAttentionSubmodules(
        linear_qkv=partial(_qkv_linear, modules.column_linear, rows=rows, qkv_bias=qkv_bias),
        core_attention=modules.core_attention,
        linear_proj=modules.row_linear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    mlp = MLPSubmodules(
        linear_fc1=modules.column_linear,
        linear_fc2=modules.row_linear,
        activation_func=ModuleSpec(module=ActivationModule, params={"function": modules.activations[activation]}),
    )
    return TransformerLayerSubmodules(
        input_layernorm=modules.norm,
        self_attention=ModuleSpec(
            module=Attention,
            params={"attn_mask_type": mask, **ours},
            submodules=attention,
        ),
        self_attn_bda=branch,
        pre_mlp_layernorm=modules.norm,
        mlp=ModuleSpec(module=MLP, submodules=mlp),
        mlp_bda=branch,
        sharded_state_dict_keys_map=dict(modules.keys),
    )


def _qkv_linear(linear: Any, inputs: int, outputs: int, *, rows: int, qkv_bias: bool, bias: bool, **kwargs: Any) -> Any:
    """Return the fused projection with `rows` outputs, and with a bias only if the configuration has one.

    megatron-core passes the rows of whole keys and values, but slots of one head have a part each. It also passes a
    bias if other linear layers have one, but InternViT-6B has no bias here.
    """
    return build_module(linear, inputs, rows, bias=qkv_bias, **kwargs)
