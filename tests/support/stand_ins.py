"""Classes with the interfaces of megatron-core's Transformer Engine wrappers, computing with torch.

What they check is what Transformer Engine checks or takes for granted; names of parameters are its own.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import megatron.core.extensions
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from megavlm.model import layer_modules
from megavlm.model.norm import Norm
from tests.support import te_kernels


class _Pickles:
    """Extra state as Transformer Engine has it: pickled bytes, which must never be loaded."""

    def get_extra_state(self) -> Tensor:
        return torch.frombuffer(bytearray(pickle.dumps({"scale": 1.0})), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None, "extra state was written to a checkpoint"


class _AddsToMainGrad(torch.autograd.Function):
    """A weight in the product whose gradient Transformer Engine adds to `main_grad` (`te/pytorch/module/linear.py`)."""

    added: ClassVar[Counter[str]] = Counter()

    @staticmethod
    def forward(ctx: Any, weight: Any, is_first_microbatch: bool | None) -> Tensor:
        ctx.main_grad = lambda: weight.main_grad
        ctx.is_first_microbatch = is_first_microbatch
        ctx.save_for_backward(weight)
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, wgrad: Tensor) -> tuple[Tensor | None, None]:
        (weight,) = ctx.saved_tensors
        main_grad = weight.main_grad = ctx.main_grad()
        if ctx.is_first_microbatch:
            main_grad.copy_(wgrad)
        else:
            main_grad.add_(wgrad)
        _AddsToMainGrad.added["overwritten" if ctx.is_first_microbatch else "added"] += 1
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None, None
        weight.grad_added_to_main_grad = True
        return torch.full_like(wgrad, math.nan), None  # memory that nobody filled


class WeightGradStore:
    """A queue of products that weight gradients wait for (`te/pytorch/module/_common.py`), off by default."""

    def __init__(self) -> None:
        self.enabled = False

    def delay_wgrad_compute(self) -> bool:
        return self.enabled


class _SplitsBackward(torch.autograd.Function):
    """A linear layer whose backward pass asks the store of its forward pass whether the weight's product waits.

    Where it does the weight, and a bias that the product adds, get no gradient (`te/pytorch/module/linear.py`). What
    the store is given are whole sequences, gathered.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: Any, kwargs: dict[str, Any]) -> Tensor:
        group = kwargs["tp_group"]
        ctx.store, ctx.biased = store, bias is not None
        ctx.gathers, ctx.sums, ctx.group = kwargs["sequence_parallel"], kwargs["allreduce_dgrad"], group
        ctx.save_for_backward(x, weight)
        output = torch.matmul(_gathered(x, group) if ctx.gathers else x, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = gradient.matmul(weight)
        if ctx.gathers:
            whole, of_x = of_x.contiguous(), torch.empty_like(x)
            dist.reduce_scatter_tensor(of_x, whole, group=ctx.group)
        elif ctx.sums:
            dist.all_reduce(of_x, group=ctx.group)

        def wgrad_gemm(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None]:
            rows = dy.contiguous().flatten(0, -2)
            of_weight = rows.t().matmul(x.contiguous().flatten(0, -2))
            return of_weight, rows.sum(dim=0) if ctx.biased else None

        inputs = [_gathered(x, ctx.group) if ctx.gathers else x, gradient]
        if ctx.store is not None and ctx.store.delay_wgrad_compute():
            ctx.store.put(inputs, wgrad_gemm)
            return of_x, None, None, None, None
        return of_x, *wgrad_gemm(*inputs), None, None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


class _Linear(_Pickles):
    def __init__(self, *args: Any, config: Any, bias: bool, skip_bias_add: bool, **kwargs: Any) -> None:
        without = replace(config, gradient_accumulation_fusion=False)
        layer: Any = super()  # of the class that this one is mixed into
        layer.__init__(*args, config=without, bias=bias, skip_bias_add=skip_bias_add, **kwargs)
        self.te_return_bias = skip_bias_add and bias  # else the product adds it
        self.save_original_input = False
        self.is_first_microbatch = True
        self.disable_parameter_transpose_cache = config.disable_parameter_transpose_cache
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion
        self.wgrad_store = WeightGradStore()
        self.apply_bias = bias and not skip_bias_add
        self.gemm_bias_unfused_add = isinstance(self, RowParallelLinear) and self.apply_bias

    def forward(self, x: Tensor) -> Any:
        layer: Any = super()
        output = layer.forward(x)
        self.is_first_microbatch = False
        return output

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.fuse_wgrad_accumulation and weight.requires_grad:
            first = None if self.disable_parameter_transpose_cache else self.is_first_microbatch
            weight = _AddsToMainGrad.apply(weight, first)
        elif torch.is_grad_enabled():
            return _SplitsBackward.apply(input, weight, kwargs["bias"], self.wgrad_store, kwargs)
        layer: Any = super()
        return layer._forward_impl(input, weight, *args, **kwargs)


class TEColumnParallelLinear(_Linear, ColumnParallelLinear):
    pass


class TERowParallelLinear(_Linear, RowParallelLinear):
    pass


class TELayerNormColumnParallelLinear(_Linear, ColumnParallelLinear):
    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = Norm(config, input_size, config.layernorm_epsilon)
        self.eps = config.layernorm_epsilon
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        assert norm.weight is not None
        self.layer_norm_weight = norm.weight
        if norm.bias is not None:
            self.layer_norm_bias = norm.bias

    def forward(self, x: Tensor) -> Any:
        weight = 1 + self.layer_norm_weight if self.zero_centered_gamma else self.layer_norm_weight
        if self.config.normalization == "LayerNorm":
            x = F.layer_norm(x, x.shape[-1:], weight, self.layer_norm_bias, self.eps)
        else:
            x = F.rms_norm(x, x.shape[-1:], weight, self.eps)
        return super().forward(x)


class DotProductAttention(nn.Module):
    """Transformer Engine's own, below megatron-core's: with a tracker it enters its random state in each call."""

    def __init__(
        self, *, attention_dropout: float = 0.0, sequence_parallel: bool = False, get_rng_state_tracker: Any = None
    ) -> None:
        super().__init__()
        enters = get_rng_state_tracker is not None and not sequence_parallel
        self.attention_dropout_ctx = get_rng_state_tracker().fork if enters else nullcontext


class TEDotProductAttention(DotProductAttention):
    """Takes rows as [S, B, heads, D], equal sequences as [B, S, heads, D], others as [T, heads, D] with the longest
    one's length, and its masks by name. What is contiguous must begin its memory.
    """

    calls: ClassVar[list[str]] = []

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str, **kwargs: Any
    ) -> None:
        super().__init__(
            attention_dropout=config.attention_dropout,
            sequence_parallel=config.sequence_parallel,
            get_rng_state_tracker=get_cuda_rng_tracker if get_cuda_rng_tracker().is_initialized() else None,
        )
        assert {"tp", "cp"} <= set(vars(kwargs["pg_collection"]))
        self.scale = kwargs.get("softmax_scale")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        packing = packed_seq_params or PackedSeqParams(qkv_format="sbhd")
        format, inputs = packing.qkv_format, (query, key, value)
        self.calls.append(format)
        assert all(x.stride(-1) == 1 and (x.storage_offset() == 0 or not x.is_contiguous()) for x in inputs)
        causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        if format == "thd":
            return _between_bounds(inputs, packing, causal=causal, scale=self.scale)
        assert packing.cu_seqlens_q is None
        assert packing.max_seqlen_q is None
        assert all(x.dim() == 4 for x in inputs)
        if format == "bshd":
            return _attend(inputs, causal=causal, scale=self.scale)
        assert format == "sbhd"
        return _attend(tuple(x.transpose(0, 1) for x in inputs), causal=causal, scale=self.scale).transpose(0, 1)


