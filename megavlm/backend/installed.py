"""Control which optional packages megatron-core imports: Transformer Engine, triton, and packages unused here."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

_NAMES = ("transformer_engine", "transformer_engine.pytorch")
# Packages that megatron-core imports if installed, for inference, timers and object stores. They are unused here, and
# their import delays the start.
UNUSED_BY_MEGATRON_CORE = ("wandb", "multistorageclient", "torch.utils.tensorboard")


@cache
def loading_error() -> str:
    """Try to load Transformer Engine, once; return the error, or "" if it can be loaded or is not installed.

    A wheel for another CUDA, torch or processor fails at import in many ways, but megatron-core only handles
    ImportError: after any error, Transformer Engine is hidden.
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


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Return a context in which importing the modules `names` fails, unless they are loaded already."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


_MOE_KERNELS = "megatron.core.transformer.moe.ops.paged_stash"


def import_without_triton() -> None:
    """Make megatron-core importable without triton; call it before megatron-core's import. Idempotent.

    From 0.19 on, megatron-core's schedules import Triton kernels of expert layers, which are unused here, and torch's
    CPU builds come without triton. The kernels are replaced by stand-ins that raise ImportError.
    """
    if find_spec("triton") is None and _MOE_KERNELS not in sys.modules:
        module = types.ModuleType(_MOE_KERNELS)
        module.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
        module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = _Missing()  # type: ignore[attr-defined]
        sys.modules[_MOE_KERNELS] = module


class _Missing:
    """Stand-in for a Triton kernel; a launch, `kernel[grid](...)`, raises ImportError."""

    def __getitem__(self, grid: object) -> object:
        raise ImportError("this kernel of megatron-core needs triton, which is not installed: pip install triton")
