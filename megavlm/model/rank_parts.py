"""Shards of weights whose rows are not divided evenly over tensor-parallel ranks, or are padded for alignment.

These shards show checkpoints, initial weights and imports the model's rows alone, without padding or shared heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megavlm.arch.ends import Projector
from megavlm.arch.kinds import KINDS
from megavlm.arch.layers import AUDIO_LAYER, LANGUAGE_LAYER, VISION_LAYER, VISION_MERGER, kind_of, number_of, tower_of
from megavlm.arch.tensor_split import (
    Block,
    HeadSplit,
    Part,
    delta_split,
    language_split,
    merger_width,
    mlp_share,
    share_runs,
    vision_split,
)
from megavlm.config.derived import is_gated, is_latent, is_linear, of_layer
from megavlm.config.schema import ModelConfig


def part_of_rank(key: str, model: ModelConfig, *, tp: int, rank: int) -> Part | None:
    """Return a rank's shard of the weight of this global name.

    It is None if the weight is replicated, divided evenly, or padded at its end (`vlm.is_padded_for_tp`).
    """
    kind = kind_of(key)
    leaf = key.removeprefix(kind).lstrip("0123456789.")
    layer = KINDS[kind]
    if isinstance(layer, Projector):
        split = layer.connector(model).splits(model).get(leaf)
        return None if split is None else split.part(tp, rank)
    if kind not in (AUDIO_LAYER, VISION_LAYER, VISION_MERGER, LANGUAGE_LAYER):
        return None
    block, _, leaf = leaf.partition(".")
    if block == "self_attention" and kind == LANGUAGE_LAYER and is_linear(model.language, number_of(key)):
        return _part_of_linear_attention(leaf, model, tp, rank)
    if block == "self_attention" and kind == LANGUAGE_LAYER and is_latent(model.language):
        return _part_of_latent_attention(leaf, language_split(model.language, tp), rank)
    if block == "self_attention":
        heads = vision_split(tower_of(key, model), tp)
        if kind == LANGUAGE_LAYER:
            heads = language_split(of_layer(model.language, number_of(key)), tp)
        padded_at_end = kind != LANGUAGE_LAYER and heads.groups == heads.heads
        return None if padded_at_end or heads.is_even else _part_of_attention(leaf, heads, rank)
    if block == "mlp":
        vision, language = tower_of(key, model), kind == LANGUAGE_LAYER
        width = merger_width(vision) if kind == VISION_MERGER else vision.ffn_hidden_size
        gated = language or is_gated(vision)
        return _part_of_mlp(leaf, model.language.ffn_hidden_size if language else width, gated, tp, rank)
    return None


def _part_of_attention(leaf: str, split: HeadSplit, rank: int) -> Part | None:
    parts: dict[str, Callable[[], Part]] = {
        "linear_qkv.weight": lambda: split.qkv_part(rank),
        "linear_qkv.bias": lambda: split.qkv_part(rank),
        "linear_qkv.lora.q_proj.B": lambda: split.part(rank, split.fused[0]),
        "linear_qkv.lora.k_proj.B": lambda: split.key_part(rank),
        "linear_qkv.lora.v_proj.B": lambda: split.key_part(rank),
        "core_attention.sinks": lambda: split.part(rank, Block(1)),
        "linear_proj.weight": lambda: split.query_part(rank, axis=1),
        "linear_proj.lora.o_proj.A": lambda: split.query_part(rank, axis=1),
    }
    return parts[leaf]() if leaf in parts else None


def _part_of_linear_attention(leaf: str, model: ModelConfig, tp: int, rank: int) -> Part | None:
    split = delta_split(model.language, tp)
    blocks = {
        "in_proj.weight": split.projected,
        "conv1d.weight": split.convolved,
        "A_log": (Block(1),),
        "dt_bias": (Block(1),),
        "in_proj.lora.in_proj_qkv.B": split.convolved,
        "in_proj.lora.in_proj_z.B": (Block(split.width),),
        "in_proj.lora.in_proj_b.B": (Block(1),),
        "in_proj.lora.in_proj_a.B": (Block(1),),
        "out_proj.weight": (Block(split.width),),
        "out_proj.lora.out_proj.A": (Block(split.width),),
    }
    if leaf not in blocks:
        return None
    return split.heads.part(rank, *blocks[leaf], axis=1 if leaf.startswith("out_proj.") else 0)


def _part_of_latent_attention(leaf: str, split: HeadSplit, rank: int) -> Part | None:
    name, _, parameter = leaf.partition(".")
    assert split.latent is not None
    output = name == "linear_proj"
    if name not in split.latent.rows or split.is_even or parameter.endswith(".B" if output else ".A"):
        return None
    return split.part(rank, Block(split.latent.rows[name]), axis=int(output))


def _part_of_mlp(leaf: str, width: int, gated: bool, tp: int, rank: int) -> Part | None:
    if mlp_share(width, tp) * tp == width:
        return None
    runs = partial(share_runs, width, tp, rank, share=mlp_share)
    if leaf in ("linear_fc1.weight", "linear_fc1.bias"):
        return Part(0, (1 + gated) * width, runs(blocks=1 + gated))
    if leaf.startswith("linear_fc1.lora.") and leaf.endswith(".B"):
        return Part(0, width, runs())
    if leaf == "linear_fc2.weight" or (leaf.startswith("linear_fc2.lora.") and leaf.endswith(".A")):
        return Part(1, width, runs())
    return None


def laid_out(entry: ShardedTensor | ShardedTensorFactory, part: Part) -> ShardedTensorFactory:
    """Return the entry of a sharded state dict that saves and loads the model's rows on a rank, without padding."""

    def build(key: str, held: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor(
                key,
                data,
                data.dtype,
                tuple(data.shape),
                global_shape=_with(held.shape, part.axis, part.size),
                global_offset=_with((0,) * held.ndim, part.axis, run.real),
                axis_fragmentations=None,  # not a grid: runs differ in length
                replica_id=replica_id,
            )
            for run in part.runs
            for data in (held.narrow(part.axis, run.local, run.count),)
        ]

    def merge(pieces: list[Tensor]) -> Tensor:
        rows = torch.zeros_like(entry.data, dtype=pieces[0].dtype if pieces else None)
        for run, piece in zip(part.runs, pieces, strict=True):
            rows.narrow(part.axis, run.local, run.count).copy_(piece)
        return rows

    return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id)


def _with(sizes: Any, axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])
