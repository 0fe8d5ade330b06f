"""Rules about the objective and the optimizer. `check.py` defines what a rule is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from megavlm.config.derived import moments_folder
from megavlm.config.lora import clipped_parts, frozen_parts, trained_whole
from megavlm.config.optimizer_schema import one_of
from megavlm.config.schema import Config


def _of_embeddings(rule: Callable[[Config], str | None]) -> Callable[[Config], str | None]:
    """Return a rule that holds for next-token prediction as it is."""

    @wraps(rule)
    def applied(config: Config) -> str | None:
        return None if config.model.objective.kind == "next-token" else rule(config)

    return applied


@_of_embeddings
def matryoshka_widths_are_beginnings(config: Config) -> str | None:
    widths, hidden = config.model.objective.matryoshka_widths, config.model.language.hidden_size
    for width in widths:
        if width >= hidden:
            return (
                f"model.objective.matryoshka_widths {width} is not below model.language.hidden_size {hidden}, which "
                "has a loss anyway: leave it out, or lower it"
            )
    return None


@_of_embeddings
def embeddings_run_twice_alike(config: Config) -> str | None:
    """Refuse what would differ between the two forward passes of a gradient cache: Transformer Engine moves delayed
    scales on in passes with gradients alone.
    """
    if config.precision.fp8 != "none" and config.precision.fp8_recipe == "delayed":
        return (
            f"--objective {config.model.objective.kind} runs each micro-batch twice, with other scales in "
            "--fp8-recipe delayed: use --fp8-recipe tensorwise"
        )
    return None


@_of_embeddings
def embeddings_have_no_answers(config: Config) -> str | None:
    if config.evaluation.sample_interval:
        return (
            f"--sample-interval {config.evaluation.sample_interval} lets the model answer, but with --objective "
            f"{config.model.objective.kind} it has no vocabulary: leave it out"
        )
    return None


OBJECTIVE_RULES: tuple[Callable[[Config], str | None], ...] = (
    matryoshka_widths_are_beginnings,
    embeddings_run_twice_alike,
    embeddings_have_no_answers,
)


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