def _between_bounds(
    inputs: tuple[Tensor, ...], packing: PackedSeqParams, *, causal: bool, scale: float | None
) -> Tensor:
    assert all(x.dim() == 3 for x in inputs)
    bounds = packing.cu_seqlens_q
    assert bounds is packing.cu_seqlens_kv
    assert bounds.dtype == torch.int32
    assert bounds[0] == 0
    assert bounds[-1] == inputs[0].shape[0]
    assert packing.max_seqlen_q == packing.max_seqlen_kv == int(bounds.diff().max())
    parts = zip(*(x.split(bounds.diff().tolist()) for x in inputs), strict=True)
    return torch.cat([_attend(tuple(x[None] for x in part), causal=causal, scale=scale)[0] for part in parts])


def _attend(inputs: tuple[Tensor, ...], *, causal: bool, scale: float | None) -> Tensor:
    """[B, S, heads, D] each → [B, S, N·D]; of an empty sequence nothing."""
    query, key, value = (x.transpose(1, 2) for x in inputs)
    if not query.numel():
        return query.transpose(1, 2).flatten(2)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


class _CrossEntropy(torch.autograd.Function):
    """What Transformer Engine's kernels do to memory: rows by stride, the gradient in place of the logits at once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> Tensor:
        samples, length, width = logits.shape
        count = samples * length
        rows = logits.detach().as_strided((count, width), (logits.stride(-2), 1))
        found = labels.as_strided((count,), (labels.stride(-1),)) - group.rank() * width
        held = (found >= 0) & (found < width)
        numbers = rows.float()
        places = torch.arange(count, device=rows.device), found.where(held, 0)
        chosen = numbers[places].where(held, -math.inf)
        largest = numbers.amax(1)
        own = torch.stack([largest, (numbers - largest[:, None]).exp().sum(1), chosen])
        every = own.new_empty(group.size() * own.numel())
        dist.all_gather_into_tensor(every, own.flatten(), group=group)
        every = every.view(group.size(), *own.shape)
        total = every[:, 0].amax(0)
        sums = (every[:, 1] * (every[:, 0] - total).exp()).sum(0)
        rows.data.copy_((numbers - total[:, None]).exp() / sums[:, None])  # autograd hears of no kernel's writes
        rows.data[places] -= held.to(rows.dtype)
        ctx.save_for_backward(logits.detach())
        return (sums.log() + total - every[:, 2].amax(0)).reshape(samples, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        logits.data.mul_(gradient.contiguous()[..., None])
        return logits, None, None


def te_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp_group: Any, is_cg_capturable: bool = False) -> Tensor:
    assert is_cg_capturable, "compares the gradients with one on the host"
    return _CrossEntropy.apply(logits, labels, tp_group)


EXTENSION = SimpleNamespace(
    TENorm=Norm,
    TEColumnParallelLinear=TEColumnParallelLinear,
    TERowParallelLinear=TERowParallelLinear,
    TELayerNormColumnParallelLinear=TELayerNormColumnParallelLinear,
    TEDotProductAttention=TEDotProductAttention,
    fused_apply_rotary_pos_emb=te_kernels.fused_apply_rotary_pos_emb,
    te_parallel_cross_entropy=te_parallel_cross_entropy,
)


@contextmanager
def transformer_engine() -> Iterator[None]:
    """Layers are made of these classes, as where Transformer Engine is chosen."""
    with (
        patch.object(layer_modules, "implementation", lambda config: "te"),
        patch.object(megatron.core.extensions, "transformer_engine", EXTENSION, create=True),
        te_kernels.importable(),
    ):
        yield
