"""Patches for gloo: one worker thread per group instead of torch's two, and uneven gathers for expert layers.

Both threads of a group write the name of the collective that they have just completed into the same string, without a
lock (torch 2.13, `ProcessGroupGloo::runLoop`, `lastCompletedWorkName`). A name of more than 15 characters, such as a
coalesced all-gather's, is on the heap, and two threads that assign at once free it twice. A run with overlapping
collectives then dies after hours: "malloc(): unaligned tcache chunk detected" (`tests/unit/backend/test_gloo.py`
reproduces the error).

torch 2.14 has the race, too, but other names for options: groups keep two threads with this version.

One thread runs a group's collectives in the order in which every rank starts them, so it blocks only where two threads
would block, too.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.errors import UserError


def install() -> None:
    """Patch torch so that every new gloo group has one worker thread. Idempotent."""
    gloo: Any = dist.ProcessGroupGloo
    original = gloo.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def with_one_worker(self: Any, *args: Any, timeout: Any = None, **others: Any) -> None:
        options = gloo._Options()
        if len(args) != 3 or timeout is None or any(others.values()) or not hasattr(options, "_threads"):
            given = {**others, **({} if timeout is None else {"timeout": timeout})}
            original(self, *args, **given)  # options of the caller's own, or a torch that names them otherwise
            return
        options._threads, options._timeout, options._devices = 1, timeout, _devices(gloo)
        original(self, *args, options)

    gloo.__init__ = with_one_worker


def _devices(gloo: Any) -> list[Any]:
    """Return torch's default gloo devices: the interfaces in `GLOO_SOCKET_IFNAME`, or the interface of the host name.

    Raises UserError if there is no interface of a given name.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [gloo.create_default_device()]
    try:
        return [gloo.create_device(interface=name) for name in names.split(",")]
    except RuntimeError as error:
        raise UserError(
            f"GLOO_SOCKET_IFNAME={names}: this machine has no interface of that name with an address; `ip address` "
            "lists those that it has"
        ) from error


def install_gathers() -> None:
    """Patch megatron-core's expert dispatcher for gloo: token counts on the host, uneven gathers. Idempotent."""
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _on_host
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    if not hasattr(mappings._gather_along_first_dim, "__wrapped__"):
        mappings._gather_along_first_dim = _or_uneven(mappings._gather_along_first_dim, _gather)
        mappings._reduce_scatter_along_first_dim = _or_uneven(mappings._reduce_scatter_along_first_dim, _scatter)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a tensor, as numpy if `as_numpy`; megatron-core does not convert tensors that are already on the host."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _or_uneven(
    even: Callable[..., Tensor], uneven: Callable[[Tensor, Any, list[int]], Tensor]
) -> Callable[..., Tensor]:
    """Return a collective that calls `even` (megatron-core's) for equal `sizes`, and `uneven` (for gloo) otherwise."""

    @functools.wraps(even)
    def communicate(input_: Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None or len(set(sizes)) == 1:
            return even(input_, group, None, use_global_buffer)
        return uneven(input_, group, list(sizes))

    return communicate


def _gather(input_: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """All-gather parts of different `sizes` along the first dimension, padded to the longest part in transit."""
    longest = max(sizes)
    padded = input_.new_zeros(longest, *input_.shape[1:])
    padded[: len(input_)] = input_
    whole = input_.new_empty(group.size() * longest, *input_.shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(whole.split(longest), sizes, strict=True)])


def _scatter(input_: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """Reduce-scatter parts of different `sizes` along the first dimension, padded to the longest part in transit."""
    longest = max(sizes)
    whole = input_.new_zeros(group.size(), longest, *input_.shape[1:])
    for part, rows in zip(whole, input_.split(sizes), strict=True):
        part[: len(rows)] = rows
    own = input_.new_empty(longest, *input_.shape[1:])
    dist.reduce_scatter_tensor(own, whole.flatten(0, 1), group=group)
    return own[: sizes[group.rank()]].contiguous()
