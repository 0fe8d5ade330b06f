"""Transformer Engine's kernels as its modules offer them (2.11), computed by torch: what they ask of their arguments,
the precision that they compute in, and which tensors come back. A call is counted by its name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

calls: Counter[str] = Counter()


def swiglu(input: Tensor, quantizer: Any) -> Tensor:
    return _activation("swiglu", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], input, quantizer)


def geglu(input: Tensor, quantizer: Any) -> Tensor:
    """Its GELU is the tanh approximation."""
    gelu = partial(F.gelu, approximate="tanh")
    return _activation("geglu", lambda x: gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], input, quantizer)


def qgelu(input: Tensor, quantizer: Any) -> Tensor:
    return _activation("qgelu", lambda x: x * torch.sigmoid(1.702 * x), input, quantizer)


def dswiglu(grad: Tensor, input: Tensor, quantizer: Any) -> Tensor:
    gate, up = input.float().chunk(2, -1)
    parts = torch.ops.aten.silu_backward(grad.float() * up, gate), grad.float() * F.silu(gate)
    return _rounded("dswiglu", torch.cat(parts, -1), input, quantizer)


def dgeglu(grad: Tensor, input: Tensor, quantizer: Any) -> Tensor:
    gate, up = input.float().chunk(2, -1)
    of_gate = torch.ops.aten.gelu_backward(grad.float() * up, gate, approximate="tanh")
    of_up = grad.float() * F.gelu(gate, approximate="tanh")
    return _rounded("dgeglu", torch.cat([of_gate, of_up], -1), input, quantizer)


def dqgelu(grad: Tensor, input: Tensor, quantizer: Any) -> Tensor:
    return _rounded("dqgelu", torch.ops.aten.silu_backward(grad.float(), 1.702 * input.float()), input, quantizer)


def _activation(name: str, function: Any, x: Tensor, quantizer: Any) -> Tensor:
    return _rounded(name, function(x.float()), x, quantizer)


def _rounded(name: str, exact: Tensor, like: Tensor, quantizer: Any) -> Tensor:
    assert quantizer is None, "would come back as a tensor of FP8"
    assert not torch.is_grad_enabled(), "kernels know no autograd"
    calls[name] += 1
    return exact.to(like.dtype).contiguous()


class _FusedRope(torch.autograd.Function):
    """x·cos θ + rotated(x)·sin θ in fp32. Backward reads the sine of a channel's partner, as its kernel does."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
        calls["rope"] += 1
        ctx.save_for_backward(freqs)
        ctx.interleaved = interleaved
        return _turned(t, freqs, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        calls["rope backward"] += 1
        (freqs,) = ctx.saved_tensors
        return _turned_back(grad, freqs, ctx.interleaved), None, None


class _FusedQkvRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, sizes: list[int], interleaved: bool) -> Any:
        assert isinstance(sizes, list)
        assert qkv.is_contiguous()
        assert q_freqs.is_contiguous()
        calls["qkv rope"] += 1
        ctx.save_for_backward(q_freqs, k_freqs)
        ctx.sizes, ctx.interleaved = sizes, interleaved
        query, key, value = qkv.split(sizes, dim=3)
        query = query.reshape(*query.shape[:2], -1, sizes[1])
        return _turned(query, q_freqs, interleaved), _turned(key, k_freqs, interleaved), value.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        calls["qkv rope backward"] += 1
        query, key, value = (grad.contiguous() for grad in grads)
        pairs = zip((query, key), ctx.saved_tensors, strict=True)
        query, key = (_turned_back(x, freqs, ctx.interleaved) for x, freqs in pairs)
        parts = query.reshape(*key.shape[:3], ctx.sizes[0]), key, value
        return torch.cat(parts, dim=3), None, None, None, None


