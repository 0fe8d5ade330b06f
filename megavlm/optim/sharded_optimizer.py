"""An optimizer over the rows that a rank holds of each parameter (ZeRO-2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import FP32Optimizer, _get_param_groups
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor

from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.parallel.dtensor import local_part
from megavlm.parallel.groups import Groups


class ShardedOptimizer(FP32Optimizer):
    """megatron-core's optimizer on rows, without an update rule so far.

    The gradient norm is summed over the ranks that together hold one model.
    """

    def __init__(
        self,
        chunks: Sequence[FullyShardedChunk],
        config: MegatronOptimizerConfig,
        overrides: Mapping[Any, Any],
        groups: Groups,
    ) -> None:
        param_groups = _get_param_groups(list(chunks), config, dict(overrides))
        inner = None  # a rank without trained parameters still takes part in the norm
        if param_groups:
            inner = torch.optim.Optimizer(param_groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        super().__init__(inner, config, lambda inner, config=None: inner.begin())
        self.chunks = chunks
        self.grad_stats_parallel_group = groups.collection.intra_dist_opt
        self.tp_group = groups.tp

    def prepare_grads(self) -> bool:
        return False  # they are where the optimizer looks for them, in fp32

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        return [local_part(gradient) for gradient in super().get_main_grads_for_grad_norm()]
