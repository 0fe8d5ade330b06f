"""Compress gradients and weights on links between ranks (`--compress-gradients`, `--compress-weights`).

megatron-core's bucket groups reduce their gradients in `start_grad_sync` and gather their parameters in
`start_param_sync`. A chunk's bucket groups get replacements with the same buffers and the same state afterwards. The
replacements wait for each collective, so nothing overlaps with them.

Ranks of a node should sum exact gradients, so that only numbers that leave the node are encoded, once: reduction in two
levels. With `--hybrid-shard-size` shard groups are the nodes, else `parallel.compress_group_size` is the node's size.

With ZeRO-2 and 3 torch calls replacements of the all-gather of a unit's (a layer's) weights, and of the reduce-scatter
of its gradients after each micro-batch. The replacements use the same buffers. torch queues them on separate streams,
in parallel with passes of other units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad

from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.optim.codes import Coded, all_gather, all_reduce, reduce_scatter, reduce_scatter_in_two_levels
from megavlm.parallel.groups import Groups, Levels, levels_of


def compress_links(wrapped: Any, config: Config, groups: Groups) -> None:
    """Replace the collectives of a chunk in megatron-core's DDP by collectives of codes, as configured."""
    parallel = config.parallel
    levels = levels_of(groups.shard, parallel.compress_group_size, groups.maker)
    for group in _bucket_groups(wrapped):
        if parallel.compress_gradients != "none":
            coded = Coded(parallel.compress_gradients)
            group.start_grad_sync = CodedReduction(group, coded, groups.replicas, levels)
        if parallel.compress_weights != "none":
            group.start_param_sync = CodedGather(group, Coded(parallel.compress_weights))


def forget_errors(chunks: Sequence[Any]) -> None:
    """Reset the residuals of error feedback, so that a skipped step does not affect later steps."""
    for reduction in coded_reductions(chunks):
        reduction.errors.clear()


def coded_reductions(chunks: Sequence[Any]) -> Iterator[Reduction]:
    """Yield the compressed gradient reductions of chunks."""
    for chunk in chunks:
        yield from getattr(chunk, "coded_reductions", ())  # of ZeRO-2 and 3
        for group in _bucket_groups(chunk):
            if isinstance(reduction := group.__dict__.get("start_grad_sync"), CodedReduction):
                yield reduction


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]


class _Done:
    """Handle of a collective that has completed."""

    def wait(self) -> None:
        pass


