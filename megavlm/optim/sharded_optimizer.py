"""AdamW over the rows that a rank holds of each parameter (ZeRO-2 and 3).

In a checkpoint it looks like megatron-core's distributed optimizer: moments and master weights under their parameters'
global names, parameter groups by what sets them apart. Each reads what the other wrote, at any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import FP32Optimizer, _get_param_groups
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor

from megavlm.backend.adamw import AdamW, local
from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.optim.shards import Layout
from megavlm.parallel.groups import Groups


class ShardedOptimizer(FP32Optimizer):
    """megatron-core's clipping and stepping on rows; a norm is summed over the ranks that together hold one model."""

    def __init__(
        self,
        chunks: Sequence[FullyShardedChunk],
        config: MegatronOptimizerConfig,
        overrides: Mapping[Any, Any],
        groups: Groups,
    ) -> None:
        param_groups = _get_param_groups(list(chunks), config, dict(overrides))
        betas = (config.adam_beta1, config.adam_beta2)
        inner = None  # a rank without trained parameters still takes part in the norm
        if param_groups:
            inner = AdamW(param_groups, config.lr, betas, config.adam_eps, config.weight_decay)
        super().__init__(inner, config, lambda inner, config=None: inner.begin())
        self.chunks = chunks
        self.grad_stats_parallel_group = groups.collection.intra_dist_opt
        self.tp_group = groups.tp

    def prepare_grads(self) -> bool:
        return False  # they are where the optimizer looks for them, in fp32

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        return [local(gradient) for gradient in super().get_main_grads_for_grad_norm()]

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[str, Any]:
        """Parameter groups once, and this rank's rows of master weights and moments; loading fills these in place."""
        if is_loading and self.optimizer is not None:
            self.optimizer.begin()
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        state = {
            index: {
                f"{kind}/{number}": part
                for kind, rows in tensors.items()
                for number, part in enumerate(layout.parts(rows, prefix=f"optimizer.state.{kind}."))
            }
            for index, (layout, tensors) in enumerate(self._state())
        }
        return {
            "optimizer": {"param_groups": groups},
            "param_state": state,
            "param_state_sharding_type": "fully_reshardable",
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        steps = {_identity(group): group.get("step", 0) for group in state_dict["optimizer"]["param_groups"]}
        for group in self.param_groups:
            group["step"] = steps[_identity(group)]
        for index, (layout, tensors) in enumerate(self._state()):
            for kind, rows in tensors.items():
                for number, part in enumerate(layout.parts(rows)):
                    part.data.copy_(state_dict["param_state"][index][f"{kind}/{number}"])

    def _state(self) -> Iterator[tuple[Layout, dict[str, Tensor]]]:
        """Of each trained parameter of the chunks, in order: this rank's rows of the parameter and its moments."""
        for chunk in self.chunks:
            chunk.reshard()
            for name, param in chunk.trained.items():
                moments = self.optimizer.state[param]
                kept = {kind: moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
                yield chunk.layouts[name], {"param": local(param), **kept}


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group[key] for key in param_group_identifier_keys)
