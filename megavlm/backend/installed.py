"""Packages that megatron-core takes if it finds them, as a machine has them: Transformer Engine and triton."""

from __future__ import annotations

import importlib
import sys
import types
from functools import cache
from importlib.util import find_spec

_NAMES = ("transformer_engine", "transformer_engine.pytorch")


@cache
def loading_error() -> str:
    """Load Transformer Engine, once, and return why it cannot be loaded: "" where it can, or is not installed.

    A wheel for another CUDA, torch or processor fails at import in many ways; megatron-core expects ImportError alone.
    """
    if find_spec("transformer_engine") is None:
        return ""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        hide()
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return ""


def hide() -> None:
    """Make megatron-core believe that Transformer Engine is not installed; call it before megatron-core's import."""
    for name in [name for name in sys.modules if name.startswith("transformer_engine.")] + list(_NAMES):
        sys.modules[name] = None  # type: ignore[assignment]


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
