"""Let the processes that torchrun starts find one another, and again after each restart.

torchrun keeps one store for all attempts, and what dead ranks wrote stays in it. It numbers restarts after a failure
(TORCHELASTIC_RESTART_COUNT), each agent its own, but not those after an agent joined or left, so that no number in
the environment tells two starts apart. The ranks of a start therefore agree on a name for it, which prefixes all that
they write.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

_PLACE = "megavlm/rendezvous"
_PAUSE = 0.02  # seconds between two looks at the store


@dataclass(frozen=True)
class Meeting:
    """What a process knows once the ranks of its start have found one another."""

    store: dist.Store  # no earlier start has written to it
    rank: int
    world: int


def join(timeout: timedelta) -> Meeting:
    """Meet the ranks that torchrun starts together. Raises TimeoutError, on rank 0 with the ranks that are missing."""
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    return Meeting(dist.PrefixStore(agree(store, rank, world, timeout=timeout), store), rank, world)


def agree(store: dist.Store, rank: int, world: int, *, timeout: timedelta) -> str:
    """Return a name that is equal on the `world` ranks that call this together, and was never returned before.

    Each rank writes a word that nobody has used, rank 0 answers each with the name and the word, and a rank believes
    an answer with its own word: what an earlier start left in the store has another.
    """
    word = uuid.uuid4().hex
    if rank > 0:
        store.set(f"{_PLACE}/word/{rank}", word)
        return _answer(store, rank, word, deadline=time.monotonic() + timeout.total_seconds())
    others = [f"{_PLACE}/word/{other}" for other in range(1, world)]
    answered: dict[str, bytes] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        while others and store.add(f"{word}/arrived", 0) < len(others):
            words = dict(zip(others, store.multi_get(others), strict=True))  # returns once all keys are set
            for key, heard in words.items():
                if answered.get(key) != heard:
                    store.set(key.replace("/word/", "/answer/"), f"{word} {heard.decode()}")
            answered = words
            _pause_until(deadline)
    except (dist.DistStoreError, TimeoutError) as error:
        missing = [other for other in range(1, world) if not store.check([_arrival(word, other)])]
        raise TimeoutError(
            f"rank {', '.join(map(str, missing))} of {world} did not arrive within {timeout.total_seconds():.0f} s "
            "(--distributed-timeout-minutes): its process hangs in imports or is stopped, or its host is cut off"
        ) from error
    return word


def _answer(store: dist.Store, rank: int, word: str, *, deadline: float) -> str:
    while True:
        name, _, heard = store.get(f"{_PLACE}/answer/{rank}").decode().partition(" ")
        if heard == word:
            store.set(_arrival(name, rank), "")
            store.add(f"{name}/arrived", 1)
            return name
        _pause_until(deadline)


def _arrival(name: str, rank: int) -> str:
    return f"{name}/arrived/{rank}"


def _pause_until(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the ranks of this start did not find one another in --distributed-timeout-minutes")
    time.sleep(_PAUSE)
