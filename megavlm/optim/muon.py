"""Muon: momentum of matrices, made orthogonal, at any layout (Jordan et al. 2024; at scale: Liu et al. 2025).

    M ← μM + G          U = G + μM  (Nesterov)          W ← (1 − ηλ) W − η · 0.2·√max(rows, columns) · orthogonal(U)

The factor gives an update the root mean square of AdamW's, so that learning rates and weight decay may be kept.
Vectors, embeddings and the output layer stay with the elementwise update of the same optimizer.

Each rank keeps momentum for the elements whose master weights it holds, like AdamW's moments, and computes U there. A
matrix is assembled once, on one of the ranks that hold a pipeline stage, and its update is sent back
(`optim/matrix_plan.py`): twice as many elements as a rank updates, and so 1/DP of what gathering the weights takes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.arch.kinds import hidden_weight_of
from megavlm.config.schema import ModelConfig
from megavlm.optim.adamw import AdamW
from megavlm.optim.matrix_plan import HeldBox, Matrix, Piece, Round, matrices_of, plan_rounds
from megavlm.optim.newton_schulz import orthogonalized
from megavlm.optim.shards import Place, ShardLayout
from megavlm.parallel.dtensor import local_part
from megavlm.planner.orthogonal import ROUND

MATCHES_ADAMW = 0.2  # root mean square of AdamW's updates (Liu et al. 2025)


@dataclass(frozen=True)
class MuonOptions:
    momentum: float
    steps: int
    dtype: torch.dtype  # of Newton-Schulz, and of what ranks send one another


@dataclass(frozen=True)
class MatrixShard:
    """The part of a parameter of matrices that a rank updates. `weights` is what the optimizer `inner` knows it by."""

    inner: AdamW
    weights: Tensor
    layout: ShardLayout


@dataclass(frozen=True)
class _Held:
    shard: MatrixShard
    place: Place

    @property
    def box(self) -> HeldBox:
        return HeldBox(self.place.part.key, self.place.box.offset, self.place.box.size)

    def view(self, values: Tensor, piece: Piece, period: int) -> Tensor:
        """Return a piece [periods, count, width] as a view of a tensor like the shard's weights."""
        first = self.place.first + piece.row * self.place.stride[-2]
        if piece.expert is not None:
            first += piece.expert * self.place.stride[0]
        row, column = self.place.stride[-2:]
        size, stride = (piece.periods, piece.count, piece.width), (period * row, row, column)
        return values.as_strided(size, stride, values.storage_offset() + first)