class Reduction:
    """Sums gradients as codes, and keeps the residuals.

    With `levels`, the ranks of a subgroup sum exact gradients first.
    """

    def __init__(self, coded: Coded, levels: Levels | None = None) -> None:
        self.coded, self.levels = coded, levels
        self.errors: dict[int, Tensor] = {}  # residuals by the `index` of their gradients

    def scatter(self, index: int, gradients: Tensor, group: dist.ProcessGroup) -> None:
        """Reduce-scatter gradients in place over a group; `index` identifies their residual."""
        if self.levels is None:
            reduce_scatter(gradients, group, self.coded, self._error(index, gradients))
            return
        error = self._error(index, gradients[: gradients.numel() // self.levels.inside.size()])
        reduce_scatter_in_two_levels(gradients, self.levels, self.coded, error)

    def total(self, index: int, gradients: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of gradients [numbers] over a group; `index` identifies their residual."""
        padded = pad(gradients, (0, -gradients.numel() % group.size()))
        all_reduce(padded, group, self.coded, self._error(index, padded))
        return padded[: gradients.numel()]

    def _error(self, index: int, gradients: Tensor) -> Tensor:
        """Return the residual `index`, of the size of `gradients`, initially zero."""
        if index not in self.errors:
            self.errors[index] = torch.zeros_like(gradients)
        return self.errors[index]


class CodedReduction(Reduction):
    """Sums the gradients of a bucket group's buckets, in place of its `start_grad_sync`."""

    def __init__(
        self, group: Any, coded: Coded, replicas: dist.ProcessGroup | None, levels: Levels | None = None
    ) -> None:
        super().__init__(coded, levels)
        self.group, self.replicas = group, replicas

    def __call__(self, force_all_reduce: bool | None = False) -> None:
        group = self.group
        if group.is_first_batch and group.grad_reduce_handle is not None:
            return  # as megatron-core's: it has been done
        for index, bucket in enumerate(group.buckets):
            if bucket.gradient_scaling_factor != 1.0:
                bucket.grad_data *= bucket.gradient_scaling_factor
            self._reduce(index, bucket.grad_data)
        overlaps = group.ddp_config.overlap_grad_reduce and group.ddp_config.num_distributed_optimizer_instances == 1
        group.grad_reduce_handle = _Done() if overlaps else None

    def _reduce(self, index: int, gradients: Tensor) -> None:
        if not self.group.ddp_config.use_distributed_optimizer:
            gradients.copy_(self.total(index, gradients, self.group.data_parallel_group))
            return
        shards = self.group.intra_distributed_optimizer_instance_group
        if self.levels is not None or self.replicas is None:
            self.scatter(index, gradients, shards)
            return
        own = gradients.view(shards.size(), -1)[shards.rank()]
        if shards.size() > 1:
            dist.reduce_scatter_tensor(own, gradients, group=shards)
        own.copy_(self.total(index, own, self.replicas))


class CodedGather:
    """Gathers the parameters of a bucket group's buckets, in place of its `start_param_sync`."""

    def __init__(self, group: Any, coded: Coded) -> None:
        self.group, self.coded = group, coded

    def __call__(self, force_sync: bool = False) -> None:
        group = self.group
        if force_sync and group.param_gather_handle is not None:
            group.param_gather_handle = None
            return
        shards = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            all_gather(bucket.param_data, shards, self.coded)
        group.param_gather_handle = _Done() if group.ddp_config.overlap_param_gather and not force_sync else None
        group.param_gather_dispatched = True


class _Comm:
    """Allocator of buffers, which torch expects of custom collectives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CodedUnitGather(_Comm):
    """All-gathers a unit's weights: as codes over its shard group, exactly over ranks with secondary shards."""

    def __init__(self, coded: Coded, shards: int) -> None:
        self.coded, self.shards = coded, shards

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if group.size() < self.shards or not output_tensor.is_floating_point():  # types mixed as bytes
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        output_tensor.view(self.shards, -1)[group.rank()].copy_(input_tensor)
        all_gather(output_tensor, group, self.coded)
        return None


class CodedUnitReduction(_Comm, Reduction):
    """Reduce-scatters a unit's gradients as codes."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        assert op == dist.ReduceOp.SUM
        # By the size of a unit, which another set of trained parameters would change.
        self.scatter(input_tensor.numel(), input_tensor, group)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        return None


def compress_units(
    units: Iterable[FSDPModule], config: Config, groups: Groups, levels: Levels | None
) -> tuple[list[Reduction], Reduction | None]:
    """Replace the collectives of units by collectives of codes, as configured; return all gradient reductions, and the
    one between HSDP's shard groups or None. `levels` are the levels of `parallel.compress_group_size`.
    """
    gradients, weights = config.parallel.compress_gradients, config.parallel.compress_weights
    if (gradients, weights) != ("none", "none"):
        refuse_torch_without_hooks(config)
    between = None
    if gradients != "none" and groups.replicas is not None:
        between = Reduction(Coded(gradients))
    reductions: list[Reduction] = [] if between is None else [between]
    for unit in units:
        if weights != "none":
            unit.set_custom_all_gather(CodedUnitGather(Coded(weights), groups.shard.size()))  # type: ignore[arg-type]
        if gradients != "none" and between is None:
            reduction = CodedUnitReduction(Coded(gradients), levels)
            unit.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]
            reductions.append(reduction)
    return reductions, between


def refuse_torch_without_hooks(config: Config) -> None:
    """Raise UserError if this torch does not support custom collectives in `fully_shard`."""
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        parallel = config.parallel
        option = f"--compress-gradients {parallel.compress_gradients}"
        if parallel.compress_gradients == "none":
            option = f"--compress-weights {parallel.compress_weights}"
        raise UserError(
            f"{option} with --data-parallel-sharding {parallel.data_parallel_sharding} needs a newer torch than "
            f"{torch.__version__}: install one, or use --data-parallel-sharding optimizer"
        )
