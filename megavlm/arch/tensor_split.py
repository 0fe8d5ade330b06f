"""How tensor-parallel ranks divide attention heads and MLP widths of any number. No torch.

All ranks hold equally many rows of a weight. Where the rows of the model do not divide, some ranks hold rows of zeros,
which stay zero, and checkpoints leave out. `RowRun`s say which rows of a rank are which rows of the model.
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
    """Says where consecutive rows (or columns) of a rank lie: those from `local` on are the model's from `real` on."""

    local: int
    real: int
    count: int


@dataclass(frozen=True)
class Part:
    """What a rank holds of a weight along `axis`, which has `size` rows in the model."""

    axis: int
    size: int
    runs: tuple[RowRun, ...]


def share_of(size: int, tp: int) -> int:
    """Return how many of `size` rows each of `tp` ranks holds, padding included."""
    return -(-size // tp)


def mlp_share(width: int, tp: int) -> int:
    """Return the width of an MLP on each of `tp` ranks, padding included: aligned for tensor cores where that adds
    little and leaves each rank a part of the model's width. Qwen2.5-VL's tower has 3,424 channels for its 3,420.
    """
    share = share_of(width, tp)
    aligned = share_of(share, MLP_MULTIPLE) * MLP_MULTIPLE
    adds_little = aligned - share <= share * MLP_MOST_ADDED
    return aligned if adds_little and (tp - 1) * aligned < width else share


def share_runs(
    size: int, tp: int, rank: int, *, blocks: int = 1, share: Callable[[int, int], int] = share_of
) -> tuple[RowRun, ...]:
    """Return the rows of a rank, of each of several blocks of `size` rows, one below the other: gate and up are two.

    `share` says how many rows of a block each rank holds.
    """
    each = share(size, tp)
    first = rank * each
    count = min(each, size - first)
    return tuple(RowRun(block * each, block * size + first, count) for block in range(blocks) if count > 0)


@dataclass(frozen=True)
class Slot:
    """A place for a key/value head on a rank: query heads `first` … attend to key/value head `group`.

    The rank computes number `piece` of the equal parts into which the slots of this head divide its key and value; None
    if all of the slot is padding.
    """

    group: int
    piece: int | None
    first: int
    count: int


@dataclass(frozen=True)
class HeadExchange:
    """Says what tensor-parallel ranks send one another, so that each slot gets its whole key and value."""

    sends: tuple[tuple[int, ...], ...]  # to each rank, the parts in these of this rank's slots
    receives: tuple[int, ...]  # from each rank, so many parts
    places: tuple[tuple[int, ...], ...]  # for each of this rank's slots, which received parts are its head's, in order


@dataclass(frozen=True)
class HeadSplit:
    """The query heads of a layer and its key/value heads (`groups`) of `width` channels, divided over `tp` ranks.

    Each rank has `slots` slots of one key/value head and up to `queries` query heads. A key/value head has `copies` of
    them, one after the other, on one rank or on neighbours, which divide its query heads in order. So query head i is
    in a slot of key/value head i // (heads / groups), as in the model. 28 heads in 4 groups on 8 ranks: two ranks share
    each key/value head, one has 3 of its 7 query heads, and one of zeros, and the other has 4.

    The slots of a key/value head divide its rows: each projects a part of the key and of the value, and ranks exchange
    the parts before attention. So no weight is on two ranks, and gradients and optimizer know nothing of it.
    """

    heads: int
    groups: int
    width: int
    tp: int
    slots: int
    copies: int

    @property
    def per_group(self) -> int:
        """Return the query heads of a key/value head."""
        return self.heads // self.groups

    @property
    def queries(self) -> int:
        return share_of(self.per_group, self.copies)

    @property
    def is_even(self) -> bool:
        """Return whether ranks divide the heads without padding and without sharing any, as megatron-core does."""
        return self.copies == 1 and self.groups == self.slots * self.tp

    @property
    def local_heads(self) -> int:
        """Return the query heads of a rank, padding included."""
        return self.slots * self.queries

    @property
    def part_width(self) -> int:
        """Return how many channels of a key a slot projects, and how many of a value."""
        return share_of(self.width, self.copies)

    @property
    def slot_rows(self) -> int:
        """Return the rows of a slot in the weight that projects queries, keys and values."""
        return self.queries * self.width + 2 * self.part_width

    @property
    def local_rows(self) -> int:
        """Return the rows of a rank in that weight."""
        return self.slots * self.slot_rows

    def slots_of(self, rank: int) -> tuple[Slot, ...]:
        return tuple(self._slot(number) for number in range(rank * self.slots, (rank + 1) * self.slots))

    def _slot(self, number: int) -> Slot:
        group, piece = divmod(number, self.copies)
        if group >= self.groups:
            return Slot(self.groups - 1, None, 0, 0)
        first, end = (self.per_group * at // self.copies for at in (piece, piece + 1))
        return Slot(group, piece, group * self.per_group + first, end - first)

    def padded_heads(self, rank: int) -> tuple[int, ...]:
        """Return which query heads of a rank are padding beside keys that are not: their output must be discarded."""
        if self.copies == 1:  # then their keys and values are zeros too, and so is what they attend to
            return ()
        return tuple(
            number * self.queries + query
            for number, slot in enumerate(self.slots_of(rank))
            for query in range(slot.count, self.queries)
        )

    def query_part(self, rank: int, *, axis: int) -> Part:
        """Return what a rank holds of a weight of all query heads."""
        width = self.width
        runs = (
            RowRun(number * self.queries * width, slot.first * width, slot.count * width)
            for number, slot in enumerate(self.slots_of(rank))
        )
        return Part(axis, self.heads * width, _joined(runs))

    def key_part(self, rank: int) -> Part:
        """Return what a rank holds of a weight of all keys, or of all values."""
        runs = (
            RowRun(number * self.part_width, slot.group * self.width + first, count)
            for number, slot in enumerate(self.slots_of(rank))
            for first, count in self._channels(slot)
        )
        return Part(0, self.groups * self.width, _joined(runs))

    def qkv_part(self, rank: int) -> Part:
        """Return what a rank holds of the fused weight, which has each key/value head's queries, key and value."""
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
        """Yield the first of the channels of its key that a slot projects, and their number, if there are any."""
        if slot.piece is not None:
            first = slot.piece * self.part_width
            if (count := min(self.part_width, self.width - first)) > 0:
                yield first, count

    def exchange(self, rank: int) -> HeadExchange:
        """Return what a rank sends and gets where key/value heads have several slots."""
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
        wanted = {slot.group for slot in self.slots_of(target)}
        return tuple(
            number
            for number, slot in enumerate(self.slots_of(source))
            if slot.piece is not None and slot.group in wanted
        )

    @cached_property
    def received(self) -> int:
        """Return how many parts of keys, and of values, the rank that gets most of them gets from other ranks."""
        if self.copies == 1:
            return 0
        exchanges = ((rank, self.exchange(rank)) for rank in range(self.tp))
        return max(sum(each.receives) - each.receives[rank] for rank, each in exchanges)

    @property
    def discards(self) -> bool:
        """Return whether some rank has query heads that are padding beside keys that are not (`padded_heads`)."""
        filled = self.queries * self.copies == self.per_group and self.groups * self.copies == self.slots * self.tp
        return self.copies > 1 and not filled


@lru_cache(maxsize=1024)
def head_split(heads: int, groups: int, width: int, tp: int) -> HeadSplit:
    """Return the split in which a rank has the fewest heads to read and write, padding included, and then the fewest
    query heads. A slot has its queries, as many outputs, a key and a value.
    """
    per_group = heads // groups
    counts = range(1, min(per_group, tp) + 1)  # with more, some rank would have two slots of a head
    splits = (HeadSplit(heads, groups, width, tp, share_of(groups * n, tp), n) for n in counts)
    best = min(splits, key=lambda each: (each.slots * (each.queries + 1), each.local_heads))
    # Slots that are left over share the work, or at least do no harm.
    return replace(best, copies=min(per_group, best.slots * tp // groups))


def language_split(language: LanguageConfig, tp: int) -> HeadSplit:
    """Return how `tp` ranks divide the heads of the language model."""
    return head_split(language.num_attention_heads, language.num_query_groups, language.kv_channels, tp)


def context_heads(config: Config) -> int:
    """Return how many context-parallel ranks exchange heads; groups of so many gather one another's keys and values."""
    parallel = config.parallel
    if parallel.cp_comm_type == "all_gather":
        return 1
    if parallel.cp_comm_type == "a2a":
        return parallel.context_parallel_size
    return math.gcd(local_heads(config), parallel.context_parallel_size)


def local_heads(config: Config) -> int:
    """Return the query heads of the language model on each tensor-parallel rank, padding included."""
    language = config.model.language
    heads, groups = language.num_attention_heads, language.num_query_groups or language.num_attention_heads
    return head_split(heads, groups, 1, config.parallel.tensor_model_parallel_size).local_heads


def vision_split(vision: VisionConfig, tp: int) -> HeadSplit:
    """Return how `tp` ranks divide the heads of the vision tower."""
    heads = vision.num_attention_heads
    return head_split(heads, heads, vision.hidden_size // heads, tp)


def _joined(runs: Iterable[RowRun]) -> tuple[RowRun, ...]:
    """Return runs of which those that continue one another are one, without empty ones."""
    found: list[RowRun] = []
    for run in runs:
        last = found[-1] if found else None
        if last and (last.local + last.count, last.real + last.count) == (run.local, run.real):
            found[-1] = RowRun(last.local, last.real, last.count + run.count)
        elif run.count:
            found.append(run)
    return tuple(found)
