"""What is replaced in megatron-core on every device."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Idempotent; imports megatron-core."""
    _patch_clipping()
    _patch_router()


def _patch_router() -> None:
    # Without Transformer Engine the router's product looks for a name that the failed import left undefined.
    routing: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    routing.te_general_gemm = getattr(routing, "te_general_gemm", None)


def _patch_clipping() -> None:
    # Without Transformer Engine and Apex it asks the device for the norm of one parameter after the other, and waits
    # for each; and it scales each gradient into a new tensor that it copies back.
    clipping: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    utils: Any = importlib.import_module("megatron.core.utils")
    if clipping.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clipping.l2_norm_impl = norm
        clipping.multi_tensor_scale_impl = _scale_in_place


def norm(chunk_size: int, flag: Any, tensors: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """[1] the norm of all tensors together, on their device. Nobody waits for it here."""
    parts = [part for each in tensors for part in torch._foreach_norm(each)]
    return torch.linalg.vector_norm(torch.stack(parts)).view(1), None


def _scale_in_place(chunk_size: int, flag: Any, tensors: list[list[Tensor]], scale: float) -> None:
    source, target = tensors
    assert source is target
    torch._foreach_mul_(target, scale)


def read_checkpoints_with(*, reader: type, planner: type) -> None:
    """Let megatron-core load checkpoints through these classes: its own unpickle whatever a file holds. Idempotent."""
    strategy: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    strategy._get_filesystem_reader = lambda folder, cache_metadata=False: reader(folder)
    strategy.MCoreLoadPlanner = planner
