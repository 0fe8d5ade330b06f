"""gloo groups with one worker thread each, where torch gives each two.

Both threads of a group write the name of the collective that they have just completed into the same string, without a
lock (torch 2.13, `ProcessGroupGloo::runLoop`, `lastCompletedWorkName`). A name of more than 15 characters is on the
heap, as that of a coalesced all-gather is, and two threads that assign at once free it twice. A run whose collectives
overlap then dies after hours: "malloc(): unaligned tcache chunk detected" (`tests/unit/backend/test_gloo.py` shows it).

torch 2.14 has the race, too, but other names for options: there groups keep two threads.

One thread takes a group's collectives in the order in which every rank starts them, and so waits for nothing that two
would not wait for.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist

from megavlm.errors import UserError


def install() -> None:
    """Let every gloo group that torch makes from now on have one worker thread. Idempotent."""
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
    """Return what torch would take: the interfaces that `GLOO_SOCKET_IFNAME` names, or that of the host's name."""
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
