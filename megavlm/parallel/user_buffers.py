"""Allocate Transformer Engine's user buffers for `--tp-comm-overlap`. Not run on a GPU so far.

Tensor-parallel ranks share this memory. Through it they exchange parts of the sequence while the matrix products of
language layers run on other parts.
"""

from __future__ import annotations

from importlib import import_module

import torch

from megavlm.backend import Backend
from megavlm.config.schema import Config
from megavlm.errors import UserError


def start_user_buffers(config: Config, backend: Backend) -> None:
    """Make the buffers; every rank calls it once, after torch.distributed is initialized and before any layer runs.

    A buffer holds the language model's hidden states of a context-parallel rank's part of a micro-batch, [S/CP·B, H];
    Transformer Engine takes no other number of tokens. Layers in FP8 have buffers beside those of the layers in bf16.
    Raises UserError if the devices do not allow such buffers.
    """
    if backend.is_cpu:
        raise UserError("--tp-comm-overlap needs CUDA devices, and there is none here: leave it out")
    try:
        engine = import_module("transformer_engine.pytorch.module.base")
    except ImportError as error:
        raise UserError(
            "--tp-comm-overlap needs Transformer Engine: pip install -e '.[gpu]', or leave it out"
        ) from error
    train, parallel, modes = config.train, config.parallel, engine.UserBufferQuantizationMode
    in_fp8 = config.precision.fp8 != "none"
    try:
        engine.initialize_ub(
            [
                train.seq_length // parallel.context_parallel_size * train.micro_batch_size,
                config.model.language.hidden_size,
            ],
            parallel.tensor_model_parallel_size,
            quantization_modes=[modes.NONE, modes.FP8] if in_fp8 else [modes.NONE],
            dtype=torch.float16 if config.precision.dtype == "fp16" else torch.bfloat16,
            bootstrap_backend=backend.communication,
        )
    except (AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--tp-comm-overlap is not possible on these devices ({reason}): leave it out") from error
