"""LoRA (Hu et al. 2021) in any layout: y = W·x + (α/r)·B·A·dropout(x), with one A and B per Hugging Face linear layer.

megatron-core fuses query, key and value (per key/value head) and gate over up; PEFT has an adapter for each. These
modules have, too: the adapters' outputs are put in the order of the fused rows. Legend: x [S(/TP), B, K], r rank, M
rows of a linear.

Column-parallel layers: A [r, K] is whole on every rank, B [M/TP, r] has a rank's rows. A·x is computed on this rank's
share of the sequence and gathered (r numbers a token instead of K); the backward pass sums its gradient.
Row-parallel layers: A [r, K/TP] has a rank's columns, so A·x is a partial sum; it is reduced at width r, to this rank's
share of the sequence, where B [M, r], whole on every rank, is applied.

Routed experts: y = W_e·x + (α/r)·B_e·A_e·x for a row x of expert e. PEFT adapts a parameter that holds all experts of a
layer in this way (`target_parameters`). Gate and up are one such parameter, so they share A. Both products are grouped,
as those of the experts themselves.

EP divides the experts. ETP divides the rows of fc1, and B's with them, and the columns of fc2, and A's with them; the
other of the two is whole on every ETP rank. Legend: T tokens on this rank, E experts (of it), K inputs, M outputs,
r rank of the adapter.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megavlm.config.lora_config import ROUTED_EXPERTS, SHARED_EXPERT, is_target
from megavlm.config.schema import LoraConfig
from megavlm.model.experts import ExpertWeight, GroupedExperts, Rows, grouped, mark
from megavlm.model.latent_attention import LatentAttention
from megavlm.model.linear_attention import GatedDeltaNet


class Adapter(nn.Module):
    """A and B of one linear layer, with this rank's sizes."""

    def __init__(self, inputs: int, outputs: int, *, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(rank, inputs, dtype=dtype))  # padding for TP stays zero
        self.B = nn.Parameter(torch.zeros(outputs, rank, dtype=dtype))


class _Adapters(nn.ModuleDict):
    """The adapters of a linear layer by name; the layer's submodule `lora`."""

    def __init__(self, adapters: dict[str, Adapter], lora: LoraConfig) -> None:
        super().__init__(adapters)
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout

    def drop(self, x: Tensor, *, differs: bool) -> Tensor:
        """Apply dropout before A; `differs`: tensor-parallel ranks hold different values and need different masks."""
        if not self.dropout or not self.training:
            return x
        with get_cuda_rng_tracker().fork() if differs else nullcontext():
            return F.dropout(x, self.dropout)


class _LoraLinear:
    """Mixin in front of a linear layer's class: torch's, emulated FP8's or Transformer Engine's."""

    reads_below = True  # A and B of adapters that are never called

    lora: Any  # `_Adapters`
    config: Any
    tp_group: Any
    weight: Any


class LoraColumnParallelLinear(_LoraLinear):
    """A column-parallel layer with adapters: its output is one block, [gate; up], or q, k and v per key/value head."""

    blocks: dict[str, int]  # rows of each linear per group on this rank, in their order; adapters may lack some
    repeats: int  # groups on this rank

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        return output + self._delta(input_), bias

    def _delta(self, x: Tensor) -> Tensor:
        sequence_parallel = self.config.sequence_parallel
        dropped = self.lora.drop(x, differs=sequence_parallel)
        low = F.linear(dropped, torch.cat([self.lora[name].A for name in self.lora]))
        if sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        parts = dict(zip(self.lora, low.chunk(len(self.lora), dim=-1), strict=True))
        blocks = []
        for name, rows in self.blocks.items():
            if name in parts:
                block = F.linear(parts[name], self.lora[name].B).unflatten(-1, (self.repeats, rows))
            else:
                block = low.new_zeros(*low.shape[:-1], self.repeats, rows)
            blocks.append(block)
        rows = torch.cat(blocks, dim=-1).flatten(-2) * self.lora.scale
        return F.pad(rows, (0, self.weight.shape[0] - rows.shape[-1]))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        axes = {"weight": 0, "bias": 0, **{f"lora.{name}.B": 0 for name in self.lora}}
        return _sharded(self, prefix, axes, sharded_offsets, metadata)


