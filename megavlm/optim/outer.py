"""Local SGD between sites: an outer optimizer over what groups of replicas have learned apart (DiLoCo, 2311.08105).

Each of G sites takes N steps on its own part of the batches, and shares gradients and optimizer state within itself
alone. Then, with φ the weights that all sites began with and θ_g those that site g has come to,

    Δ = mean over g of (φ − θ_g)        v ← μ v + Δ        φ ← φ − η (Δ + μ v)        θ_g ← φ

which is SGD with Nesterov's momentum on the pseudo-gradient Δ. Each rank keeps φ and v in fp32 for the weights that it
updates, so that they are sharded within a site; v is in checkpoints like a moment of those weights, and φ is the
weights themselves there, because a checkpoint is taken after an outer step. Sites send Δ alone, once in N steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.config.schema import Config
from megavlm.optim.adamw import OUTER_MOMENTUM
from megavlm.optim.model_weights import give_model
from megavlm.optim.param_gather import gather_parameters
from megavlm.parallel.groups import Groups

_AT_ONCE = 2**25  # numbers that one all-reduce sums, unless a rank holds more of one parameter


@dataclass(frozen=True)
class Site:
    """The replicas that train together with this rank: number `index` of `count`."""

    index: int
    count: int
    is_first: bool  # whether this is the first of the site's ranks

    @classmethod
    def of(cls, config: Config, groups: Groups) -> Site:
        """Return the site of this rank; all ranks are one without `--outer-steps`."""
        if not config.optimizer.outer_steps or groups.replicas is None:
            return cls.of_all()
        return cls(groups.replicas.rank(), groups.replicas.size(), groups.collection.intra_dist_opt.rank() == 0)

    @classmethod
    def of_all(cls) -> Site:
        """Return the site of a run without `--outer-steps`: one, which all ranks belong to."""
        return cls(0, 1, dist.get_rank() == 0)


class OuterOptimizer:
    """The outer steps of this rank's weights. All ranks call its methods at the same time."""

    def __init__(self, optimizer: Any, chunks: Sequence[Any], config: Config, groups: Groups) -> None:
        options = config.optimizer
        self.site = Site.of(config, groups)
        self.sent = 0.0  # bytes by this rank between sites so far, as a ring sends them
        self._optimizer, self._chunks = optimizer, chunks
        self._group = groups.replicas
        self._steps, self._lr, self._momentum = options.outer_steps, options.outer_lr, options.outer_momentum
        self._begun: list[Tensor] | None = None  # φ, once sites differ

    def before_inner_step(self) -> None:
        """Remember the weights that all sites have, unless they differ already."""
        if self._begun is None:
            self._begun = [weights.detach().clone() for weights, _ in self._held()]

    def after_inner_step(self, iteration: int) -> None:
        """Take an outer step if it is due after this iteration."""
        if iteration % self._steps == 0:
            self.step()

    @torch.no_grad()
    def step(self) -> None:
        """Take an outer step, if any inner step came after the last one: afterwards all sites have the same weights."""
        if self._begun is None:
            return
        gather_parameters(self._chunks)
        for held in _portions(list(zip(self._held(), self._begun, strict=True))):
            together = torch.cat([(begun - weights).flatten() for (weights, _), begun in held])
            if self._group is not None:
                dist.all_reduce(together, group=self._group)
                together /= self.site.count
                self.sent += 2 * (self.site.count - 1) / self.site.count * together.nbytes
            parts = together.split([begun.numel() for _, begun in held])
            for ((weights, momentum), begun), part in zip(held, parts, strict=True):
                gradient = part.view_as(begun)
                momentum.mul_(self._momentum).add_(gradient)
                weights.copy_(begun - self._lr * (gradient + self._momentum * momentum))
        self._begun = None
        give_model(self._optimizer, self._chunks)

    def _held(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the fp32 weights that this rank updates, each with its outer momentum."""
        for part in self._optimizer.chained_optimizers:
            if not part.is_stub_optimizer:
                for weights in (p for group in part.optimizer.param_groups for p in group["params"]):
                    yield weights, part.optimizer.state_of(weights)[OUTER_MOMENTUM]


def _portions(held: list[Any]) -> Iterator[list[Any]]:
    """Yield weights in order, in groups of at most `_AT_ONCE` numbers or a single parameter."""
    group: list[Any] = []
    numbers = 0
    for each in held:
        size = each[1].numel()
        if group and numbers + size > _AT_ONCE:
            yield group
            group, numbers = [], 0
        group.append(each)
        numbers += size
    if group:
        yield group
