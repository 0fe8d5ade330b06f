"""Modules of transformer layers: torch's, torch's with emulated FP8, or Transformer Engine's.

A layer is megatron-core's in any case, and so are the names of its parameters in checkpoints. Modules that Transformer
Engine lacks (norms over all heads, LayerScale) are this package's with every implementation.

Activations of the MLP save their input alone and recompute the rest in the backward pass. Autograd would also save
silu(gate) for SwiGLU, gelu(gate) for GeGLU and σ(1.702x) for quick GELU, one more tensor of the largest width in a
layer. torch's own GELUs save their input alone anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm.arch.layers import part_of, trained_part
from megavlm.config.derived import fp8_in, fp8_multiple, has_norms_apart, layer_precision, shards_gradients
from megavlm.config.lora_config import adapted_parts
from megavlm.config.schema import Config
from megavlm.model.attention import CoreAttention
from megavlm.model.cross_entropy import CrossEntropy, te_cross_entropy, vocab_parallel_cross_entropy
from megavlm.model.experts import Products, emulated, te_product
from megavlm.model.norm import Norm
from megavlm.model.rotary import Rotary
from megavlm.parallel.groups import Groups
from megavlm.precision.device import implementation
from megavlm.precision.emulated import (
    EmulatedColumnParallelLinear,
    EmulatedRowParallelLinear,
    Operands,
    current_operands,
    delayed_operands,
    same_when_repeated,
)

Activation = Callable[[Tensor], Tensor]


def keeping_input(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor]) -> Activation:
    """Return an activation from `forward(x)` and `backward(output gradient, x)`, which saves its input alone."""

    def activation(x: Tensor) -> Tensor:
        return _KeepsInput.apply(x, forward, backward)

    return activation


class _KeepsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.gradient(grad, x), None, None


class ActivationModule(MegatronModule):
    """An activation as a module, which layer specs of megatron-core need from 0.18 on."""

    def __init__(self, config: TransformerConfig, function: Activation) -> None:
        super().__init__(config)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


gelu_tanh = partial(F.gelu, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate)·up for [gate, up] (Shazeer 2020). megatron-core's formula adds an offset of zero to `up`."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return [grad·up·silu′(gate), grad·silu(gate)], written into one tensor."""
    gate, up = x.chunk(2, dim=-1)
    if torch.compiler.is_compiling():  # inductor joins without a copy, and fails at writing to parts of other lengths
        return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)], dim=-1)
    out = torch.empty_like(x)
    of_gate, of_up = out.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=of_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
    return out


def geglu(x: Tensor) -> Tensor:
    """Return gelu_tanh(gate)·up for [gate, up] (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return gelu_tanh(gate).mul_(up)


def geglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return [grad·up·gelu_tanh′(gate), grad·gelu_tanh(gate)]."""
    gate, up = x.chunk(2, dim=-1)
    of_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
    return torch.cat([of_gate, grad * gelu_tanh(gate)], dim=-1)


def clamped_swiglu(x: Tensor) -> Tensor:
    """Return (up + 1) · gate · σ(1.702 · gate) for [gate, up], with gate at most 7 and up from −7 to 7 (gpt-oss)."""
    gate, up = x.chunk(2, dim=-1)
    return quick_gelu(gate.clamp(max=7)).mul_(up.clamp(-7, 7).add_(1))


def clamped_swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradients of gate and up, 0 where they are clamped."""
    gate, up = x.chunk(2, dim=-1)
    low, mid = gate.clamp(max=7), up.clamp(-7, 7)
    of_gate = quick_gelu_backward(grad * (mid + 1), low) * (gate <= 7)
    return torch.cat([of_gate, grad * quick_gelu(low) * (up.abs() <= 7)], dim=-1)


def quick_gelu(x: Tensor) -> Tensor:
    """Return x·σ(1.702x), the approximation that CLIP was trained with."""
    return torch.sigmoid(1.702 * x).mul_(x)


def quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad·silu′(u) with u = 1.702x, because x·σ(u) = silu(u)/1.702."""
    return torch.ops.aten.silu_backward(grad, 1.702 * x)


@cache
def activations(compiled: Callable[[Any], Any] = lambda function: function) -> dict[str, Activation]:
    """Return the activations by their names in the configuration; `compiled` fuses each into one kernel."""
    return {
        "gelu": F.gelu,
        "gelu_tanh": gelu_tanh,
        "clamped_swiglu": keeping_input(compiled(clamped_swiglu), compiled(clamped_swiglu_backward)),
        "geglu": keeping_input(compiled(geglu), compiled(geglu_backward)),
        "quick_gelu": keeping_input(compiled(quick_gelu), compiled(quick_gelu_backward)),
        "swiglu": keeping_input(compiled(swiglu), compiled(swiglu_backward)),
    }


