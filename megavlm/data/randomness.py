"""Random numbers that are addressed, not consumed: the same (seed, index, stream) gives the same generator anywhere."""

from __future__ import annotations

import numpy as np

_WORD = (1 << 64) - 1


def generator(*, seed: int, index: int, stream: int = 0) -> np.random.Generator:
    """A generator for one sample of a stream.

    Philox is counter-based (Salmon et al., 2011): (seed, index) is its key, and streams start at counters that are
    2^192 draws apart, so generators of different addresses never overlap.
    """
    key = np.array([seed & _WORD, index & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
