"""Rules about objectives of embeddings: what they need, and what does not go with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

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
