"""Encode fp32 numbers in one or two bytes, and send codes in collectives, for links slower than the encoding.

`bf16` rounds each number. `int8` and `fp8` (e4m3) give each block of 128 numbers a scale 2ᵏ, the smallest by which the
block's largest magnitude a is within the codes' range M (127 and 448): k = ⌈log₂(a / M)⌉. A power of two costs up to
one bit (ZeRO++ takes a / M itself, Wang et al. 2023). In return a decoded number is exact in bf16, since it has 7
significant bits, and encoding it again gives the same code: a block's largest code lies above M / 2, so k stays.
Weights that are encoded, gathered, saved, loaded and encoded again do not change.

A block with a number that is not finite decodes to NaN throughout, so that the step's checks detect it.

In place of reduce-scatter, all-reduce and all-gather of numbers (Wang et al. 2023): a ring would add up codes and round
once a hop. Here each rank sends a code of each part to the rank that sums the part. This rank adds decoded numbers in
fp32, in the order of ranks: one rounding, and the same sum in any order of messages. A rank's own part is not encoded.

With error feedback a rank adds the coding error to its next numbers, so that no part of a gradient is lost for good
(Seide et al. 2014; Karimireddy et al. 2019): it sends Q(g + e) and keeps e ← g + e − Q(g + e).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.parallel.groups import Levels

Code = Literal["bf16", "int8", "fp8"]
BLOCK = 128
_NOT_FINITE = -128  # in place of k
_LARGEST = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True)
class Coded:
    """Encoder and decoder of numbers for one of the codes."""

    code: Code

    def encode(self, rows: Tensor) -> Tensor:
        """Return the codes [rows, bytes] uint8 of [rows, numbers]."""
        if self.code == "bf16":
            return rows.to(torch.bfloat16).contiguous().view(torch.uint8)
        blocks = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True)
        mantissa, exponent = torch.frexp(largest / _LARGEST[self.code])
        exponent = (exponent - (mantissa == 0.5).int()).clamp(-126, 127)  # ⌈log₂⌉
        scaled = torch.ldexp(blocks, -exponent)
        codes = (
            scaled.round().clamp(-127, 127).to(torch.int8) if self.code == "int8" else scaled.to(torch.float8_e4m3fn)
        )
        exponent = torch.where(largest.isfinite(), exponent, _NOT_FINITE).to(torch.int8)
        parts = codes.view(torch.uint8), exponent.view(torch.uint8)
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def decode(self, coded: Tensor, numbers: int) -> Tensor:
        """Return the numbers [rows, numbers] float32 of codes [rows, bytes] uint8."""
        if self.code == "bf16":
            return coded.view(torch.bfloat16).float()
        blocks = math.ceil(numbers / BLOCK)
        codes, exponent = coded.split([blocks * BLOCK, blocks], dim=1)
        kind = torch.int8 if self.code == "int8" else torch.float8_e4m3fn
        values = codes.contiguous().view(kind).float().unflatten(1, (blocks, BLOCK))
        scale = exponent.contiguous().view(torch.int8).unsqueeze(-1).int()
        found = torch.where(scale == _NOT_FINITE, math.nan, torch.ldexp(values, scale))
        return found.flatten(1)[:, :numbers]


def reduce_scatter(numbers: Tensor, group: dist.ProcessGroup, coded: Coded, error: Tensor | None) -> None:
    """Reduce-scatter a contiguous fp32 tensor in place: this rank's part becomes its part of the sum, the rest is lost.

    `error` is the residual of the same size, updated in place; None: no error feedback.
    """
    ranks, own = group.size(), group.rank()
    if ranks == 1:
        return
    rows = numbers.view(ranks, -1)
    sent = _coded_with_feedback(rows, coded, None if error is None else error.view(ranks, -1), own)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    decoded = coded.decode(received, rows.shape[1])
    decoded[own] = rows[own]
    torch.sum(decoded, dim=0, out=rows[own])


def reduce_scatter_in_two_levels(numbers: Tensor, levels: Levels, coded: Coded, error: Tensor | None) -> None:
    """Reduce-scatter over a group of k subgroups of g ranks: exact within a subgroup, by codes between subgroups.

    Rank (a, l), the l-th of subgroup a, owns part a·g + l. Within its subgroup it sums the parts of all (·, l), and
    sends the sums of other ranks' parts to their owners: N/g numbers instead of N, so that a node sends as much as a
    ring would (the two hops of qgZ, Wang et al. 2023). `error` has N/g numbers.
    """
    size, count = levels.inside.size(), levels.across.size()
    parts = numbers.view(count, size, -1)
    sums = numbers.new_empty(numbers.numel() // size)
    dist.reduce_scatter_tensor(sums, parts.transpose(0, 1).contiguous().view(-1), group=levels.inside)
    reduce_scatter(sums, levels.across, coded, error)
    own = levels.across.rank()
    parts[own, levels.inside.rank()] = sums.view(count, -1)[own]


def all_reduce(numbers: Tensor, group: dist.ProcessGroup, coded: Coded, error: Tensor | None) -> None:
    """All-reduce a contiguous fp32 tensor in place; the sums are encoded as well, so that all ranks have the same.

    Arguments as in `reduce_scatter`; the number of elements is a multiple of the group's size.
    """
    ranks, own = group.size(), group.rank()
    if ranks == 1:
        return
    reduce_scatter(numbers, group, coded, error)
    rows = numbers.view(ranks, -1)
    kept = None if error is None else error.view(ranks, -1)[own : own + 1]  # the own part was not encoded before
    part = _coded_with_feedback(rows[own : own + 1], coded, kept, None)
    _gather(rows, part, group, coded)


def all_gather(numbers: Tensor, group: dist.ProcessGroup, coded: Coded) -> None:
    """All-gather a contiguous tensor as codes, including the rank's own part, so that all ranks have equal numbers."""
    rows = numbers.view(group.size(), -1)
    _gather(rows, coded.encode(rows[group.rank() : group.rank() + 1]), group, coded)


def _gather(rows: Tensor, part: Tensor, group: dist.ProcessGroup, coded: Coded) -> None:
    gathered = part.new_empty(group.size(), part.shape[1])
    dist.all_gather_into_tensor(gathered, part, group=group)
    rows.copy_(coded.decode(gathered, rows.shape[1]))


def _coded_with_feedback(rows: Tensor, coded: Coded, error: Tensor | None, own: int | None) -> Tensor:
    """Return the codes of rows plus residual, and update the residual, except for the row `own`, which is not sent.

    A residual that is not finite is set to 0, because its step is skipped.
    """
    if error is None:
        return coded.encode(rows)
    others = [slice(0, None)] if own is None else [slice(0, own), slice(own + 1, None)]
    for each in others:
        rows[each] += error[each]
    sent = coded.encode(rows)
    decoded = coded.decode(sent, rows.shape[1])
    for each in others:
        torch.sub(rows[each], decoded[each], out=error[each]).nan_to_num_(0.0, 0.0, 0.0)
    return sent
