"""Transformer Engine's modules of a layer, through megatron-core's wrappers, and its FP8 contexts.

The module is imported only if Transformer Engine is chosen. It is written against megatron-core 0.16.1 and Transformer
Engine 2.9 to 2.11 (0.19.2 and 2.20.2 have the same names). Tests on a CPU replace Transformer Engine's classes by
stand-ins; `tests/gpu` runs the originals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megavlm.config.derived import layer_precision
from megavlm.config.schema import Config
from megavlm.model.layer_modules import (
    ACTIVATIONS,
    Activation,
    Execution,
    LayerModules,
    keeping_input,
    with_bias_inside,
)
from megavlm.model.packing import Packing, attend_in_all, in_rows, in_sequence, is_faster_at_once
from megavlm.model.rotary import Heads, Rotary, Rotation
from megavlm.parallel.groups import Groups

# Norms that are fused into the next linear layer. Checkpoints name them as if they were separate.
_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def te_modules(extension: Any, *, fused_norm: bool, interleaved: bool = False) -> LayerModules:
    """Return the modules of `megatron.core.extensions.transformer_engine`, or of a stand-in for tests."""
    column = extension.TELayerNormColumnParallelLinear if fused_norm else extension.TEColumnParallelLinear
    return LayerModules(
        norm=IdentityOp if fused_norm else extension.TENorm,
        norm_alone=extension.TENorm,
        post_norm=extension.TENorm,
        column_linear=with_bias_inside(column),
        column_linear_alone=with_bias_inside(extension.TEColumnParallelLinear),
        row_linear=with_bias_inside(extension.TERowParallelLinear),
        core_attention=flattened(extension.TEDotProductAttention),
        activations=ACTIVATIONS | te_activations(),
        rotary=TeRotary(extension.fused_apply_rotary_pos_emb, interleaved=interleaved),
        keys=_FUSED if fused_norm else {},
    )


def te_activations() -> dict[str, Activation]:
    """Return SwiGLU, GeGLU (tanh approximation) and quick GELU, with one kernel forward and one backward."""
    import transformer_engine_torch as tex

    def kernel(forward: Any, backward: Any) -> Activation:
        # The last argument would be a quantizer of the output.
        return keeping_input(lambda x: forward(x, None), lambda grad, x: backward(grad, x, None))

    return {
        "swiglu": kernel(tex.swiglu, tex.dswiglu),
        "geglu": kernel(tex.geglu, tex.dgeglu),
        "quick_gelu": kernel(tex.qgelu, tex.dqgelu),
    }


class TeRotary(Rotary):
    """Rotary embedding with one kernel forward and one backward, or one for each tensor if queries and keys have norms.

    The kernels take fp32 angles [S, 1, 1, D], and no factor. If rows have angles of their own, the rows are
    concatenated.
    """

    def __init__(self, rotate: Any, *, interleaved: bool = False) -> None:
        """Take megatron-core's `fused_apply_rotary_pos_emb` as `rotate`."""
        from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb
        from transformer_engine.pytorch.utils import SplitAlongDim

        super().__init__(interleaved=interleaved)
        self._rotate, self._split, self._both = rotate, SplitAlongDim, apply_fused_qkv_rotary_pos_emb
        self._pairs = {"interleaved": interleaved}

    def split(self, mixed: Tensor, sizes: Sequence[int]) -> Heads:
        """Return queries, keys and values. The backward pass copies nothing if gradients are parts of one tensor."""
        query, key, value = self._split.apply(mixed, 3, sizes)
        return query.reshape(*query.shape[:2], -1, sizes[1]), key, value

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        if rotation.of_axes or rotation.factor != 1:
            return super().rotate(x, rotation)
        flat, angles = _in_one_row(x, rotation.angles)
        return self._rotate(flat, angles, **self._pairs).view(x.shape)

    def split_and_rotate(self, mixed: Tensor, sizes: Sequence[int], rotation: Rotation) -> Heads:
        if rotation.factor != 1:
            query, key, value = self.split(mixed, sizes)
            return self.rotate(query, rotation), self.rotate(key, rotation), value
        flat, angles = _in_one_row(mixed, rotation.angles)
        heads = self._both(flat, angles, angles, sizes, **self._pairs)
        query, key, value = (x.view(*mixed.shape[:2], *x.shape[2:]) for x in heads)
        return query, key, value


