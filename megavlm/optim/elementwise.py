"""Update a rank's shards of parameters by an elementwise rule, with optimizer state in a store.

`step` is an int in the parameter group, not per tensor: checkpoints save it with the group, and a resumed run continues
from the same t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from megavlm.config.schema import OptimizerConfig
from megavlm.optim.stores import Shard, StateStore
from megavlm.parallel.shards import local_part

AVERAGE = "ema"  # name of averages in the state, and in checkpoints


@dataclass(frozen=True)
class ElementwiseRule:
    """The computation of an elementwise update rule.

    Args:
        state: names of the state tensors, with a number per element, initially zero.
        group: returns a parameter group's options for `update` besides `lr`, `weight_decay` and `step`.
        update: updates shards on one device in place. It first divides their gradients, in place, by its last
            argument ([] float32), unless that is None.
    """

    state: tuple[str, ...]
    group: Callable[[OptimizerConfig], Mapping[str, Any]]
    update: Callable[[Sequence[Shard], Mapping[str, Any], Tensor | None], None]


class ElementwiseOptimizer(torch.optim.Optimizer):
    """Updates each parameter by an elementwise rule; of a sharded parameter (a DTensor) each rank updates its shard."""

    divisor: float | None = None  # the next step divides gradients by it, in place

    def __init__(
        self, params: Iterable[Any], rule: ElementwiseRule, store: StateStore | None = None, **options: Any
    ) -> None:
        """`options` override the defaults of parameter groups."""
        defaults = {"lr": 1e-3, "weight_decay": 0.0, **rule.group(OptimizerConfig()), **options}
        super().__init__(params, defaults)
        self.rule, self.store = rule, store or StateStore()
        self.matrices: dict[Tensor, tuple[str, ...]] = {}  # parameters that `optim/matrices.py` updates → state names
        self.beside: tuple[str, ...] = ()  # names of further state that the rule does not use (averages)
        self.finish: Callable[[], None] = lambda: None  # called at the end of a step (`optim/qk_clip.py`)

    @classmethod
    def in_place_of(
        cls, optimizer: torch.optim.Optimizer, rule: ElementwiseRule, store: StateStore, options: OptimizerConfig
    ) -> Self:
        """Return an optimizer with another optimizer's parameter groups, and only the options of this class. In fp32
        megatron-core's parameters are slices, not leaf tensors, which torch's constructor would refuse.
        """
        ours = cls([torch.empty(0)], rule, store)
        ours.param_groups = optimizer.param_groups
        for group in ours.param_groups:
            for name in optimizer.defaults.keys() - {"lr", "weight_decay"}:
                group.pop(name, None)
            group.update(rule.group(options))
        return ours

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        assert closure is None, "a closure would recompute the forward pass outside the pipeline schedule"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None and local_part(p).numel()]
            shards = [self._shard(p) for p in params if p not in self.matrices]
            if shards:
                self.store.update(shards, partial(self._apply, group))
        self.finish()
        return None

    def _shard(self, p: Tensor) -> Shard:
        state = self.state_of(p)
        return Shard(local_part(p), local_part(p.grad), {name: state[name] for name in self.rule.state})

    def _apply(self, group: Mapping[str, Any], shards: Sequence[Shard]) -> None:
        device, divisor = shards[0].value.device, self.divisor  # may be the host
        scale = None if divisor is None else torch.full((), divisor, dtype=torch.float32, device=device)
        self.rule.update(shards, group, scale)

    def begin(self) -> None:
        """Create the state of every parameter now, not in the first step."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state_of(p)

    def state_of(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter. State is initially zero, an average the parameter itself."""
        state: dict[str, Tensor] = self.state[p]
        if not state:
            names = self.matrices.get(p, self.rule.state) + self.beside
            state.update({name: self.store.zeros(p, name) for name in names})
            if AVERAGE in state:
                state[AVERAGE].copy_(local_part(p.detach()))
        return state
