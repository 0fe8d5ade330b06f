"""The learning rate of each iteration.

The schedules are those of Transformers (`get_cosine_schedule_with_warmup`, `get_linear_schedule_with_warmup`,
`get_wsd_schedule` with a linear decay), which count steps from 0: after the warm-up, iteration k trains with the rate
of step k - 1, so the first iteration of the decay has the peak, and the last still trains. Only the warm-up of W
iterations is a step ahead: its first iteration has 1/W of the peak, where Transformers' step 0 has the rate 0.
"""

from __future__ import annotations

import math
from typing import Any

from megavlm.config.schema import OptimizerConfig


def learning_rate(options: OptimizerConfig, iteration: int, *, peak: float, floor: float) -> float:
    """Return the rate of an iteration (from 1), whose schedule goes up to `peak` and down to `floor`.

    `floor` is the rate of iterations after `--lr-decay-iters`.
    """
    warmup, end = options.lr_warmup_iters, options.lr_decay_iters
    if 0 < iteration <= warmup:
        return peak * iteration / warmup
    if options.lr_decay_style == "constant":
        return peak
    length = options.lr_wsd_decay_iters if options.lr_decay_style == "WSD" else end - warmup
    left = min(max((end - iteration + 1) / length, 0.0), 1.0)  # of the decay
    if options.lr_decay_style == "cosine":
        left = (1.0 - math.cos(math.pi * left)) / 2
    return floor + left * (peak - floor)


class LearningRate:
    """Sets the learning rate and the weight decay of each parameter group of an optimizer."""

    def __init__(self, options: OptimizerConfig, optimizer: Any) -> None:
        self.options = options
        self.optimizer = optimizer
        self.num_steps = 0

    def step(self, increment: int) -> None:
        """Go on by so many iterations: before the update of an iteration, and from 0 to where a run resumes."""
        self.num_steps += increment
        options = self.options
        for group in self.optimizer.param_groups:
            peak, floor = group.get("max_lr", options.lr), group.get("min_lr", options.min_lr)
            group["lr"] = learning_rate(options, self.num_steps, peak=peak, floor=floor)
            group["weight_decay"] = options.weight_decay * group.get("wd_mult", 1.0)

    def current(self) -> float:
        """Return the rate of parts of the model without a rate of their own (`--lr`)."""
        return learning_rate(self.options, self.num_steps, peak=self.options.lr, floor=self.options.min_lr)