ACTIVATIONS = activations()


@dataclass(frozen=True)
class LayerModules:
    """The modules of one transformer layer, each in the form that megatron-core's specs take."""

    norm: Any  # before attention and before the MLP
    norm_alone: Any  # before experts, whose layers have no norm inside
    post_norm: Any  # after attention and after the MLP, in some models
    column_linear: Any  # query, key and value; the MLP's first layer
    column_linear_alone: Any  # the first layer of a shared expert, without a norm inside
    row_linear: Any  # attention's output; the MLP's second layer
    core_attention: Any
    activations: Mapping[str, Activation]  # of the MLP, by their names in the configuration
    products: Products = field(default_factory=Products)  # of routed experts
    rotary: Rotary = field(default_factory=Rotary)  # splits queries, keys and values, and rotates them
    keys: Mapping[str, str] = field(default_factory=dict)  # prefixes of local names → those of checkpoints


@cache
def with_bias_inside(linear: type) -> type:
    """Return a parallel linear class that adds its bias itself; megatron-core's layers return it to the caller.

    Transformer Engine then adds it where the product is written, and sums its gradient in the weight gradient's
    product: three passes less over the widest tensor.
    """

    def init(self: Any, *args: Any, skip_bias_add: bool, **kwargs: Any) -> None:
        linear.__init__(self, *args, skip_bias_add=False, **kwargs)  # type: ignore[misc]

    return type(linear.__name__, (linear,), {"__init__": init, "__module__": linear.__module__})


class Execution:
    """Contexts of the forward passes of chunks and layers, and recomputation. This base class has no contexts."""

    def chunk(self, layers: Sequence[tuple[str, Any]]) -> AbstractContextManager[Any]:
        """Return the context for a forward pass through a chunk with these transformer layers."""
        return nullcontext()

    def layer(self, name: str, layer: Any) -> AbstractContextManager[Any]:
        """Return the context for the forward pass of one layer."""
        return nullcontext()

    def recomputed(self, layer: Any, run: Any, hidden: Tensor) -> Tensor:
        """Return `run(hidden)` without saving activations; the backward pass calls `run` again."""
        return checkpoint(run, False, hidden)


class EmulatedExecution(Execution):
    """Emulated FP8: a recomputed layer reuses the scales of its first pass, so that its output is the same."""

    def recomputed(self, layer: Any, run: Any, hidden: Tensor) -> Tensor:
        return checkpoint(same_when_repeated(run, layer), False, hidden)


def modules_of(name: str, config: Config, groups: Groups) -> LayerModules:
    """Return the modules of layer `name`. Raises UserError if `--transformer-impl` is not available."""
    modules, language = _implemented(name, config, groups), config.model.language
    if part_of(name) != "language":
        return modules
    if language.normalization == "LayerNorm":  # Transformer Engine's has a bias
        norm = ModuleSpec(module=Norm, params={"bias": False})
        modules = replace(modules, norm=norm, norm_alone=norm, post_norm=norm)
    return modules if language.input_norms else replace(modules, norm=IdentityOp, norm_alone=IdentityOp)


def _implemented(name: str, config: Config, groups: Groups) -> LayerModules:
    """Return the modules of the implementation that the configuration asks for, with its norms."""
    model = config.model
    interleaved = model.language.rotary_interleaved if part_of(name) == "language" else model.vision.rotary_neighbours
    in_fp8 = layer_precision(name, config) == "fp8"
    if implementation(config) == "te":
        from megatron.core.extensions import transformer_engine

        from megavlm.model.te import te_modules

        # Adapters read the linear layer's input, which a fused norm would not return.
        apart = part_of(name) == "language" and has_norms_apart(config.model.language)
        fused_norm = trained_part(name) not in adapted_parts(config) and not apart
        modules = te_modules(transformer_engine, fused_norm=fused_norm, interleaved=interleaved)
        products = Products(te_product, fp8_multiple(config.precision.fp8_recipe)) if in_fp8 else Products()
        return replace(modules, products=products)
    fp8 = _operands(config, groups) if in_fp8 else None
    modules = torch_modules(fp8, compiled=config.execution.compile_small_ops, interleaved=interleaved)
    return replace(modules, products=_emulated_products(config)) if in_fp8 else modules