class Muon:
    """The update of all matrices of a rank's optimizers, which ranks that hold a pipeline stage make together."""

    def __init__(
        self,
        shards: Sequence[MatrixShard],
        model: ModelConfig,
        options: MuonOptions,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """`group` are the ranks that together hold the shards' parameters, all of which call this."""
        self.shards, self.options, self.group, self.device = shards, options, group, device
        for shard in shards:
            shard.inner.matrices.add(shard.weights)
        self._held = [_Held(shard, place) for shard in shards for place in shard.layout.places()]
        every: list[list[HeldBox]] = [[]] * group.size()
        dist.all_gather_object(every, [each.box for each in self._held], group=group)
        weights = {box.key: hidden_weight_of(box.key, model) for boxes in every for box in boxes}
        self.matrices: list[Matrix] = matrices_of({key: held for key, held in weights.items() if held is not None})
        self.rounds = plan_rounds(every, self.matrices, rank=group.rank(), most=ROUND)

    @torch.no_grad()
    def update(self, divisor: float) -> None:
        """Update the matrices with gradients that are divided by `divisor`; afterwards gradients hold U."""
        places = {local_part(shard.weights).device for shard in self.shards}
        divisors = {place: torch.full((), divisor, dtype=torch.float32, device=place) for place in places}
        for shard in self.shards:
            self._accumulate(shard, divisors[local_part(shard.weights).device])
        rates = {
            weights: (group["lr"], group["weight_decay"])
            for inner in {id(shard.inner): shard.inner for shard in self.shards}.values()
            for group in inner.param_groups
            for weights in group["params"]
        }
        for each in self.rounds:
            self._update(each, rates)

    def _accumulate(self, shard: MatrixShard, divisor: Tensor) -> None:
        gradient = local_part(shard.weights.grad)
        held = shard.inner.state_of(shard.weights)["momentum"]
        momentum = held.to(gradient.device)  # from the host, with `--offload optimizer`
        gradient.div_(divisor)
        momentum.mul_(self.options.momentum).add_(gradient)
        gradient.add_(momentum, alpha=self.options.momentum)
        if momentum is not held:
            held.copy_(momentum)

    def _update(self, each: Round, rates: Mapping[Tensor, tuple[float, float]]) -> None:
        arrived = self._exchange(each.gathers_to, each.gathers_from, self._direction)
        whole = self._assembled(each, arrived)
        updates = self._exchange(each.results_to, each.results_from, partial(_of_matrix, whole))
        for piece, update in _split(updates, chain(*each.results_from)):
            held = self._held[piece.box]
            weights = self._view(local_part(held.shard.weights), piece)
            rate, decay = rates[held.shard.weights]
            weights.mul_(1 - rate * decay).add_(update.view_as(weights).to(weights.device), alpha=-rate)

    def _direction(self, piece: Piece) -> Tensor:
        return self._view(local_part(self._held[piece.box].shard.weights.grad), piece)

    def _view(self, values: Tensor, piece: Piece) -> Tensor:
        return self._held[piece.box].view(values, piece, self.matrices[piece.matrix].band.period)

    def _assembled(self, each: Round, arrived: Tensor) -> dict[int, Tensor]:
        """Return the updates of this rank's own matrices, but for the learning rate, from their pieces."""
        whole = {index: self._empty(index, arrived) for index in each.own}
        for piece, values in _split(arrived, chain(*each.gathers_from)):
            _of_matrix(whole, piece).copy_(values.view(piece.rows, piece.width))
        alike = defaultdict[torch.Size, list[int]](list)
        for index, matrix in whole.items():
            alike[matrix.shape].append(index)
        for (rows, columns), indices in alike.items():
            found = orthogonalized(torch.stack([whole[index] for index in indices]), steps=self.options.steps)
            found.mul_(MATCHES_ADAMW * math.sqrt(max(rows, columns)))
            whole.update(zip(indices, found, strict=True))
        return whole

    def _empty(self, index: int, like: Tensor) -> Tensor:
        matrix = self.matrices[index]
        return like.new_zeros(matrix.rows, matrix.columns)

    def _exchange(self, sends: Sequence[Sequence[Piece]], receives: Sequence[Sequence[Piece]], values: Any) -> Tensor:
        """Send each rank its pieces, whose elements `values` returns; return the elements of all that arrives."""
        sizes = [[sum(piece.size for piece in pieces) for pieces in side] for side in (sends, receives)]
        sent = torch.empty(sum(sizes[0]), dtype=self.options.dtype, device=self.device)
        for piece, place in _split(sent, chain(*sends)):
            found = values(piece)
            place.view(found.shape).copy_(found)
        if self.group.size() == 1:
            return sent
        arrived = torch.empty(sum(sizes[1]), dtype=self.options.dtype, device=self.device)
        width = sent.element_size()  # as bytes, which every backend sends
        out, into = ([width * size for size in side] for side in sizes)
        dist.all_to_all_single(
            arrived.view(torch.uint8),
            sent.view(torch.uint8),
            output_split_sizes=into,
            input_split_sizes=out,
            group=self.group,
        )
        return arrived


def _of_matrix(whole: Mapping[int, Tensor], piece: Piece) -> Tensor:
    return whole[piece.matrix][piece.top : piece.top + piece.rows, piece.left : piece.left + piece.width]


def _split(elements: Tensor, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Tensor]]:
    """Yield pieces, one after the other in `elements`, with theirs."""
    at = 0
    for piece in pieces:
        yield piece, elements[at : at + piece.size]
        at += piece.size
