"""Rules about the optimizer. `rules.py` defines what a rule is."""

from __future__ import annotations

from collections.abc import Callable

from megavlm.config.derived import moments_folder
from megavlm.config.lora import clipped_parts, frozen_parts, trained_whole
from megavlm.config.schema import Config
from megavlm.config.update_rules import one_of

_ELEMENTWISE = one_of(lambda rule: rule.others is None)


def there_are_matrices(config: Config) -> str | None:
    rule = config.optimizer.rule
    if rule.others is not None and not (trained_whole(config) or config.lora.train_router):
        return (
            f"--optimizer {rule.name} has no matrices to train: adapters are left to {rule.others.name}, and all "
            f"else is frozen; use --optimizer {_ELEMENTWISE}"
        )
    return None


def state_on_disk_is_elementwise(config: Config) -> str | None:
    rule = config.optimizer.rule
    if rule.others is not None and moments_folder(config) is not None:
        return (
            f"--offload optimizer=nvme:DIR keeps the state of elementwise updates, and --optimizer {rule.name} updates "
            f"whole matrices: use --offload optimizer, or --optimizer {_ELEMENTWISE}"
        )
    return None


def one_optimizer_scales_the_loss(config: Config) -> str | None:
    """With a trained colocated encoder there are two optimizers, which would detect overflow independently."""
    if config.precision.dtype != "fp16" or config.placement.encoder != "colocated":
        return None
    if {"vision", "projector"} <= {*frozen_parts(config)}:
        return None
    return (
        "--precision fp16 does not train an encoder with --placement colocated: use --precision bf16, or "
        "--placement stages"
    )


def clipping_has_projections(config: Config) -> str | None:
    if config.optimizer.qk_clip and not clipped_parts(config):
        return (
            "--qk-clip has nothing to scale: projections of queries and keys are frozen here, have adapters, or are "
            "followed by a norm of queries and keys, which bounds the logits itself; leave it out"
        )
    return None


OPTIMIZER_RULES: tuple[Callable[[Config], str | None], ...] = (
    there_are_matrices,
    state_on_disk_is_elementwise,
    one_optimizer_scales_the_loss,
    clipping_has_projections,
)