def _in_one_row(x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [S, B, …] and angles [S, B or 1, 1, D], both as [S·B, 1, …] where each row has its own angles."""
    if angles.shape[1] == 1:
        return x, angles
    return x.flatten(0, 1)[:, None], angles.flatten(0, 1)[:, None]


def _without_idle_generator(attention: type) -> type:
    """Return Transformer Engine's attention class, without random state if there is no dropout.

    The class is the base of `attention`. Entering the state took 0.1 ms of each call on the host.
    """

    class TEAttention(attention.__base__):  # type: ignore[name-defined]
        def __init__(
            self, *args: Any, attention_dropout: float, get_rng_state_tracker: Any = None, **kwargs: Any
        ) -> None:
            tracker = get_rng_state_tracker if attention_dropout else None
            kwargs["sequence_parallel"] = False  # else it relies on a block of layers that enters the state
            super().__init__(*args, attention_dropout=attention_dropout, get_rng_state_tracker=tracker, **kwargs)

    return TEAttention


@cache
def flattened(attention: type) -> type:
    """Return a subclass of `TEDotProductAttention` that flattens packed rows, and attends with `calls`.

    megatron-core's attention flattens a single row alone, and takes "thd" for the layout of rotary positions as well.
    """

    class FlattenedAttention(attention, _without_idle_generator(attention)):  # type: ignore[misc, unused-ignore]
        def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
            super().__init__(config, *args, softmax_scale=softmax_scale, **kwargs)
            self.cached_scale, self.drops = softmax_scale, config.attention_dropout > 0

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: AttnMaskType,
            *args: Any,
            packed_seq_params: Packing | None = None,
            **kwargs: Any,
        ) -> Tensor:
            """Return the attention [S, B, N·D] of query [S, B, N, D] to key and value [S, B, G, D]."""
            if packed_seq_params is None:
                return super().forward(query, key, value, attention_mask, attn_mask_type, *args, **kwargs)
            packing = packed_seq_params
            if packing.cached is not None:
                return packing.cached.attend(self, query, key, value, scale=self.cached_scale)
            rows = query.shape[1]
            query, key, value = inputs = tuple(in_sequence(packing, x) for x in (query, key, value))
            if attn_mask_type is AttnMaskType.no_mask and not self.drops and is_faster_at_once(query, key, packing):
                outputs = [attend_in_all(query, key, value, packing, causal=False, scale=self.cached_scale)]
            else:
                outputs = [
                    super(FlattenedAttention, self)
                    .forward(*tensors, attention_mask, attn_mask_type, *args, packed_seq_params=layout, **kwargs)
                    .flatten(0, -2)
                    for tensors, layout in calls(packing, inputs)
                ]
            return in_rows(packing, torch.cat(outputs) if len(outputs) > 1 else outputs[0], rows=rows)

    return FlattenedAttention


def calls(packing: Packing, inputs: tuple[Tensor, ...]) -> Iterator[tuple[tuple[Tensor, ...], PackedSeqParams]]:
    """Yield the tensors and layout of each attention call, for the sequences of query, key and value [T, heads, D].

    Equal sequences at the beginning are a batch ("bshd"), the others are packed ("thd"). cuDNN computes "thd"
    as if each sequence were as long as all tokens together, which is mostly wasted on hundreds of short ones.
    Transformer Engine takes contiguous tensors only if they begin their storage, so those behind a batch are copied.
    """
    count, length = packing.batch
    split, total = count * length, inputs[0].shape[0]
    front, behind = inputs, inputs
    if 0 < split < total:
        front, behind = zip(*(x.split([split, total - split]) for x in inputs), strict=True)
        behind = tuple(x.clone(memory_format=torch.contiguous_format) for x in behind)
    if split:
        yield tuple(x.unflatten(0, (count, length)) for x in front), PackedSeqParams(qkv_format="bshd")
    if packing.rest is not None:
        yield behind, packing.rest


class Fp8Execution(Execution):
    """Transformer Engine's FP8 contexts around the layers that run in FP8.

    Delayed scaling updates its histories at the end of the outermost region, for every layer that ran inside: so one
    region spans the chunk, and layers in high precision are regions without FP8 in it. Other recipes have no history:
    each layer is a region of its own, as in megatron-core's own block of layers.
    """

    def __init__(self, config: Config, groups: Groups) -> None:
        self.config = config
        self.groups = groups
        self.delayed = config.precision.fp8_recipe == "delayed"

    def chunk(self, layers: Sequence[tuple[str, Any]]) -> AbstractContextManager[Any]:
        for name, layer in layers:
            if self.delayed and self._in_fp8(name):
                return _fp8_region(layer.config)
        return nullcontext()

    def layer(self, name: str, layer: Any) -> AbstractContextManager[Any]:
        if self._in_fp8(name):
            return nullcontext() if self.delayed else _fp8_region(layer.config)
        return _high_region() if self.delayed else nullcontext()

    def recomputed(self, layer: Any, run: Any, hidden: Tensor) -> Tensor:
        """Recompute with Transformer Engine's checkpoint: the second run reads the scales of the first and records
        none.
        """
        from megatron.core.extensions.transformer_engine import te_checkpoint

        return te_checkpoint(run, False, get_cuda_rng_tracker, self.groups.tp, hidden)

    def _in_fp8(self, name: str) -> bool:
        return layer_precision(name, self.config) == "fp8"


def _fp8_region(layer_config: Any) -> AbstractContextManager[Any]:
    from megatron.core.fp8_utils import get_fp8_context

    return get_fp8_context(layer_config)


def _high_region() -> AbstractContextManager[Any]:
    import transformer_engine.pytorch as te

    return te.fp8_autocast(enabled=False)