class LoraRowParallelLinear(_LoraLinear):
    """A row-parallel layer with an adapter: attention's output, or the MLP's second layer."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)  # type: ignore[misc]
        (name,) = self.lora
        adapter = self.lora[name]
        low = F.linear(self.lora.drop(input_, differs=True), adapter.A)
        if self.config.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return output + F.linear(low, adapter.B) * self.lora.scale, bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        axes = {"weight": 1, **{f"lora.{name}.A": 1 for name in self.lora}}
        return _sharded(self, prefix, axes, sharded_offsets, metadata)


class LoraWholeLinear(_LoraLinear):
    """A linear layer that is replicated on all ranks, like its A and B."""

    def forward(self, x: Tensor) -> Tensor:
        (adapter,) = self.lora.values()
        low = F.linear(self.lora.drop(x, differs=self.config.sequence_parallel), adapter.A)
        return super().forward(x) + F.linear(low, adapter.B) * self.lora.scale  # type: ignore[misc]


def _sharded(linear: Any, prefix: str, axes: dict[str, int], offsets: Any, metadata: Any) -> Any:
    return make_sharded_tensors_for_checkpoint(
        linear.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        offsets,
        tp_group=linear.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


def add_adapters(layer: TransformerLayer, name: str, lora: LoraConfig, *, gated: bool) -> None:
    """Freeze a layer and add adapters to its target linear layers; `gated`: the MLP consists of gate, up and down."""
    layer.requires_grad_(False)
    attention: Any = layer.self_attention
    if isinstance(attention, GatedDeltaNet):
        _adapt_columns(attention.in_proj, name, lora, blocks=attention.blocks, repeats=attention.split.heads.slots)
        _adapt_rows(attention.out_proj, name, lora, linear="out_proj")
    elif isinstance(attention, LatentAttention):
        for linear, module in attention.projections.items():
            _adapt_columns(module, name, lora, blocks={linear: module.weight.shape[0]}, repeats=1)
        for linear, module in attention.whole_projections.items():
            _adapt(module, name, lora, linear=linear, kind=LoraWholeLinear)
        _adapt_rows(attention.linear_proj, name, lora, linear="o_proj")
    else:
        split = attention.split
        names = ("q_proj", "k_proj", "v_proj")
        rows = {name: split.rows(block) for name, block in zip(names, split.fused, strict=False)}  # keys may be values
        _adapt_columns(attention.linear_qkv, name, lora, blocks=rows, repeats=split.slots)
        _adapt_rows(attention.linear_proj, name, lora, linear="o_proj")
    mlp: Any = layer.mlp
    if isinstance(mlp, MoELayer):  # `linears_of` lists its targets
        mlp.router.requires_grad_(lora.train_router)
        adapt_experts(mlp.experts, name, lora)
        mlp, name = mlp.shared_experts, f"{name}.{SHARED_EXPERT}"
    if mlp is None:
        return
    inner = mlp.linear_fc1.weight.shape[0]
    first = {"gate_proj": inner // 2, "up_proj": inner // 2} if gated else {"fc1": inner}
    _adapt_columns(mlp.linear_fc1, name, lora, blocks=first, repeats=1)
    _adapt_rows(mlp.linear_fc2, name, lora, linear="down_proj" if gated else "fc2")


# megatron-core has built the layers: an adapted linear changes its class in place, so that names of weights stay.


def _adapted(lora: type, linear: type) -> type:
    return type(f"Lora{linear.__name__}", (lora, linear), {})


def _adapt_columns(module: Any, layer: str, lora: LoraConfig, *, blocks: dict[str, int], repeats: int) -> None:
    weight = module.weight
    adapters = {
        linear: Adapter(weight.shape[1], rows * repeats, rank=lora.rank, dtype=weight.dtype)
        for linear, rows in blocks.items()
        if is_target(lora, layer, linear)
    }
    if not adapters:
        return
    module.__class__ = _adapted(LoraColumnParallelLinear, type(module))
    module.blocks, module.repeats = blocks, repeats
    module.lora = _Adapters(adapters, lora)
    for adapter in adapters.values():
        adapter.A.sequence_parallel = module.config.sequence_parallel  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(adapter.B, True, 0, 1)


def _adapt_rows(module: Any, layer: str, lora: LoraConfig, *, linear: str) -> None:
    adapter = _adapt(module, layer, lora, linear=linear, kind=LoraRowParallelLinear)
    if adapter is not None:
        set_tensor_model_parallel_attributes(adapter.A, True, 1, 1)


def _adapt(module: Any, layer: str, lora: LoraConfig, *, linear: str, kind: type) -> Adapter | None:
    """Add one adapter, if the linear layer is a target, whose B sees this rank's part of the sequence alone."""
    if not is_target(lora, layer, linear):
        return None
    weight = module.weight
    adapter = Adapter(weight.shape[1], weight.shape[0], rank=lora.rank, dtype=weight.dtype)
    module.__class__ = _adapted(kind, type(module))
    module.lora = _Adapters({linear: adapter}, lora)
    adapter.B.sequence_parallel = module.config.sequence_parallel  # type: ignore[attr-defined]
    if kind is LoraWholeLinear:
        adapter.A.sequence_parallel = module.config.sequence_parallel  # type: ignore[attr-defined]
    return adapter


