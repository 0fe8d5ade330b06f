"""Sharding of any number of attention heads and any MLP width over tensor-parallel ranks. Without torch.

All ranks hold equally many rows of a weight. If TP does not divide the rows of the model, some ranks hold padding:
rows of zeros, which stay zero and are left out of checkpoints. `RowRun`s map the rows of a rank to those of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megavlm.config.derived import is_latent, masks_attention, tower_merge, unwindowed
from megavlm.config.schema import Config, LanguageConfig, VisionConfig

# Rows of tensor cores' products in bf16 must be a multiple of 16 bytes long, and FP8 takes multiples of 16 elements.
MLP_MULTIPLE = 16
MLP_MOST_ADDED = 1 / 16  # of the width; narrower MLPs, which gain little, stay as they are


@dataclass(frozen=True)
class RowRun:
    """A run of rows (or columns) of a rank: rows from `local` on are the model's rows from `real` on."""

    local: int
    real: int
    count: int


@dataclass(frozen=True)
class Part:
    """The shard of a weight that a rank holds along `axis`, which has `size` rows in the model."""

    axis: int
    size: int
    runs: tuple[RowRun, ...]


def share_of(size: int, tp: int) -> int:
    """Return the number of rows on each of `tp` ranks for `size` rows of the model, padding included."""
    return -(-size // tp)


def mlp_share(width: int, tp: int) -> int:
    """Return the width of an MLP on each of `tp` ranks, padding included.

    The width is aligned for tensor cores if that adds at most 1/16 and leaves no rank with padding alone. Qwen2.5-VL's
    tower has 3,424 channels for its 3,420.
    """
    share = share_of(width, tp)
    aligned = share_of(share, MLP_MULTIPLE) * MLP_MULTIPLE
    adds_little = aligned - share <= share * MLP_MOST_ADDED
    return aligned if adds_little and (tp - 1) * aligned < width else share


def merger_width(vision: VisionConfig) -> int:
    """Return the width of the MLP of the tower's merger: a vision layer's times the patches of a block."""
    return vision.ffn_hidden_size * tower_merge(vision) ** 2


def share_runs(
    size: int, tp: int, rank: int, *, blocks: int = 1, share: Callable[[int, int], int] = share_of
) -> tuple[RowRun, ...]:
    """Return a rank's rows of a weight of `blocks` blocks of `size` rows, one below the other (gate and up are two).

    `share` says how many rows of a block each rank holds.
    """
    per_rank = share(size, tp)
    first = rank * per_rank
    count = min(per_rank, size - first)
    return tuple(RowRun(block * per_rank, block * size + first, count) for block in range(blocks) if count > 0)


@dataclass(frozen=True)
class Slot:
    """A place for a key/value head on a rank: `count` query heads from `first` on attend to key/value head `group`.

    The slots of a head project equal parts of its key and value; this one projects part `piece` (None: it is padding).
    """

    group: int
    piece: int | None
    first: int
    count: int


@dataclass(frozen=True)
class HeadExchange:
    """Parts that tensor-parallel ranks send one another, so that each slot gets its whole key and value."""

    sends: tuple[tuple[int, ...], ...]  # for each rank: the slots of this rank whose parts it gets
    receives: tuple[int, ...]  # for each rank: the number of parts that come from it
    places: tuple[tuple[int, ...], ...]  # for each slot of this rank: which received parts are its head's, in order


@dataclass(frozen=True)
class Block:
    """Rows of a weight: `width` rows of each query head, or of each key/value head if `of_keys`."""

    width: int
    of_keys: bool = False


@dataclass(frozen=True)
class LatentHead:
    """Channels of a head of latent attention: without (`still`) and with (`turning`) rotary embedding in queries and
    keys, and those of values.
    """

    still: int
    turning: int
    value: int

    @property
    def rows(self) -> dict[str, int]:
        """Return the rows of a head in each weight that is sharded by heads; columns for `linear_proj`."""
        queries = self.still + self.turning
        return {
            "linear_q_proj": queries,
            "linear_q_up_proj": queries,
            "linear_kv_up_proj": self.still + self.value,
            "linear_proj": self.value,
        }


@dataclass(frozen=True)
class HeadSplit:
    """Sharding of a layer's query heads and key/value heads (`groups`), `width` channels each, over `tp` ranks.

    Each rank has `slots` slots, each with one key/value head and up to `queries` query heads. A key/value head has
    `copies` consecutive slots, on one rank or on neighbours, over which its query heads are spread in order. So query
    head i is in a slot of key/value head i // (heads / groups), as in the model. With 28 heads in 4 groups on 8 ranks,
    two ranks share each key/value head: one has 3 of its 7 query heads and one of zeros, the other has 4.

    Each slot projects a part of the key and the value of its head, and ranks exchange the parts before attention. So no
    weight is on two ranks, and gradients and optimizers need no special case.
    """

    heads: int
    groups: int
    width: int
    tp: int
    slots: int
    copies: int
    gated: bool = False  # each query head has as many channels again that gate its output
    keys_alone: bool = False  # values are keys: the fused weight has none
    latent: LatentHead | None = None  # of latent attention, whose heads have a key and value each

    @property
    def per_group(self) -> int:
        """Return the number of query heads of a key/value head."""
        return self.heads // self.groups

    @property
    def queries(self) -> int:
        """Return the number of query heads of a slot, padding included."""
        return share_of(self.per_group, self.copies)

    @property
    def is_even(self) -> bool:
        """Return whether heads are sharded without padding and without sharing any, as in megatron-core."""
        return self.copies == 1 and self.groups == self.slots * self.tp

    @property
    def local_heads(self) -> int:
        """Return the number of query heads on a rank, padding included."""
        return self.slots * self.queries

    @property
    def part_width(self) -> int:
        """Return the number of key channels that a slot projects, which equals that of value channels."""
        return share_of(self.width, self.copies)

    @property
    def local_rows(self) -> int:
        """Return the number of a rank's rows in the fused weight of queries, keys and values."""
        return self.slots * self.rows(*self.fused)

    def slots_of(self, rank: int) -> tuple[Slot, ...]:
        """Return the slots of a rank."""
        return tuple(self._slot(number) for number in range(rank * self.slots, (rank + 1) * self.slots))

    def _slot(self, number: int) -> Slot:
        group, piece = divmod(number, self.copies)
        if group >= self.groups:
            return Slot(self.groups - 1, None, 0, 0)
        first, end = (self.per_group * at // self.copies for at in (piece, piece + 1))
        return Slot(group, piece, group * self.per_group + first, end - first)

    def padded_heads(self, rank: int) -> tuple[int, ...]:
        """Return a rank's padding query heads that attend to real keys, so that their output must be discarded."""
        if self.copies == 1:  # their keys and values are zeros too, and so is their output
            return ()
        return tuple(
            number * self.queries + query
            for number, slot in enumerate(self.slots_of(rank))
            for query in range(slot.count, self.queries)
        )

    def query_part(self, rank: int, *, axis: int) -> Part:
        """Return a rank's shard of a weight of all query heads."""
        return self.part(rank, Block(self.width), axis=axis)

    def key_part(self, rank: int) -> Part:
        """Return a rank's shard of a weight of all keys, or of all values."""
        return self.part(rank, Block(self.width, of_keys=True))

    def qkv_part(self, rank: int) -> Part:
        """Return a rank's shard of the fused weight, which has each key/value head's queries, key and value."""
        return self.part(rank, *self.fused)

    @property
    def fused(self) -> tuple[Block, ...]:
        """Return the blocks of the weight that projects queries, keys and values."""
        key = Block(self.width, of_keys=True)
        return Block(self.width * (1 + self.gated)), *(key,) * (2 - self.keys_alone)

    def rows(self, *blocks: Block) -> int:
        """Return the rows of a slot in a weight of these blocks."""
        return sum(share_of(each.width, self.copies) if each.of_keys else self.queries * each.width for each in blocks)

    def part(self, rank: int, *blocks: Block, axis: int = 0) -> Part:
        """Return a rank's shard of a weight that has these blocks of each key/value head, one after the other."""
        size = sum(each.width * (self.groups if each.of_keys else self.heads) for each in blocks)
        return Part(axis, size, _joined(self._runs(rank, blocks)))

    def _runs(self, rank: int, blocks: Sequence[Block]) -> Iterator[RowRun]:
        whole = sum(each.width * (1 if each.of_keys else self.per_group) for each in blocks)
        for number, slot in enumerate(self.slots_of(rank)):
            local, real = number * self.rows(*blocks), slot.group * whole
            for block in blocks:
                first, count = self._held(slot, block)
                yield RowRun(local, real + first, count)
                local += self.rows(block)
                real += block.width * (1 if block.of_keys else self.per_group)

    def _held(self, slot: Slot, block: Block) -> tuple[int, int]:
        """Return the first row and the number of rows of its key/value head's block that a slot holds."""
        if not block.of_keys:
            return (slot.first - slot.group * self.per_group) * block.width, slot.count * block.width
        if slot.piece is None:
            return 0, 0
        share = share_of(block.width, self.copies)
        first = slot.piece * share
        return first, max(0, min(share, block.width - first))

    def exchange(self, rank: int) -> HeadExchange:
        """Return the exchange of a rank, for key/value heads with several slots."""
        sends = tuple(self._sent(rank, other) for other in range(self.tp))
        arriving = [
            (slot.group, slot.piece)
            for other in range(self.tp)
            for slot in (self.slots_of(other)[number] for number in self._sent(other, rank))
        ]
        places = tuple(
            tuple(arriving.index((slot.group, piece)) for piece in range(self.copies)) for slot in self.slots_of(rank)
        )
        return HeadExchange(sends, tuple(len(self._sent(other, rank)) for other in range(self.tp)), places)

    def _sent(self, source: int, target: int) -> tuple[int, ...]:
        groups = {slot.group for slot in self.slots_of(target)}
        return tuple(
            number
            for number, slot in enumerate(self.slots_of(source))
            if slot.piece is not None and slot.group in groups
        )

    @cached_property
    def received(self) -> int:
        """Return the largest number of key parts (and of value parts) that a rank receives from other ranks."""
        if self.copies == 1:
            return 0
        exchanges = ((rank, self.exchange(rank)) for rank in range(self.tp))
        return max(sum(exchange.receives) - exchange.receives[rank] for rank, exchange in exchanges)

    @property
    def discards(self) -> bool:
        """Return whether some rank has padding query heads that attend to real keys (`padded_heads`)."""
        filled = self.queries * self.copies == self.per_group and self.groups * self.copies == self.slots * self.tp
        return self.copies > 1 and not filled


@lru_cache(maxsize=1024)
def head_split(heads: int, groups: int, width: int, tp: int) -> HeadSplit:
    """Return the split in which a rank reads and writes the fewest heads, padding included.

    A slot has its query heads, as many output heads, a key and a value. Among equal splits, the one with the fewest
    query heads on a rank is taken.
    """
    per_group = heads // groups
    counts = range(1, min(per_group, tp) + 1)  # with more, some rank would have two slots of a head
    splits = (HeadSplit(heads, groups, width, tp, share_of(groups * n, tp), n) for n in counts)
    best = min(splits, key=lambda split: (split.slots * (split.queries + 1), split.local_heads))
    # Spare slots take a share of the work.
    return replace(best, copies=min(per_group, best.slots * tp // groups))


def language_split(language: LanguageConfig, tp: int) -> HeadSplit:
    """Return how the heads of the language model's attention are sharded over `tp` ranks."""
    split = head_split(language.num_attention_heads, language.num_query_groups, language.kv_channels, tp)
    if is_latent(language):
        turning = language.qk_pos_emb_head_dim
        return replace(split, latent=LatentHead(language.kv_channels - turning, turning, language.v_head_dim))
    return replace(split, gated=language.attention_output_gate, keys_alone=language.keys_as_values)


@dataclass(frozen=True)
class DeltaSplit:
    """Sharding of linear attention over tensor-parallel ranks: like attention, with value heads as its query heads.

    A key head serves some value heads in order, as a key/value head serves query heads, and ranks may share it.
    """

    heads: HeadSplit  # of values in place of queries; `width` is that of a key
    width: int  # of a value

    @property
    def convolved(self) -> tuple[Block, ...]:
        """Return the blocks of the convolution's input: values, queries and keys."""
        key = Block(self.heads.width, of_keys=True)
        return Block(self.width), key, key

    @property
    def projected(self) -> tuple[Block, ...]:
        """Return the blocks of the fused projection: those of `convolved`, the output's gate, and β and decay."""
        return *self.convolved, Block(self.width), Block(1), Block(1)

    @property
    def local_rows(self) -> int:
        """Return the number of a rank's rows in the fused projection, aligned for tensor cores."""
        rows = self.heads.slots * self.heads.rows(*self.projected)
        return share_of(rows, MLP_MULTIPLE) * MLP_MULTIPLE


@lru_cache(maxsize=1024)
def delta_split(language: LanguageConfig, tp: int) -> DeltaSplit:
    """Return how the heads of the language model's linear attention are sharded over `tp` ranks."""
    values, keys = language.linear_num_value_heads, language.linear_num_key_heads
    return DeltaSplit(head_split(values, keys, language.linear_key_head_dim, tp), language.linear_value_head_dim)


def context_heads(config: Config) -> int:
    """Return how many context-parallel ranks exchange heads; groups of this size gather keys and values."""
    parallel = config.parallel
    if parallel.cp_comm_type == "all_gather":
        return 1
    if parallel.cp_comm_type == "a2a":
        return parallel.context_parallel_size
    if gathering_latents_moves_less(config):
        return 1
    return math.gcd(*local_heads(config), parallel.context_parallel_size)


def gathering_latents_moves_less(config: Config) -> bool:
    """Return whether context-parallel ranks send less if they gather latents than if they exchange heads.

    Of C ranks, each receives the latent and the rotated part of a key of all tokens but its own, C·(L + R) numbers for
    each of its own tokens, whatever the number of heads; each then projects all keys and values. An exchange takes
    query, key, value and output of each of N heads, 2·N·(D + V). With 64 heads as in Kimi K2 that is 576·C against
    40,960, and 5,120 on each of eight tensor-parallel ranks. Masks need whole rows.
    """
    language, ranks = config.model.language, config.parallel.context_parallel_size
    if language.kv_lora_rank is None or masks_attention(language):
        return False
    width = language.kv_channels or language.hidden_size // language.num_attention_heads
    exchanged = 2 * local_heads(config)[0] * (width + language.v_head_dim)
    return ranks * (language.kv_lora_rank + language.qk_pos_emb_head_dim) < exchanged


def local_heads(config: Config) -> tuple[int, ...]:
    """Return the numbers of query heads of the language model on each tensor-parallel rank, padding included: of all
    layers, of those without a window if they have other key/value heads, and of values with linear attention.
    """
    language, tp = config.model.language, config.parallel.tensor_model_parallel_size
    heads = language.num_attention_heads
    counts = dict.fromkeys(seen.num_query_groups or heads for seen in (language, unwindowed(language)))
    linear = (delta_split(language, tp).heads.local_heads,) if language.linear_attention_layers else ()
    return *(head_split(heads, groups, 1, tp).local_heads for groups in counts), *linear


def vision_split(vision: VisionConfig, tp: int) -> HeadSplit:
    """Return how the heads of the vision tower are sharded over `tp` ranks."""
    heads = vision.num_attention_heads
    return head_split(heads, vision.num_query_groups or heads, vision.hidden_size // heads, tp)


def _joined(runs: Iterable[RowRun]) -> tuple[RowRun, ...]:
    """Return the runs without empty ones, and with adjacent ones joined."""
    joined: list[RowRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and (last.local + last.count, last.real + last.count) == (run.local, run.real):
            joined[-1] = RowRun(last.local, last.real, last.count + run.count)
        elif run.count:
            joined.append(run)
    return tuple(joined)
