"""Transformer Engine as a machine has it: an installation that cannot be loaded counts as none."""

from __future__ import annotations

import importlib
import sys
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
