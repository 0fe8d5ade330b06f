"""Names for stretches of a step in a profiler's trace, at the price of reading one flag while nobody traces."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def mark(name: str) -> AbstractContextManager[Any]:
    """`with mark("optimizer"):` is a range of that name in the trace of `torch.profiler`, and nothing without one."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(name)
