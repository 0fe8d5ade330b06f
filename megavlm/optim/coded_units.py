"""`--compress-gradients` and `--compress-weights` with ZeRO-2 and 3: codes in place of `fully_shard`'s collectives.

torch calls what stands in for an all-gather of the weights of a unit (a layer), and for a reduce-scatter of its
gradients after each micro-batch. These take the same buffers and leave the same results. torch queues them on streams
of their own, beside other units' passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad

from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.optim.coded_collectives import all_gather, all_reduce, reduce_scatter, reduce_scatter_in_two_levels
from megavlm.optim.codes import Coded
from megavlm.optim.slow_links import Reduction
from megavlm.parallel.groups import Groups, Levels


class _Comm:
    """What torch asks for memory before a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CodedUnitGather(_Comm):
    """Gathers a unit's weights as codes among all ranks that shard it; among those with second shards as they are."""

    def __init__(self, coded: Coded, shards: int) -> None:
        self.coded, self.shards = coded, shards
        self.sent = 0  # bytes by this rank so far, of codes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if group.size() < self.shards or not output_tensor.is_floating_point():  # types mixed as bytes
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        output_tensor.view(self.shards, -1)[group.rank()].copy_(input_tensor)
        self.sent += all_gather(output_tensor, group, self.coded)
        return None


class CodedUnitReduction(_Comm, Reduction):
    """Sums a unit's gradients as codes, and gives each rank its rows of the sums."""

    def __init__(self, coded: Coded, levels: Levels | None, *, feedback: bool = True) -> None:
        super().__init__(coded, feedback=feedback)
        self.levels = levels

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        assert op == dist.ReduceOp.SUM
        size = input_tensor.numel()  # a unit's, which another set of trained parameters would change
        if self.levels is None:
            self.sent += reduce_scatter(input_tensor, group, self.coded, self.error(size, input_tensor))
        else:
            own = input_tensor[: size // self.levels.inside.size()]
            self.sent += reduce_scatter_in_two_levels(input_tensor, self.levels, self.coded, self.error(size, own))
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        return None


class CodedReplicaSum(Reduction):
    """Sums rows of gradients as codes over the shard groups of HSDP."""

    def __call__(self, index: int, gradients: Tensor, replicas: dist.ProcessGroup) -> Tensor:
        """Return the sum of the portion number `index` of a rank's gradients [numbers] over its replicas."""
        padded = pad(gradients, (0, -gradients.numel() % replicas.size()))
        self.sent += all_reduce(padded, replicas, self.coded, self.error(index, padded))
        return padded[: gradients.numel()]


def compress_units(
    units: Iterable[FSDPModule], config: Config, groups: Groups, levels: Levels | None
) -> tuple[list[Reduction], CodedReplicaSum | None]:
    """Let units communicate by codes, as far as the configuration asks for it; return what reduces gradients so, and
    what sums those of shard groups. `levels` are those of `parallel.compress_group_size`.
    """
    gradients, weights = config.parallel.compress_gradients, config.parallel.compress_weights
    if (gradients, weights) != ("none", "none"):
        refuse_torch_without_hooks(config)
    between, feedback = None, config.parallel.compress_error_feedback
    if gradients != "none" and groups.replicas is not None:
        between = CodedReplicaSum(Coded(gradients), feedback=feedback)
    reductions: list[Reduction] = [] if between is None else [between]
    for unit in units:
        if weights != "none":
            unit.set_custom_all_gather(CodedUnitGather(Coded(weights), groups.shard.size()))  # type: ignore[arg-type]
        if gradients != "none" and between is None:
            reduction = CodedUnitReduction(Coded(gradients), levels, feedback=feedback)
            unit.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]
            reductions.append(reduction)
    return reductions, between


def refuse_torch_without_hooks(config: Config) -> None:
    """Raise UserError where torch does not let others gather and reduce in place of `fully_shard`."""
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        parallel = config.parallel
        option = f"--compress-gradients {parallel.compress_gradients}"
        if parallel.compress_gradients == "none":
            option = f"--compress-weights {parallel.compress_weights}"
        raise UserError(
            f"{option} with --data-parallel-sharding {parallel.data_parallel_sharding} needs a newer torch than "
            f"{torch.__version__}: install one, or use --data-parallel-sharding optimizer"
        )
