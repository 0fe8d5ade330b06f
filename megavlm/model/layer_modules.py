"""The modules of transformer layers: torch's, torch's with emulated FP8, or Transformer Engine's.

A layer is megatron-core's in any case, and so are the names of its parameters in checkpoints. What Transformer Engine
has no part for (norms over all heads, LayerScale) is ours everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megavlm.arch.layers import part_of
from megavlm.config.derived import fp8_in, fp8_multiple, layer_precision, shards_gradients
from megavlm.config.lora import adapted_parts
from megavlm.config.schema import Config
from megavlm.model.activation import ACTIVATIONS, Activation, activations
from megavlm.model.attention import CoreAttention
from megavlm.model.cross_entropy import CrossEntropy, te_cross_entropy, vocab_parallel_cross_entropy
from megavlm.model.experts import Products, emulated, te_product
from megavlm.model.norm import Norm
from megavlm.model.rotary import Rotary
from megavlm.parallel.groups import Groups
from megavlm.precision.device import implementation
from megavlm.precision.emulated import (
    DelayedRecipe,
    EmulatedColumnParallelLinear,
    EmulatedRowParallelLinear,
    Operands,
    current_operands,
    delayed_operands,
    same_when_repeated,
)


@dataclass(frozen=True)
class LayerModules:
    """The modules of one transformer layer, each as megatron-core's specs take them."""

    norm: Any  # before attention and before the MLP
    norm_alone: Any  # before experts, whose layers have no norm inside
    post_norm: Any  # after them, in models that have such norms
    column_linear: Any  # query, key and value; the MLP's first layer
    column_linear_alone: Any  # the first layer of a shared expert, without a norm inside
    row_linear: Any  # attention's output; the MLP's second layer
    core_attention: Any
    activations: Mapping[str, Activation]  # of the MLP, by their names in the configuration
    products: Products = field(default_factory=Products)  # of routed experts
    rotary: Rotary = field(default_factory=Rotary)  # splits queries, keys and values, and turns them
    keys: Mapping[str, str] = field(default_factory=dict)  # prefixes of local names → those of checkpoints


@cache
def with_bias_inside(linear: type) -> type:
    """Return a parallel linear class that adds its bias itself, where megatron-core's layers return it to the caller.

    Transformer Engine then adds it where the product is written, and sums its gradient in the weight gradient's
    product: three passes less over the widest tensor.
    """

    def init(self: Any, *args: Any, skip_bias_add: bool, **kwargs: Any) -> None:
        linear.__init__(self, *args, skip_bias_add=False, **kwargs)  # type: ignore[misc]

    return type(linear.__name__, (linear,), {"__init__": init, "__module__": linear.__module__})


class Execution:
    """Contexts that layers run in. This base class adds nothing."""

    def chunk(self, layers: Sequence[tuple[str, Any]]) -> AbstractContextManager[Any]:
        """Return the context for a forward pass through a chunk with these transformer layers."""
        return nullcontext()

    def layer(self, name: str, layer: Any) -> AbstractContextManager[Any]:
        """Return the context for the forward pass of one layer."""
        return nullcontext()

    def recomputed(self, layer: Any, run: Any, hidden: Tensor) -> Tensor:
        """Return `run(hidden)` without saving its activations; the backward pass calls `run` again."""
        return checkpoint(run, False, hidden)


class EmulatedExecution(Execution):
    """Emulated FP8: a recomputed layer uses the scales of its first pass, so its output is the same."""

    def recomputed(self, layer: Any, run: Any, hidden: Tensor) -> Tensor:
        return checkpoint(same_when_repeated(run, layer), False, hidden)


def modules_of(name: str, config: Config, groups: Groups) -> LayerModules:
    """Return the modules of layer `name`. Raises UserError if `--transformer-impl` is not available."""
    interleaved = part_of(name) == "language" and config.model.language.rotary_interleaved
    in_fp8 = layer_precision(name, config) == "fp8"
    if implementation(config) == "te":
        from megatron.core.extensions import transformer_engine

        from megavlm.model.te import te_modules

        # Adapters read what the linear layer reads, which a norm inside it would keep to itself.
        fused_norm = part_of(name) not in adapted_parts(config)
        modules = te_modules(transformer_engine, fused_norm=fused_norm, interleaved=interleaved)
        products = Products(te_product, fp8_multiple(config.precision.fp8_recipe)) if in_fp8 else Products()
        return replace(modules, products=products)
    fp8 = _operands(config, groups) if in_fp8 else None
    modules = torch_modules(fp8, compiled=config.execution.compile_small_ops, interleaved=interleaved)
    return replace(modules, products=_emulated_products(config)) if in_fp8 else modules


