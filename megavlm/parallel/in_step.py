"""Let every rank do work that takes long, as a download does, without a collective that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from megavlm.errors import UserError

_TURN = 1.0  # seconds between two exchanges


def in_step(action: Callable[[], None], *, tick: Callable[[], None]) -> list[Exception | None]:
    """Run an action of each rank in a thread; return, on all ranks, what each one's raised. Every rank calls it.

    While any of them runs, the ranks exchange a word every second and call `tick`, so that none waits for long.
    """
    raised: list[Exception] = []

    def act() -> None:
        try:
            action()
        except (UserError, OSError) as error:
            raised.append(error)
        except BaseException as error:  # may be one that cannot be sent to others
            raised.append(RuntimeError(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    found: list[tuple[bool, Exception | None]] = [(False, None)] * dist.get_world_size()
    while not all(ended for ended, _ in found):
        thread.join(_TURN)
        tick()
        ended = not thread.is_alive()
        dist.all_gather_object(found, (ended, raised[0] if ended and raised else None))
    return [error for _, error in found]