ALIGNED_BYTES = 16  # of a row that torch's grouped product reads


class ExpertAdapter(nn.Module):
    """A [E, r, K] and B [E, M, r] of the experts of a rank; `whole` names the one that ETP replicates."""

    def __init__(self, weight: Tensor, lora: LoraConfig, *, whole: str, etp: dist.ProcessGroup) -> None:
        super().__init__()
        experts, outputs, inputs = weight.shape
        self.A = nn.Parameter(torch.zeros(experts, lora.rank, inputs, dtype=weight.dtype))
        self.B = nn.Parameter(torch.zeros(experts, outputs, lora.rank, dtype=weight.dtype))
        self.scale, self.whole, self.etp = lora.alpha / lora.rank, whole, etp
        for name, param in self.named_parameters():
            mark(param)
            if name == whole:
                param.shared = etp.rank() > 0  # type: ignore[attr-defined]  # the norm counts one copy

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Return the adapter's output [T, M] for x [T, K], ordered by expert."""
        return grouped(grouped(x, self._factor("A"), rows), self._factor("B"), rows) * self.scale

    def _factor(self, name: str) -> Tensor:
        """Return A or B, padded to a rank that grouped products can read.

        An ETP rank computes some of fc1's outputs, or all of fc2's from some of the inputs: either way it has a part of
        the gradient of the whole factor, which the backward pass sums.
        """
        factor: Tensor = getattr(self, name)
        missing = -factor.shape[1 if name == "A" else 2] % (ALIGNED_BYTES // factor.element_size())
        if name == self.whole:
            factor = copy_to_tensor_model_parallel_region(factor, group=self.etp)
        return F.pad(factor, (0, 0, 0, missing) if name == "A" else (0, missing))


class AdaptedExpertWeight(ExpertWeight):
    """An `ExpertWeight` with an adapter, its submodule `lora`."""

    lora: nn.ModuleDict

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        (adapter,) = self.lora.values()
        return super().forward(x, rows) + adapter(x, rows)


def adapt_experts(experts: Any, layer: str, lora: LoraConfig) -> None:
    """Add adapters to the targets among the two parameters of a layer's experts."""
    assert isinstance(experts, GroupedExperts)
    layer = f"{layer}.{ROUTED_EXPERTS}"
    for module, name, whole in ((experts.linear_fc1, "gate_up_proj", "A"), (experts.linear_fc2, "down_proj", "B")):
        if is_target(lora, layer, name):
            module.__class__ = AdaptedExpertWeight
            adapter = ExpertAdapter(module.weight, lora, whole=whole, etp=experts.groups.expt_tp)
            module.lora = nn.ModuleDict({name: adapter})
