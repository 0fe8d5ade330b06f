"""How a step loaded the experts of each layer, from the sums that all ranks know before the update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megavlm.config.derived import has_experts
from megavlm.config.schema import ModelConfig
from megavlm.metrics.callback import Value
from megavlm.model.router import Router


@dataclass(frozen=True)
class LayerLoad:
    """The sums of a step for one layer: tokens that took each expert, and the balance losses times trained tokens."""

    tokens: tuple[float, ...]
    balance: float
    z: float

    @property
    def mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    @property
    def largest(self) -> float:
        """Return the load of the fullest expert relative to the mean: 1 if all have equally many tokens."""
        return max(self.tokens) / self.mean if self.mean else 1.0

    @property
    def entropy(self) -> float:
        """Return the entropy of the load relative to that of an even load: 1 if even, 0 if one expert has all."""
        shares = [tokens / sum(self.tokens) for tokens in self.tokens if tokens]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.tokens)) if shares else 1.0


def layer_loads(sums: Sequence[float], model: ModelConfig) -> dict[int, LayerLoad]:
    """Return the loads by layer from what `Schedule.tallies` returns, [layers · (E + 2)], summed over all ranks."""
    width = model.experts.num_experts + 2
    rows = [sums[start : start + width] for start in range(0, len(sums), width)]
    return {
        layer: LayerLoad(tuple(tokens), balance, z)
        for layer, (*tokens, balance, z) in enumerate(rows)
        if has_experts(model, layer)
    }


def update_biases(routers: Sequence[Router], loads: Mapping[int, LayerLoad]) -> None:
    """Let routers with a bias move it towards an even load."""
    for router in routers:
        if router.expert_bias is not None:
            load = torch.tensor(loads[router.number].tokens, dtype=torch.float32)
            router.update_bias(load.to(router.expert_bias.device, non_blocking=True))


def load_record(loads: Mapping[int, LayerLoad], model: ModelConfig, *, trained_tokens: int) -> dict[str, Value]:
    """Return what the record of a step says of the experts; empty without experts.

    The losses are means over layers and trained tokens, without their coefficients.
    """
    if not loads:
        return {}
    record: dict[str, Value] = {}
    each = loads.values()
    weight = len(loads) * max(trained_tokens, 1)
    if model.experts.aux_loss_coeff:
        record["balance_loss"] = sum(load.balance for load in each) / weight
    if model.experts.z_loss_coeff:
        record["router_z_loss"] = sum(load.z for load in each) / weight
    record["expert_load_max"] = {f"layers.{layer}": load.largest for layer, load in loads.items()}
    record["expert_load_entropy"] = {f"layers.{layer}": load.entropy for layer, load in loads.items()}
    return record
