"""Torch-free table of the training objectives. Their losses are in `megavlm/objective/`.

Next-token prediction forms its loss token by token, so a micro-batch is enough for it. A loss of embeddings compares
each text with all others of the global batch. Its gradient needs all representations before any backward pass, which
a gradient cache computes at the price of one more forward pass (`pipeline/gradient_cache.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megavlm.arch.layers import OUTPUT, kind_of
from megavlm.config.model_schema import PAIRED
from megavlm.config.registry import ObjectiveEntry, registered
from megavlm.config.schema import ModelConfig


@dataclass(frozen=True)
class Objective:
    """A training objective: the output layer's result, the loss's parameters, and the terms that it averages over."""

    embeds: bool  # the output layer pools hidden states into one vector for each text; else it computes logits
    scores: bool = False  # the output layer is a reward head: one number for each text, from its last hidden state
    learned: tuple[str, ...] = ()  # parameters of the loss that may be trained
    counted: str = "tokens"  # terms that the loss is a mean over
    compares: bool = False  # a sample is two answers to a prompt, of which the first is preferred
    rates: bool = False  # one of the two may be missing
    refers: bool = False  # the loss reads log-probabilities of the model that the run begins with
    measured: tuple[str, ...] = ()  # means over the `counted` terms that a step reports in addition to the loss

    @property
    def pools(self) -> bool:
        """Return whether the output layer reads pooled hidden states, and has no vocabulary to predict."""
        return self.embeds or self.scores

    def means(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Return the means of the `measured` quantities, from their sums over `count` terms of the loss.

        If answers are rated one by one, the reward of chosen (rejected) answers is a mean over these answers, and left
        out if there are none.
        """
        found = {name: value / max(count, 1.0) for name, value in zip(self.measured, sums, strict=True)}
        if self.rates:
            share = found[CHOSEN_SHARE]
            for name, part in (("reward_chosen", share), ("reward_rejected", 1 - share)):
                total = found.pop(name)
                found |= {name: total / part} if part else {}
            if 0 < share < 1:
                found["reward_margin"] = found["reward_chosen"] - found["reward_rejected"]
        return found


# Of pairs of answers: β · log-ratios, their difference, whether it is positive; answer tokens of both.
ANSWER_MEASURES = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "answer_tokens")
HEAD = f"{OUTPUT}.head.weight"  # of a reward head, [1, H]
SCORER = "score"  # of a reward model that is not trained: it scores single answers as well; no option names it
CHOSEN_SHARE = "chosen_share"  # of rated answers, those that are good
OBJECTIVES: Mapping[str, Objective] = {
    "next-token": Objective(embeds=False),
    "contrastive": Objective(embeds=True, learned=("log_scale",), counted="pairs"),
    "sigmoid": Objective(embeds=True, learned=("log_scale", "logit_bias"), counted="queries"),
    **{
        kind: Objective(
            embeds=False, counted="pairs", compares=True, refers=kind in ("dpo", "ipo"), measured=ANSWER_MEASURES
        )
        for kind in PAIRED
    },
    "kto": Objective(
        embeds=False,
        counted="answers",
        compares=True,
        rates=True,
        refers=True,
        measured=tuple(CHOSEN_SHARE if name == "reward_margin" else name for name in ANSWER_MEASURES),
    ),
    "reward": Objective(embeds=False, scores=True, counted="pairs", compares=True, measured=ANSWER_MEASURES[:-1]),
    SCORER: Objective(embeds=False, scores=True, counted="answers", compares=True, rates=True),
}


def objective_of(model: ModelConfig) -> Objective:
    """Return the objective that a model is trained for."""
    kind = model.objective.kind
    return OBJECTIVES[kind] if kind in OBJECTIVES else _of_extension(kind)


def _of_extension(kind: str) -> Objective:
    entry = registered("objectives")[kind]
    assert isinstance(entry, ObjectiveEntry), kind
    return Objective(embeds=True, learned=entry.learned, counted=entry.counted)


def pooling_of(model: ModelConfig) -> str | None:
    """Return which positions of a text a loss reads apart: those of an `answer`, the last for a `score`, those of an
    embedding (`last`, `mean`); None if it reads all alike.
    """
    objective = objective_of(model)
    if objective.compares:
        return "score" if objective.scores else "answer"
    return model.objective.pooling if objective.embeds else None


def learned_scalars(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the trained parameters of the loss; none if they are fixed."""
    return objective_of(model).learned if model.objective.learn_temperature else ()


def is_learned_scalar(key: str) -> bool:
    """Return whether a parameter, by its global name, is a scalar of the loss or a reward head.

    Most Hugging Face folders have neither.
    """
    return kind_of(key) == OUTPUT and not key.startswith(f"{OUTPUT}.linear.")


def ties_output(model: ModelConfig) -> bool:
    """Return whether the output layer shares the embedding's weight."""
    return model.language.tie_embeddings and not objective_of(model).pools
