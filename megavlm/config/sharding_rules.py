"""Rules about data-parallel sharding (optimizer state, gradients, weights). `rules.py` defines what a rule is."""

from __future__ import annotations

from collections.abc import Callable

from megavlm.config.derived import shards_gradients
from megavlm.config.schema import Config


def param_gather_overlaps_what_exists(config: Config) -> str | None:
    parallel = config.parallel
    if parallel.overlap_param_gather and parallel.data_parallel_sharding == "none":
        return "--overlap-param-gather needs --data-parallel-sharding optimizer: without it no parameters are gathered"
    if shards_gradients(config) and (parallel.overlap_grad_reduce or parallel.overlap_param_gather):
        option = "--overlap-grad-reduce" if parallel.overlap_grad_reduce else "--overlap-param-gather"
        return (
            f"{option} applies to --data-parallel-sharding optimizer or none; the others always overlap: leave it out"
        )
    if parallel.overlap_param_gather and parallel.overlap_grad_reduce is False:
        return "--overlap-param-gather needs --overlap-grad-reduce: leave --no-overlap-grad-reduce out"
    return None


def buckets_are_reduced_apart(config: Config) -> str | None:
    parallel = config.parallel
    if parallel.ddp_bucket_size is not None and (parallel.overlap_grad_reduce is False or shards_gradients(config)):
        return (
            f"--ddp-bucket-size {parallel.ddp_bucket_size} has no effect if gradients are reduced all at once or per "
            "layer: leave it out, or use --overlap-grad-reduce with --data-parallel-sharding optimizer or none"
        )
    return None


def loss_scale_has_an_optimizer(config: Config) -> str | None:
    if config.precision.dtype == "fp16" and shards_gradients(config):
        return (
            f"--data-parallel-sharding {config.parallel.data_parallel_sharding} does not support the loss scaling that "
            "--precision fp16 needs: use --precision bf16, or --data-parallel-sharding optimizer"
        )
    return None


def hybrid_shards_something(config: Config) -> str | None:
    parallel = config.parallel
    if parallel.hybrid_shard_size is None:
        return None
    if parallel.data_parallel_sharding == "none":
        return (
            f"--hybrid-shard-size {parallel.hybrid_shard_size} has nothing to shard with --data-parallel-sharding none:"
            " choose another sharding, or leave it out"
        )
    if config.placement.encoder == "colocated":
        return "--hybrid-shard-size does not support --placement colocated: leave it out, or use --placement stages"
    return None


SHARDING_RULES: tuple[Callable[[Config], str | None], ...] = (
    param_gather_overlaps_what_exists,
    buckets_are_reduced_apart,
    loss_scale_has_an_optimizer,
    hybrid_shards_something,
)
