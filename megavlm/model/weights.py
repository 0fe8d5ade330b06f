"""Initial weights from a seed and the global name of each tensor, so that they are the same in every layout.

The sharding that checkpoints use says which slice of which named tensor a rank holds; the whole tensor is drawn
from a generator seeded by the name, and the rank keeps its slice. The experts of a layer are one tensor, but each
expert has a generator of its own, so that a rank draws only the experts that it holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megavlm.arch.layers import LANGUAGE_NORM, MTP_NORM, part_of, tower_of
from megavlm.arch.tensor_split import vision_split
from megavlm.config.lora_config import is_adapter
from megavlm.config.schema import Config, ModelConfig
from megavlm.model.vlm import HoldsWeights, is_padded_for_tp


@torch.no_grad()
def initialize(
    chunk: HoldsWeights, config: Config, *, vocab_size: int, drawn: Callable[[str], bool] = lambda key: True
) -> None:
    """Initialise a chunk's parameters: N(0, σ²), σ/√(2L) for layers that end a residual branch (GPT-2), zero biases.

    `drawn` selects parameters by name; the others stay as they are.
    """
    last_key, last = "", torch.empty(0)
    for shard in chunk.shards():
        if not drawn(shard.key):
            continue
        shape, index = tuple(shard.global_shape), index_of(shard)
        experts = index[0] if ".experts." in shard.key else None  # a rank's shards of a tensor are of the same experts
        if shard.key != last_key:  # the two halves of a gated layer are slices of one tensor
            if experts is not None:
                last = _experts(shard.key, shape[1:], config, range(experts.start, experts.stop))
            else:
                last = _whole(shard.key, shape, config, vocab_size=vocab_size)
            last_key = shard.key
        shard.data.copy_(last[index if experts is None else (slice(None), *index[1:])])


@torch.no_grad()
def set_whole(chunks: Sequence[HoldsWeights], read: Callable[[str], Tensor | None]) -> None:
    """Set the weights of chunks from whole tensors, which `read` returns without the padding of any layout; None leaves
    a weight as it is.
    """
    for chunk in chunks:
        for shard in chunk.shards():
            if (values := read(shard.key)) is None:
                continue
            padded = values.new_zeros(shard.global_shape)
            both = tuple(slice(min(sizes)) for sizes in zip(values.shape, padded.shape, strict=True))
            padded[both] = values[both]
            shard.data.copy_(padded[index_of(shard)])


def index_of(shard: ShardedTensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that a shard covers."""
    return tuple(
        slice(start, start + length) for start, length in zip(shard.global_offset, shard.local_shape, strict=True)
    )


def _whole(key: str, shape: tuple[int, ...], config: Config, *, vocab_size: int) -> Tensor:
    """Return a whole parameter: drawn with its real shape, padded with zeros to the shape that TP needs."""
    real = real_shape(key, shape, config.model, vocab_size=vocab_size)
    whole = torch.zeros(shape)
    whole[tuple(slice(size) for size in real)] = _draw(key, real, config)
    return whole


def _experts(key: str, shape: tuple[int, ...], config: Config, numbers: range) -> Tensor:
    """Return the weights [experts, *shape] of the experts with these numbers."""
    return torch.stack([_draw(key, shape, config, seeded_by=f"{key}[{number}]") for number in numbers])


def real_shape(key: str, shape: tuple[int, ...], model: ModelConfig, *, vocab_size: int) -> tuple[int, ...]:
    """Return a parameter's shape without TP padding (vocabulary rows, vision heads)."""
    if not is_padded_for_tp(key):
        return shape
    if part_of(key) != "vision":
        return (vocab_size, *shape[1:])
    tower = tower_of(key, model)
    split = vision_split(tower, 1)
    if key.endswith((".linear_proj.weight", ".A")):  # these read all heads, or the hidden states, which are as wide
        return (shape[0], tower.hidden_size)
    if is_adapter(key):  # B writes the heads of q, k or v
        return ((split.heads if ".q_proj." in key else split.groups) * split.width, shape[1])
    return (split.local_rows, *shape[1:])


def _draw(key: str, shape: tuple[int, ...], config: Config, *, seeded_by: str | None = None) -> Tensor:
    model, generator = config.model, _generator(seeded_by or key, config)
    leaf = key.rpartition(".")[2]
    if leaf == "log_scale":
        return torch.full(shape, -math.log(model.objective.temperature))
    if leaf == "logit_bias":
        return torch.full(shape, model.objective.sigmoid_bias)
    if leaf in ("bias", "expert_bias", "std_bias"):
        return torch.zeros(shape)
    if leaf in ("layer_scalar", "std_scale", "input_scale", "expert_scale"):
        return torch.ones(shape)
    if leaf == "scale":  # InternViT starts its residual branches small
        return torch.full(shape, 0.1)
    if leaf == "A_log":  # away from log 0, as in Transformers
        return torch.empty(shape).uniform_(0.01, 16, generator=generator).log()
    if leaf == "dt_bias":  # softplus(dt_bias) from 0.001 to 0.1, so that states last for many tokens (Mamba-2)
        steps = torch.empty(shape).uniform_(math.log(0.001), math.log(0.1), generator=generator).exp()
        return steps.expm1().log()
    if key.endswith(".conv1d.weight"):  # torch's Conv1d: Kaiming's uniform with a = √5
        return torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
    if leaf == "weight" and len(shape) == 1:  # of a norm
        return torch.zeros(shape) if _is_added_to_one(key, model) else torch.ones(shape)
    if is_adapter(key) and leaf == "B":  # so that training starts from the adapted model itself
        return torch.zeros(shape)
    if is_adapter(key):  # as PEFT draws A: Kaiming's uniform with a = √5, which is ±1/√inputs
        return torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
    std = 1 / math.sqrt(shape[0]) if leaf == "image_newline" else model.init_method_std  # LLaVA-NeXT
    ends = ("self_attention.linear_proj.weight", "self_attention.out_proj.weight")
    if key.endswith(ends) or (".mlp." in key and key.endswith("linear_fc2.weight")):
        layers = tower_of(key, model).num_layers if part_of(key) == "vision" else model.language.num_layers
        std /= math.sqrt(2 * layers)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _is_added_to_one(key: str, model: ModelConfig) -> bool:
    """Return whether a norm multiplies by 1 + weight."""
    if part_of(key) == "vision" or key.endswith(".out_norm.weight"):
        return False
    if key.startswith((LANGUAGE_NORM, MTP_NORM)) and not model.language.final_norm_1p:
        return False
    return (model.language if part_of(key) == "language" else model.projector).apply_layernorm_1p


def _generator(name: str, config: Config) -> torch.Generator:
    digest = hashlib.sha256(f"{config.train.seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
