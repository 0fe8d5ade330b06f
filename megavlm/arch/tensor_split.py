"""How tensor-parallel ranks shard any number of attention heads and any MLP width. Without torch.

All ranks hold equally many rows of a weight. Where TP does not divide the rows of the model, some ranks hold padding:
rows of zeros, which stay zero and are left out of checkpoints. `RowRun`s map the rows of a rank to those of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

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

    It is aligned for tensor cores where that adds little and leaves no rank with padding alone. Qwen2.5-VL's tower has
    3,424 channels for its 3,420.
    """
    share = share_of(width, tp)
    aligned = share_of(share, MLP_MULTIPLE) * MLP_MULTIPLE
    adds_little = aligned - share <= share * MLP_MOST_ADDED
    return aligned if adds_little and (tp - 1) * aligned < width else share


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
    """A place for a key/value head on a rank: query heads from `first` on attend to key/value head `group`.

    The slots of a head project equal parts of its key and value; this one projects part `piece` (None: it is padding).
    """

    group: int
    piece: int | None
    first: int
    count: int


@dataclass(frozen=True)
class HeadExchange:
    """What tensor-parallel ranks send one another, so that each slot gets its whole key and value."""

    sends: tuple[tuple[int, ...], ...]  # for each rank: the slots of this rank whose parts it gets
    receives: tuple[int, ...]  # for each rank: the number of parts that come from it
    places: tuple[tuple[int, ...], ...]  # for each slot of this rank: which received parts are its head's, in order


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
        """Return the number of key channels that a slot projects, which is also that of value channels."""
        return share_of(self.width, self.copies)

    @property
    def slot_rows(self) -> int:
        """Return the number of a slot's rows in the fused weight of queries, keys and values."""
        return self.queries * self.width + 2 * self.part_width

    @property
    def local_rows(self) -> int:
        """Return the number of a rank's rows in the fused weight of queries, keys and values."""
        return self.slots * self.slot_rows

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
        """Return a rank's query heads that are padding beside keys that are not: their output must be discarded."""
        if self.copies == 1:  # their keys and values are zeros too, and so is their output
            return ()
        return tuple(
            number * self.queries + query
            for number, slot in enumerate(self.slots_of(rank))
            for query in range(slot.count, self.queries)
        )

    def query_part(self, rank: int, *, axis: int) -> Part:
        """Return the shard that a rank holds of a weight of all query heads."""
        width = self.width
        runs = (
            RowRun(number * self.queries * width, slot.first * width, slot.count * width)
            for number, slot in enumerate(self.slots_of(rank))
        )
        return Part(axis, self.heads * width, _joined(runs))

    def key_part(self, rank: int) -> Part:
        """Return the shard that a rank holds of a weight of all keys, or of all values."""
        runs = (
            RowRun(number * self.part_width, slot.group * self.width + first, count)
            for number, slot in enumerate(self.slots_of(rank))
            for first, count in self._channels(slot)
        )
        return Part(0, self.groups * self.width, _joined(runs))

    def qkv_part(self, rank: int) -> Part:
        """Return the shard that a rank holds of the fused weight: queries, key and value of each key/value head."""
        return Part(0, (self.heads + 2 * self.groups) * self.width, _joined(self._qkv_runs(rank)))

    def _qkv_runs(self, rank: int) -> Iterator[RowRun]:
        width, rows = self.width, self.queries * self.width
        for number, slot in enumerate(self.slots_of(rank)):
            local, real = number * self.slot_rows, slot.group * (self.per_group + 2) * width
            yield RowRun(local, real + (slot.first - slot.group * self.per_group) * width, slot.count * width)
            for first, count in self._channels(slot):
                key = real + self.per_group * width + first
                yield RowRun(local + rows, key, count)
                yield RowRun(local + rows + self.part_width, key + width, count)

    def _channels(self, slot: Slot) -> Iterator[tuple[int, int]]:
        """Yield the first key channel that a slot projects and their number; nothing for a slot of padding."""
        if slot.piece is not None:
            first = slot.piece * self.part_width
            if (count := min(self.part_width, self.width - first)) > 0:
                yield first, count

    def exchange(self, rank: int) -> HeadExchange:
        """Return what a rank sends and receives where key/value heads have several slots."""
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
        """Return whether some rank has query heads that are padding beside keys that are not (`padded_heads`)."""
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
    """Return how the heads of the language model are sharded over `tp` ranks."""
    return head_split(language.num_attention_heads, language.num_query_groups, language.kv_channels, tp)


def context_heads(config: Config) -> int:
    """Return the number of context-parallel ranks that exchange heads. Groups of so many gather keys and values."""
    parallel = config.parallel
    if parallel.cp_comm_type == "all_gather":
        return 1
    if parallel.cp_comm_type == "a2a":
        return parallel.context_parallel_size
    return math.gcd(local_heads(config), parallel.context_parallel_size)


def local_heads(config: Config) -> int:
    """Return the number of query heads of the language model on each tensor-parallel rank, padding included."""
    language = config.model.language
    heads, groups = language.num_attention_heads, language.num_query_groups or language.num_attention_heads
    return head_split(heads, groups, 1, config.parallel.tensor_model_parallel_size).local_heads


def vision_split(vision: VisionConfig, tp: int) -> HeadSplit:
    """Return how the heads of the vision tower are sharded over `tp` ranks."""
    heads = vision.num_attention_heads
    return head_split(heads, heads, vision.hidden_size // heads, tp)


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
