"""`--compress-gradients` and `--compress-weights`: codes on the links over which ranks share gradients and weights.

megatron-core's bucket groups reduce their gradients in `start_grad_sync` and gather their parameters in
`start_param_sync`. A chunk's bucket groups get others, which take the same buffers and leave the same state. They wait
for each collective, so nothing overlaps with them.

Ranks of one node should sum exact gradients, so that only what leaves the node is coded, once: reduction in two levels.
With `--hybrid-shard-size` the shard groups are the nodes, else `parallel.compress_group_size` says how many ranks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megavlm.config.schema import Config
from megavlm.optim.coded_collectives import all_gather, all_reduce, reduce_scatter, reduce_scatter_in_two_levels
from megavlm.optim.codes import Coded
from megavlm.parallel.groups import Groups, Levels, levels_of


def compress_links(wrapped: Any, config: Config, groups: Groups) -> None:
    """Let a chunk that megatron-core's DDP wraps communicate by codes, as far as the configuration asks for it."""
    parallel = config.parallel
    levels, size = None, parallel.compress_group_size or 1
    if size > 1:
        levels = levels_of(groups.shard, size, timeout_minutes=parallel.distributed_timeout_minutes)
    for group in _bucket_groups(wrapped):
        if parallel.compress_gradients != "none":
            group.start_grad_sync = CodedReduction(
                group,
                Coded(parallel.compress_gradients),
                groups.replicas,
                levels,
                feedback=parallel.compress_error_feedback,
            )
        if parallel.compress_weights != "none":
            group.start_param_sync = CodedGather(group, Coded(parallel.compress_weights))


def forget_errors(chunks: Sequence[Any]) -> None:
    """Drop what coding has lost so far: of a step that is not taken, nothing may reach a later one."""
    for reduction in coded_reductions(chunks):
        reduction.errors.clear()


def coded_reductions(chunks: Sequence[Any]) -> Iterator[Reduction]:
    """Yield the reductions by codes of these chunks."""
    for chunk in chunks:
        yield from getattr(chunk, "coded_reductions", ())  # of ZeRO-2 and 3
        for group in _bucket_groups(chunk):
            if isinstance(reduction := group.__dict__.get("start_grad_sync"), CodedReduction):
                yield reduction


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]


class _Done:
    """A collective that has been waited for."""

    def wait(self) -> None:
        pass


class Reduction:
    """What sums gradients as codes keeps: residuals, and how much it has sent."""

    def __init__(self, coded: Coded, *, feedback: bool = True) -> None:
        self.coded, self.feedback = coded, feedback
        self.errors: dict[int, Tensor] = {}  # by what they are residuals of
        self.sent = 0  # bytes by this rank so far, of codes

    def error(self, index: int, gradients: Tensor) -> Tensor | None:
        """Return the residual of gradients of the same size, at first zeros; None without error feedback."""
        if not self.feedback:
            return None
        if index not in self.errors:
            self.errors[index] = torch.zeros_like(gradients)
        return self.errors[index]


class CodedReduction(Reduction):
    """Sums the gradients of a bucket group's buckets, in place of its `start_grad_sync`."""

    def __init__(
        self,
        group: Any,
        coded: Coded,
        replicas: dist.ProcessGroup | None,
        levels: Levels | None = None,
        *,
        feedback: bool = True,
    ) -> None:
        super().__init__(coded, feedback=feedback)
        self.group, self.replicas, self.levels = group, replicas, levels

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
            ranks = self.group.data_parallel_group
            padded = pad(gradients, (0, -gradients.numel() % ranks.size()))
            self.sent += all_reduce(padded, ranks, self.coded, self.error(index, padded))
            gradients.copy_(padded[: gradients.numel()])
            return
        shards = self.group.intra_distributed_optimizer_instance_group
        if self.levels is not None:
            own = gradients[: gradients.numel() // self.levels.inside.size()]
            error = self.error(index, own)
            self.sent += reduce_scatter_in_two_levels(gradients, self.levels, self.coded, error)
            return
        if self.replicas is None:
            self.sent += reduce_scatter(gradients, shards, self.coded, self.error(index, gradients))
            return
        own = gradients.view(shards.size(), -1)[shards.rank()]
        if shards.size() > 1:
            dist.reduce_scatter_tensor(own, gradients, group=shards)
        self.sent += all_reduce(own, self.replicas, self.coded, self.error(index, own))


class CodedGather:
    """Gathers the parameters of a bucket group's buckets, in place of its `start_param_sync`."""

    def __init__(self, group: Any, coded: Coded) -> None:
        self.group, self.coded = group, coded
        self.sent = 0  # bytes by this rank so far

    def __call__(self, force_sync: bool = False) -> None:
        group = self.group
        if force_sync and group.param_gather_handle is not None:
            group.param_gather_handle = None
            return
        shards = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            self.sent += all_gather(bucket.param_data, shards, self.coded)
        group.param_gather_handle = _Done() if group.ddp_config.overlap_param_gather and not force_sync else None
        group.param_gather_dispatched = True
