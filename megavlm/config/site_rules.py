"""Rules about sites that train apart (`--outer-steps`). `rules.py` defines what a rule is."""

from __future__ import annotations

from collections.abc import Callable

from megavlm.config.derived import offloaded, replica_size, sites_of
from megavlm.config.schema import Config


def sites_train_apart(config: Config) -> str | None:
    """What has been shown with sites is AdamW and Lion with ZeRO-1; the rest shares more than gradients, or is not."""
    if not sites_of(config):
        return None
    parallel, optimizer, numerics = config.parallel, config.optimizer, config.numerics
    conflicts = {
        f"--data-parallel-sharding {parallel.data_parallel_sharding}: use optimizer": parallel.data_parallel_sharding
        != "optimizer",
        "--hybrid-shard-size: sites are its groups already; leave it out": parallel.hybrid_shard_size is not None,
        "--compress-gradients: leave it out": parallel.compress_gradients != "none",
        "--compress-weights: leave it out": parallel.compress_weights != "none",
        "--placement colocated: use --placement stages": config.placement.encoder == "colocated",
        "--num-experts: leave it out": config.model.experts.num_experts > 0,
        "--optimizer muon: use adamw, or lion": optimizer.kind == "muon",
        "--ema-decay: leave it out": optimizer.ema_decay > 0,
        "--qk-clip: leave it out": optimizer.qk_clip,
        "--offload optimizer: leave it out": "optimizer" in offloaded(config),
        "--precision fp16: use --precision bf16": config.precision.dtype == "fp16",
        f"--fp8 {config.precision.fp8}: use --fp8 none": config.precision.fp8 != "none",
        f"--objective {config.model.objective.kind}: its loss needs the whole batch": config.model.objective.kind
        != "next-token",
        "--check-weight-hash-across-dp-replicas-interval, as copies differ between outer steps: leave it out": bool(
            numerics.check_weight_hash_across_dp_replicas_interval
        ),
    }
    return next((f"--outer-steps does not support {what}" for what, given in conflicts.items() if given), None)


def outer_steps_come_before(config: Config) -> str | None:
    """A checkpoint, a validation and answers need weights that all sites have: an outer step must have come before."""
    steps = config.optimizer.outer_steps
    intervals = {
        "--save-interval": config.checkpoint.save_interval,
        "--eval-interval": config.evaluation.eval_interval,
        "--sample-interval": config.evaluation.sample_interval,
    }
    for option, interval in intervals.items():
        if steps and interval and interval % steps:
            return (
                f"{option} {interval} is not a multiple of --outer-steps {steps}, and between outer steps sites have "
                f"weights of their own: use {interval + -interval % steps}"
            )
    return None


def sites_divide(config: Config, world: int) -> str | None:
    """Refuse numbers of sites that do not divide the data-parallel replicas."""
    sites, replicas = sites_of(config), world // replica_size(config)
    if sites and replicas % sites:
        return (
            f"--outer-groups {sites} does not divide {replicas} data-parallel replicas: use a divisor, or change the "
            "number of processes"
        )
    return None


SITE_RULES: tuple[Callable[[Config], str | None], ...] = (sites_train_apart, outer_steps_come_before)
