"""Named ranges in a profiler's trace. While nobody traces, a range costs the reading of one flag."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows as a range called `name` in a trace of `torch.profiler`."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(name)
