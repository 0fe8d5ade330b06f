"""What differs between the versions of megatron-core that are supported (0.16.1 to 0.19): only this module knows.

Each function says which versions need it, and asks for the difference itself where that is possible, not for a number.
"""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec

_MOE_KERNELS = "megatron.core.transformer.moe.ops.paged_stash"


def import_without_triton() -> None:
    """Let megatron-core be imported where there is no triton; call it before that import. Idempotent.

    From 0.19 on, its schedules import Triton kernels of expert layers, which nothing here runs, and torch's CPU builds
    come without triton. Kernels that raise stand in for them.
    """
    if find_spec("triton") is None and _MOE_KERNELS not in sys.modules:
        module = types.ModuleType(_MOE_KERNELS)
        module.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
        module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = _Missing()  # type: ignore[attr-defined]
        sys.modules[_MOE_KERNELS] = module


class _Missing:
    """A Triton kernel, which is launched as `kernel[grid](...)`."""

    def __getitem__(self, grid: object) -> object:
        raise ImportError("this kernel of megatron-core needs triton, which is not installed: pip install triton")
