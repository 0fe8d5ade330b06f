"""gloo groups with one worker thread each, where torch gives each two.

Both threads of a group write the name of the collective that they have just completed into the same string, without a
lock (torch 2.13, `ProcessGroupGloo::runLoop`, `lastCompletedWorkName`). A name of more than 15 characters is on the
heap, as that of a coalesced all-gather is, and two threads that assign at once free it twice. A run whose collectives
overlap then dies after hours: "malloc(): unaligned tcache chunk detected" (`tests/unit/backend/test_gloo.py` shows it).

One thread takes a group's collectives in the order in which every rank starts them, and so waits for nothing that two
would not wait for.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def install() -> None:
    """Give gloo groups that torch makes from now on one worker thread. Idempotent."""
    gloo: Any = dist.ProcessGroupGloo
    original = gloo.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def with_one_worker(self: Any, store: Any, rank: int, size: int, timeout: Any = dist.default_pg_timeout) -> None:
        if not isinstance(timeout, timedelta):  # options in its place: whoever made them has chosen
            original(self, store, rank, size, timeout)
            return
        options = gloo._Options()
        options._threads, options._timeout, options._devices = 1, timeout, _devices(gloo)
        original(self, store, rank, size, options)

    gloo.__init__ = with_one_worker


def _devices(gloo: Any) -> list[Any]:
    """Return what torch would take: the interfaces that `GLOO_SOCKET_IFNAME` names, or that of the host's name."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in names.split(",")]
