"""Load a Hugging Face folder as Transformers' own model: the reference for logits, and what answers questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from megavlm.errors import UserError


def transformers_model(folder: Path, *, dtype: torch.dtype | str = torch.float32) -> Any:
    """Return the model in evaluation mode, on the CPU; `dtype` "auto" is the type of the files.

    No code of the folder runs, nothing is fetched, and pickled weights are not read. Raises UserError where
    Transformers is not installed or refuses the folder.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError("Transformers, which runs the model, is not installed: pip install transformers") from error
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoModelForImageTextToText.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        ).eval()
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise UserError(f"Transformers cannot load {folder}: {reason}") from error
