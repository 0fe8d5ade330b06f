"""The options of validation, but for its data (`data.validation`)."""

from __future__ import annotations

from dataclasses import dataclass

from megavlm.config.option import option


@dataclass(frozen=True)
class EvaluationConfig:
    """When the loss on validation data is measured, and on how many of them."""

    eval_interval: int = option(
        None,
        "Steps between measurements of the loss on validation data; there is one at the end, too. 0: only that one. "
        "Default: --save-interval.",
    )
    eval_iters: int | None = option(
        None, "Most global batches of validation data that are measured, a fair sample of them; default: all."
    )
    eval_samples: int = option(96, "Digits: number of held-out questions of each kind.")
