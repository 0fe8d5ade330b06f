"""Update whole matrices, at any layout, by a rule that needs all elements of a matrix (`optim.rules.Muon`).

Vectors, embeddings and the output layer stay with the elementwise rule of the same optimizer.

Each rank keeps state for the elements of its master weights, as for the elementwise rule, and turns its part of the
gradient into its part of U, from which the update is computed. A matrix is assembled once, on one of the ranks that
hold a pipeline stage, and its update is sent back (`optim/matrix_plan.py`): twice as many elements as a rank updates,
and so 1/DP of what gathering the weights takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.arch.kind import ROUND
from megavlm.arch.kinds import hidden_weight_of
from megavlm.config.schema import ModelConfig
from megavlm.optim.elementwise import ElementwiseOptimizer
from megavlm.optim.matrix_plan import Matrix, MatrixPiece, Round, matrices_of, plan_rounds
from megavlm.optim.rules import Muon
from megavlm.parallel.rendezvous import of_all_ranks
from megavlm.parallel.shards import ShardLayout, ShardPlace, local_part


@dataclass(frozen=True)
class MatrixShard:
    """A rank's shard of a parameter with matrices. `weights` is the shard's parameter in the optimizer `inner`."""

    inner: ElementwiseOptimizer
    weights: Tensor
    layout: ShardLayout


@dataclass(frozen=True)
class _Held:
    shard: MatrixShard
    place: ShardPlace

    def view(self, values: Tensor, piece: MatrixPiece, period: int) -> Tensor:
        """Return a piece [periods, count, width] as a view of `values`, which has the layout of the shard's weights."""
        first = self.place.first + piece.row * self.place.stride[-2]
        if piece.expert is not None:
            first += piece.expert * self.place.stride[0]
        row, column = self.place.stride[-2:]
        size, stride = (piece.periods, piece.count, piece.width), (period * row, row, column)
        return values.as_strided(size, stride, values.storage_offset() + first)


class MatrixUpdates:
    """Updates all matrices of a rank's optimizers, together with the other ranks of its pipeline stage."""

    def __init__(
        self,
        shards: Sequence[MatrixShard],
        model: ModelConfig,
        rule: Muon,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """`group` has the ranks that together hold the shards' parameters; all of them call this."""
        self.shards, self.rule, self.group, self.device = shards, rule, group, device
        for shard in shards:
            shard.inner.matrices[shard.weights] = rule.state
        self._held = [_Held(shard, place) for shard in shards for place in shard.layout.places()]
        every = of_all_ranks([(each.place.part.key, each.place.box) for each in self._held], group)
        weights = {key: hidden_weight_of(key, model) for boxes in every for key, _ in boxes}
        self.matrices: list[Matrix] = matrices_of({key: held for key, held in weights.items() if held is not None})
        self.rounds = plan_rounds(every, self.matrices, rank=group.rank(), most=ROUND)

    @torch.no_grad()
    def update(self, divisor: float) -> None:
        """Update the matrices with the gradients divided by `divisor`; the gradients are overwritten."""
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
        held = shard.inner.state_of(shard.weights)
        state = {name: held[name].to(gradient.device) for name in self.rule.state}  # from the host, where it is there
        gradient.div_(divisor)
        self.rule.accumulate(gradient, state)
        for name, numbers in state.items():
            if numbers is not held[name]:
                held[name].copy_(numbers)

    def _update(self, each: Round, rates: Mapping[Tensor, tuple[float, float]]) -> None:
        arrived = self._exchange(each.gathers_to, each.gathers_from, self._direction)
        whole = self._assembled(each, arrived)
        updates = self._exchange(each.results_to, each.results_from, partial(_of_matrix, whole))
        for piece, update in _split(updates, chain(*each.results_from)):
            held = self._held[piece.box]
            weights = self._view(local_part(held.shard.weights), piece)
            rate, decay = rates[held.shard.weights]
            weights.mul_(1 - rate * decay).add_(update.view_as(weights).to(weights.device), alpha=-rate)

    def _direction(self, piece: MatrixPiece) -> Tensor:
        return self._view(local_part(self._held[piece.box].shard.weights.grad), piece)

    def _view(self, values: Tensor, piece: MatrixPiece) -> Tensor:
        return self._held[piece.box].view(values, piece, self.matrices[piece.matrix].band.period)

    def _assembled(self, each: Round, arrived: Tensor) -> dict[int, Tensor]:
        """Assemble this rank's own matrices from their pieces; return their updates without the learning rate."""
        own = {index: self.matrices[index] for index in each.own}
        whole = {index: arrived.new_zeros(matrix.rows, matrix.columns) for index, matrix in own.items()}
        for piece, values in _split(arrived, chain(*each.gathers_from)):
            _of_matrix(whole, piece).copy_(values.view(piece.rows, piece.width))
        alike = defaultdict[torch.Size, list[int]](list)
        for index, matrix in whole.items():
            alike[matrix.shape].append(index)
        for indices in alike.values():
            found = self.rule.update_of(torch.stack([whole[index] for index in indices]))
            whole.update(zip(indices, found, strict=True))
        return whole

    def _exchange(
        self, sends: Sequence[Sequence[MatrixPiece]], receives: Sequence[Sequence[MatrixPiece]], values: Any
    ) -> Tensor:
        """Send each rank its pieces, with elements from `values`; return the elements of all received pieces."""
        sizes = [[sum(piece.size for piece in pieces) for pieces in side] for side in (sends, receives)]
        sent = torch.empty(sum(sizes[0]), dtype=self.rule.dtype, device=self.device)
        for piece, place in _split(sent, chain(*sends)):
            found = values(piece)
            place.view(found.shape).copy_(found)
        if self.group.size() == 1:
            return sent
        arrived = torch.empty(sum(sizes[1]), dtype=self.rule.dtype, device=self.device)
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


def _of_matrix(whole: Mapping[int, Tensor], piece: MatrixPiece) -> Tensor:
    return whole[piece.matrix][piece.top : piece.top + piece.rows, piece.left : piece.left + piece.width]


def _split(elements: Tensor, pieces: Iterable[MatrixPiece]) -> Iterator[tuple[MatrixPiece, Tensor]]:
    """Yield each piece with its elements, which are consecutive in `elements`."""
    at = 0
    for piece in pieces:
        yield piece, elements[at : at + piece.size]
        at += piece.size
