"""Samples after template and tokenizer, of any length."""

from __future__ import annotations

import numpy as np

from megavlm.data.types import EncodedSample, SampleCost

LENGTH = 100  # tokens of the longest, and of a sequence


def encoded(length: int, *, piece: int) -> EncodedSample:
    """A sample of `length` tokens, each with the number of its piece."""
    cost = SampleCost(length=length, patches=0, images=0, vision=0.0, language=float(length))
    return EncodedSample(np.full(length, piece), np.ones(length, dtype=np.bool_), (), (), 0, cost)