def _turned(t: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    assert t.dim() == freqs.dim() == 4
    assert freqs.shape[1:3] == (1, 1), "expected the second and third dims of the freqs tensor equal 1"
    assert freqs.dtype == torch.float32
    assert t.shape[0] <= freqs.shape[0]
    assert freqs.shape[3] <= t.shape[3], "channels past the last angle are copied"
    t, rest = t[..., : freqs.shape[3]], t[..., freqs.shape[3] :]
    turned = (t * freqs.cos() + _partners(t.float(), interleaved) * freqs.sin()).to(t.dtype)
    return torch.cat((turned, rest), -1)


def _turned_back(grad: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    grad, rest = grad[..., : freqs.shape[3]], grad[..., freqs.shape[3] :]
    turned = (grad * freqs.cos() - _partners(grad.float() * freqs.sin(), interleaved)).to(grad.dtype)
    return torch.cat((turned, rest), -1)


def _partners(t: Tensor, interleaved: bool) -> Tensor:
    """(−x₂, x₁) of each pair (x₁, x₂): of the halves, or of even and odd channels."""
    if interleaved:
        return torch.stack((-t[..., 1::2], t[..., ::2]), dim=-1).flatten(-2)
    first, second = t.chunk(2, -1)
    return torch.cat((-second, first), -1)


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    return _FusedRope.apply(t, freqs, interleaved)


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
) -> Any:
    assert tensor_format == "sbhd"
    assert start_positions is None
    return _FusedQkvRope.apply(qkv, q_freqs, k_freqs, qkv_split_arg_list, interleaved)


class SplitAlongDim(torch.autograd.Function):
    """Backward joins nothing where gradients are neighbouring parts of one tensor already."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, dim: int, sizes: list[int]) -> Any:
        ctx.dim, ctx.sizes = dim, sizes
        return torch.split(mixed, sizes, dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        first = grads[0]
        starts = [sum(ctx.sizes[:index]) for index in range(len(grads))]
        one = all(
            grad.stride() == first.stride()
            and grad.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and grad.storage_offset() == start
            for grad, start in zip(grads, starts, strict=True)
        )
        calls["split: nothing copied" if one else "split: joined"] += 1
        return torch.cat(grads, dim=ctx.dim), None, None


class _GroupedProducts(torch.autograd.Function):
    """One product after the other, with the weights that were rounded in the step's first pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], rounded: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *rounded)
        ctx.splits = splits
        return torch.cat([part @ weight.T for part, weight in zip(x.split(splits), rounded, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *rounded = ctx.saved_tensors
        grads, parts = grad.contiguous().split(ctx.splits), x.split(ctx.splits)
        dgrad = torch.cat([grad @ weight for grad, weight in zip(grads, rounded, strict=True)])
        return dgrad, None, None, *(grad.T @ part for grad, part in zip(grads, parts, strict=True))


class GroupedLinear(torch.nn.Module):
    """`te/pytorch/module/grouped_linear.py` of 2.11 in FP8: what it registers, checks and keeps."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: Any = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias, self._fp8_workspaces = num_gemms, bias, dict[str, Tensor]()
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            (init_method or torch.nn.init.normal_)(weight)
            self.register_parameter(f"weight{number}", weight)
            assert not bias
            setattr(self, f"bias{number}", torch.empty(0))

    def get_extra_state(self) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        assert state is None, "extra state was written to a checkpoint"

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        calls["grouped"] += 1
        assert len(m_splits) == self.num_gemms
        assert all(type(each) is int and each % 16 == 0 for each in m_splits), "FP8 products of such rows"
        assert sum(m_splits) == inp.shape[0]
        assert all(param.dtype == inp.dtype for param in self.parameters())
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        assert all(weight.shape[1] == inp.shape[1] and weight.is_contiguous() for weight in weights)
        for number, weight in enumerate(weights):
            if is_first_microbatch is None or is_first_microbatch:
                self._fp8_workspaces[f"weight{number}"] = weight.detach().clone()
        rounded = [self._fp8_workspaces[f"weight{number}"] for number in range(self.num_gemms)]
        return _GroupedProducts.apply(inp.contiguous(), m_splits, rounded, *weights)


def _module(name: str, *offered: Any) -> ModuleType:
    module = ModuleType(f"transformer_engine{name}")
    vars(module).update({each.__name__: each for each in offered})
    return module


_MODULES = {
    module.__name__: module
    for module in (
        _module("_torch", swiglu, dswiglu, geglu, dgeglu, qgelu, dqgelu),
        _module(""),
        _module(".pytorch", GroupedLinear),
        _module(".pytorch.attention"),
        _module(".pytorch.attention.rope", apply_fused_qkv_rotary_pos_emb),
        _module(".pytorch.utils", SplitAlongDim),
    )
}


@contextmanager
def importable() -> Iterator[None]:
    """In it megavlm imports these where it asks for Transformer Engine's."""
    before = {name: sys.modules[name] for name in _MODULES if name in sys.modules}
    sys.modules.update(_MODULES)
    yield
    for name in _MODULES:
        del sys.modules[name]
    sys.modules.update(before)