def torch_modules(
    fp8: Callable[[], Operands] | None = None, *, compiled: bool = False, interleaved: bool = False
) -> LayerModules:
    """Return modules of megatron-core and of this package, which run anywhere.

    Linear layers emulate FP8 with the operands that `fp8` makes. `compiled` fuses activation and rotation into one
    kernel each. `interleaved` rotates neighbouring channels as pairs.
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
        activations=activations(torch.compile) if compiled else ACTIVATIONS,
        rotary=_compiled_rotary(interleaved) if compiled else Rotary(interleaved=interleaved),
    )


@cache
def _compiled_rotary(interleaved: bool) -> Rotary:
    return Rotary(torch.compile, interleaved=interleaved)


def cross_entropy_of(config: Config) -> CrossEntropy:
    """Return the cross entropy of logits: Transformer Engine's kernel with its layers, else PyTorch's operations.

    The kernel rounds probabilities to the logits' type before they are scaled, which is too coarse for fp16, and leaves
    no logits from which the slope of the softcap could be computed.
    """
    if (softcap := config.model.language.final_softcap) is not None:
        return partial(vocab_parallel_cross_entropy, softcap=softcap)
    if implementation(config) == "te" and config.precision.dtype != "fp16":
        from megatron.core.extensions import transformer_engine

        if transformer_engine.te_parallel_cross_entropy is not None:
            return partial(te_cross_entropy, transformer_engine.te_parallel_cross_entropy)
    return vocab_parallel_cross_entropy


def _operands(config: Config, groups: Groups) -> Callable[[], Operands]:
    """Return a function that makes a layer's FP8 operands, each call with new scaling histories."""
    if config.precision.fp8_recipe == "tensorwise":
        return partial(current_operands, config.precision.fp8, groups.tp)
    length = config.precision.fp8_amax_history_len
    return partial(delayed_operands, config.precision.fp8, length, groups.collection.tp_dp_cp)


def _emulated_products(config: Config) -> Products:
    """Return the products of experts in emulated FP8, with rows aligned as FP8 hardware needs them."""
    precision = config.precision
    operands = current_operands(precision.fp8, None)  # an expert's rows, and a rank's part of it, have their own scale
    return Products(lambda *shape: emulated(operands), fp8_multiple(precision.fp8_recipe))


def execution_of(config: Config, groups: Groups) -> Execution:
    """Return the `Execution` of layers: plain, emulated FP8, or Transformer Engine's FP8."""
    if config.precision.fp8 == "none":
        return Execution()
    if implementation(config) == "torch":
        return EmulatedExecution()
    from megavlm.model.te import Fp8Execution

    return Fp8Execution(config, groups)


def fp8_fields(config: Config, *parts: str) -> dict[str, Any]:
    """Return the FP8 fields of megatron-core's configuration for these parts of the model; none without its kernels.

    Emulated FP8 does not concern megatron-core. `layer_precision`, not megatron-core's own option, decides which layers
    stay in high precision.
    """
    if implementation(config) != "te" or not any(fp8_in(part, config) for part in parts):
        return {}
    return {
        "fp8": config.precision.fp8,
        "fp8_recipe": config.precision.fp8_recipe,
        "fp8_amax_history_len": config.precision.fp8_amax_history_len,
        "fp8_amax_compute_algo": "max",
        "fp8_param": config.precision.fp8_param_gather,
    }


def accumulation_fields(config: Config, part: str) -> dict[str, Any]:
    """Return the fields with which Transformer Engine adds a part's weight gradients to `main_grad` itself.

    In a layer's first pass (`is_first_microbatch`) it overwrites `main_grad`: once a step with FP8, else once a run.
    This loses gradients if the backward pass of another micro-batch came before, as in a colocated encoder, whose
    backward passes run in reverse. So layers without FP8 never get this mark. Layers with FP8 need it, to keep their
    rounded weights through a step. They are always in the pipeline, where the first pass is the first to run backward.
    """
    if implementation(config) != "te" or not _sums_in_place(config):
        return {}
    return {"gradient_accumulation_fusion": True, "disable_parameter_transpose_cache": not fp8_in(part, config)}


def output_accumulation_fields(config: Config) -> dict[str, Any]:
    """Return the fields with which megatron-core's output layer adds its weight gradient to `main_grad` in one kernel.

    The kernel is NVIDIA Apex's for sums in fp32, which megatron-core takes where it can be imported.
    """
    fused = _sums_in_place(config) and not config.parallel.grad_reduce_in_bf16 and layers._grad_accum_fusion_available
    return {"gradient_accumulation_fusion": True} if fused else {}


def _sums_in_place(config: Config) -> bool:
    """Return whether a linear layer may add its weight gradient to `main_grad`.

    Sharded gradients have no `main_grad`, offloading passes the backward pass a weight without it, and delayed
    gradients are added by autograd.
    """
    fusion = config.execution.gradient_accumulation_fusion and config.parallel.schedule != "zb-h1"
    return fusion and not shards_gradients(config) and "activations" not in config.execution.offload