def torch_modules(
    fp8: Callable[[], Operands] | None = None, *, compiled: bool = False, interleaved: bool = False
) -> LayerModules:
    """Ours and megatron-core's own, which run anywhere; linear layers emulate FP8 with operands that `fp8` makes.
    Where `compiled`, activation and rotation are a kernel each. `interleaved` pairs of channels rotate as neighbours.
    """
    column: Any = with_bias_inside(ColumnParallelLinear)
    row: Any = with_bias_inside(RowParallelLinear)
    if fp8 is not None:
        column = ModuleSpec(module=with_bias_inside(EmulatedColumnParallelLinear), params={"operands": fp8})
        row = ModuleSpec(module=with_bias_inside(EmulatedRowParallelLinear), params={"operands": fp8})
    return LayerModules(
        norm=Norm,
        norm_alone=Norm,
        post_norm=Norm,
        column_linear=column,
        column_linear_alone=column,
        row_linear=row,
        core_attention=CoreAttention,
        activations=_compiled_activations() if compiled else ACTIVATIONS,
        rotary=_compiled_rotary(interleaved) if compiled else Rotary(interleaved=interleaved),
    )


@cache
def _compiled_activations() -> dict[str, Activation]:
    return activations(torch.compile)


@cache
def _compiled_rotary(interleaved: bool) -> Rotary:
    return Rotary(torch.compile, interleaved=interleaved)


def cross_entropy_of(config: Config) -> CrossEntropy:
    """Return the cross entropy of logits: Transformer Engine's kernel with its layers, else PyTorch's operations.

    The kernel rounds probabilities to the logits' type before they are scaled, which fp16 is too narrow for.
    """
    if implementation(config) == "te" and config.precision.dtype != "fp16":
        from megatron.core.extensions import transformer_engine

        if transformer_engine.te_parallel_cross_entropy is not None:
            return partial(te_cross_entropy, transformer_engine.te_parallel_cross_entropy)
    return vocab_parallel_cross_entropy


def _operands(config: Config, groups: Groups) -> Callable[[], Operands]:
    """Return what makes a layer's operands: each layer has histories of its own."""
    if config.precision.fp8_recipe == "tensorwise":
        return partial(current_operands, config.precision.fp8, groups.tp)
    recipe = DelayedRecipe(
        config.precision.fp8_amax_history_len, config.precision.fp8_amax_compute_algo, config.precision.fp8_margin
    )
    return partial(delayed_operands, config.precision.fp8, recipe, groups.collection.tp_dp_cp)


def _emulated_products(config: Config) -> Products:
    """Return products of experts in FP8, with rows aligned as FP8 hardware needs them."""
    precision = config.precision
    operands = current_operands(precision.fp8, None)  # an expert's rows, and a rank's part of it, have their own scale
    return Products(lambda *shape: emulated(operands), fp8_multiple(precision.fp8_recipe))


def execution_of(config: Config, groups: Groups) -> Execution:
    if config.precision.fp8 == "none":
        return Execution()
    if implementation(config) == "torch":
        return EmulatedExecution()
    from megavlm.model.te import Fp8Execution

    return Fp8Execution(config, groups)


def fp8_fields(config: Config, *parts: str) -> dict[str, Any]:
    """Return what megatron-core's configs of these parts of the model say of FP8 where its kernels run.

    Emulated FP8 is none of its business. Which layers stay high is `layer_precision`'s to say, not its own option's.
    """
    if implementation(config) != "te" or not any(fp8_in(part, config) for part in parts):
        return {}
    return {
        "fp8": config.precision.fp8,
        "fp8_recipe": config.precision.fp8_recipe,
        "fp8_margin": config.precision.fp8_margin,
        "fp8_amax_history_len": config.precision.fp8_amax_history_len,
        "fp8_amax_compute_algo": config.precision.fp8_amax_compute_algo,
        "fp8_param": config.precision.fp8_param_gather,
    }


def accumulation_fields(config: Config, part: str) -> dict[str, Any]:
    """Return the fields of a part's config about weight gradients that Transformer Engine adds to `main_grad` itself.

    In a layer's first pass it overwrites `main_grad` (`is_first_microbatch`), for FP8's sake once a step, else once in
    a run. That loses gradients where another pass's backward came before, as in a colocated encoder, whose passes go
    backward in reverse. So layers without FP8 never hear of first passes. Those with FP8 do, which keep their rounded
    weights through a step by it: they are in the pipeline, where the first pass is the first to go backward as well.

    """
    if implementation(config) != "te" or not _sums_in_place(config):
        return {}
    return {"gradient_accumulation_fusion": True, "disable_parameter_transpose_cache": not fp8_in(part, config)}


def output_accumulation_fields(config: Config) -> dict[str, Any]:
    """Return the fields by which megatron-core's output layer adds its weight gradient to `main_grad` in one kernel.

    The kernel is NVIDIA Apex's, which megatron-core takes where it can be imported.
    """
    fused = _sums_in_place(config) and layers._grad_accum_fusion_available
    return {"gradient_accumulation_fusion": True} if fused else {}


def _sums_in_place(config: Config) -> bool:
    """Return whether a linear layer may add to `main_grad`: sharded gradients have none, offloading hands the layer
    a weight in backward that lacks it, and gradients that wait are added as others are.
    """
    fusion = config.execution.gradient_accumulation_fusion and config.parallel.schedule != "zb-h1"
    return fusion and not shards_gradients(config) and "activations" not in config.execution.offload
