"""Confidence intervals of a mean score over questions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
_Z = 1.959963984540054  # of a normal distribution, 95 % within ± z
_RESAMPLES, _SEED = 10_000, 0


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927): it stays within 0 and 1 and holds for few questions, too.

    Its bounds are the shares p whose own deviation z·√(p(1−p)/n) reaches the observed one; solved for p.
    """
    share, spread = successes / total, _Z**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean (Efron 1979) of 10,000 resamples, the same in each run.

    A resample of n questions is a multinomial draw of how often each distinct score occurs.
    """
    values, counts = np.unique(np.asarray(scores, dtype=np.float64), return_counts=True)
    total = int(counts.sum())
    drawn = np.random.default_rng(_SEED).multinomial(total, counts / total, size=_RESAMPLES)
    low, high = np.percentile(drawn @ values / total, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return float(low), float(high)
