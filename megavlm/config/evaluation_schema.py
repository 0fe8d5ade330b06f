"""The options of validation and of answers to held-out prompts, but for their data (`data.validation`)."""

from __future__ import annotations

from dataclasses import dataclass

from megavlm.config.needs import data_kind, has_validation
from megavlm.config.option import AT_LEAST_0, AT_LEAST_1, KEY_ONLY, Needs, option

VALIDATION = Needs(has_validation, "without validation data", "add --validation PATH or --validation-split 0.01")
ANSWERS = Needs(
    lambda config: has_validation(config) and config.evaluation.sample_interval > 0,
    "without answers",
    "add --sample-interval 100",
)


@dataclass(frozen=True)
class EvaluationConfig:
    """When the loss on validation data is measured, and on how many of them; when the model answers some of them."""

    eval_interval: int = option(
        None,
        "Steps between measurements of the loss on validation data; there is one at the end, too. 0: only that one. "
        "Default: --save-interval.",
        valid=AT_LEAST_0,
        needs=VALIDATION,
    )
    eval_iters: int | None = option(
        None,
        "Most global batches of validation data that are measured, a fair sample of them; default: all.",
        valid=AT_LEAST_1,
        needs=VALIDATION,
    )
    eval_samples: int = option(
        96,
        "Digits: number of held-out questions of each kind.",
        flag=KEY_ONLY,
        valid=AT_LEAST_1,
        needs=Needs(lambda config: data_kind(config) == "digits", "except on digits", "use --data digits"),
    )
    eval_ema: bool = option(
        False,
        "Validate, and answer held-out prompts, with the averaged weights; off: with those of the last step.",
        flag=KEY_ONLY,
        needs=Needs(lambda config: config.optimizer.ema_decay > 0, "without averaged weights", "add --ema-decay 0.999"),
    )
    sample_interval: int = option(
        0,
        "Steps between the model's answers to some validation samples, shown beside the right answers on "
        "RUN_DIR/samples/index.html; there are answers before the first step and at the end, too. 0: never.",
        valid=AT_LEAST_0,
        needs=Needs(
            has_validation,
            "without validation data, which have the prompts",
            "add --validation PATH or --validation-split 0.01",
        ),
    )
    sample_count: int = option(
        8,
        "Number of validation samples to answer, from each data set in turn.",
        flag=KEY_ONLY,
        valid=AT_LEAST_1,
        needs=ANSWERS,
    )
    sample_max_new_tokens: int = option(
        128, "Most tokens of such an answer.", flag=KEY_ONLY, valid=AT_LEAST_1, needs=ANSWERS
    )
