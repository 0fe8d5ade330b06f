"""Estimate what failures cost a job, and how often it should save, by the formulas of Young (1974) and Daly (2006).

Failures are a Poisson process: each GPU (with its share of host, network and storage) fails at a constant rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Llama 3 (Dubey et al. 2024, section 3.3.4) had 466 interruptions in 54 days on 16,384 GPUs.
LLAMA3_PER_GPU_HOUR = 466 / (54 * 24 * 16_384)


@dataclass(frozen=True)
class FailingJob:
    """Failure and save parameters of a job, in seconds except `gpus` and `rate`."""

    gpus: int
    rate: float  # interruptions per GPU and hour
    stall: float  # for which training stands still in a save
    restart: float  # from the end of an attempt to the first step of the next
    detection: float  # from a failure to the end of the attempt

    @property
    def between_failures(self) -> float:
        """Return the mean time between failures of the job; infinite if nothing fails."""
        return 3600 / (self.rate * self.gpus) if self.rate else math.inf

    @property
    def best_interval(self) -> float:
        """Return the seconds of training between saves that lose the least (Young; Daly, first order).

        Of each second, saves take stall / T. A failure, of which there are 1 / M per second, loses half an interval on
        average, T / 2, plus a time that does not depend on T. The derivative −stall / T² + 1 / (2 M) is zero at
        T = √(2 · stall · M).
        """
        return math.sqrt(2 * self.stall * self.between_failures)

    def goodput(self, interval: float) -> float:
        """Return the expected share of time in training that a checkpoint has kept (Daly).

        Of the training before a failure after time t, floor((t − R) / (T + stall)) intervals T are kept, where R is
        detection and restart, which begin anew if a failure falls into them. The expectation of that number is
        Σ_k P(t ≥ R + k (T + stall)) = e^(−R / M) / (e^((T + stall) / M) − 1), for k from 1; M is the time per failure.
        """
        mean, cycle = self.between_failures, interval + self.stall
        if math.isinf(mean):
            return 1.0 if math.isinf(interval) else interval / cycle
        if cycle > 700 * mean:  # e^700 is the end of a float's range, and nothing is kept long before
            return 0.0
        kept = interval / mean / math.expm1(cycle / mean) if cycle else 1.0  # a save that costs nothing comes always
        return kept * math.exp(-(self.detection + self.restart) / mean)
