"""Let the processes of a run find one another, and again after each restart by torchrun.

torchrun keeps one store for all attempts, and what dead ranks wrote stays in it. It numbers restarts after a failure
(TORCHELASTIC_RESTART_COUNT), each agent its own, but not those after an agent joined or left, so that no number in
the environment tells two starts apart. The ranks of a start therefore agree on a name for it, which prefixes all that
they write.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megavlm.errors import RankError, UserError

_PLACE = "megavlm/rendezvous"
_PAUSE = 0.02  # seconds between two looks at the store
_GRACE = 10.0  # seconds for which the others outlast rank 0, which knows who is missing
_LAST_CHANCE = 1.0  # seconds for ranks that are there to arrive, once others have not come
_APART = "the ranks of this start did not find one another in --distributed-timeout-minutes"


@dataclass(frozen=True)
class Meeting:
    """What a process knows once the ranks of its start have found one another."""

    store: dist.Store  # no earlier start has written to it
    rank: int
    world: int


def store_of_agents() -> dist.Store | None:
    """Return the store of torchrun's agents, which is there before the ranks have met; None where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=3))
    except (dist.DistError, KeyError, ValueError):
        return None
    return dist.PrefixStore(f"megavlm/{start}", store)


def join(timeout: timedelta) -> Meeting:
    """Meet the ranks that are started together. Raises TimeoutError, on rank 0 with the ranks that are missing, and
    UserError if there is no connection to rank 0 at MASTER_ADDR and MASTER_PORT.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        socket.getaddrinfo(address, port)
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    except socket.gaierror as error:
        line = f"MASTER_ADDR {address} is not known here: set it to the address of rank 0's machine"
        raise RankError(line) from error
    except dist.DistNetworkError as error:
        told = str(error).splitlines()[0].rstrip(".")
        raise RankError(
            f"no connection at MASTER_ADDR {address}, MASTER_PORT {port}: {told}: rank 0 must run there, with a port "
            "that is free and reachable"
        ) from error
    except dist.DistStoreError as error:  # without torchrun, whose store is there before
        raise TimeoutError(
            f"{str(error).rstrip('.')} (--distributed-timeout-minutes): start the others, with the same MASTER_ADDR "
            "and MASTER_PORT, or look why they end"
        ) from error
    return Meeting(dist.PrefixStore(agree(store, rank, world, timeout=timeout), store), rank, world)


def agree(store: dist.Store, rank: int, world: int, *, timeout: timedelta) -> str:
    """Return a name that is equal on the `world` ranks that call this together, and was never returned before.

    Each rank writes a word that nobody has used, rank 0 answers each with the name and the word, and a rank believes
    an answer with its own word: what an earlier start left in the store has another.
    """
    word = uuid.uuid4().hex
    if rank > 0:
        store.set(f"{_PLACE}/word/{rank}", word)
        return _answer(store, rank, word, deadline=time.monotonic() + timeout.total_seconds() + _GRACE)
    others = [f"{_PLACE}/word/{other}" for other in range(1, world)]
    answered: dict[str, bytes] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        while others and store.add(f"{word}/arrived", 0) < len(others):
            store.wait(others)
            _hand_out(store, word, others, answered)
            _pause_until(deadline)
    except (dist.DistStoreError, TimeoutError) as error:
        _hand_out(store, word, [key for key in others if store.check([key])], answered)
        time.sleep(_LAST_CHANCE)
        missing = [other for other in range(1, world) if not store.check([_arrival(word, other)])]
        raise TimeoutError(
            f"rank {', '.join(map(str, missing))} of {world} did not arrive within {timeout.total_seconds():.0f} s "
            "(--distributed-timeout-minutes): its process hangs in imports or is stopped, or its host is cut off"
        ) from error
    return word


def _hand_out(store: dist.Store, word: str, keys: Sequence[str], answered: dict[str, bytes]) -> None:
    """Answer those of the words at `keys` that are not `answered` yet."""
    for key, heard in zip(keys, store.multi_get(list(keys)) if keys else (), strict=True):
        if answered.get(key) != heard:
            store.set(key.replace("/word/", "/answer/"), f"{word} {heard.decode()}")
            answered[key] = heard


def refuse_shared_devices(met: Meeting, *, device: str) -> None:
    """Raise UserError, on all ranks of the world alike, if two of them gave the same name of a device."""
    met.store.set(f"{_PLACE}/device/{met.rank}", device)
    if met.rank == 0:
        devices = met.store.multi_get([f"{_PLACE}/device/{rank}" for rank in range(met.world)])
        met.store.set(f"{_PLACE}/devices", shared_device([name.decode() for name in devices]) or "")
    if complaint := met.store.get(f"{_PLACE}/devices").decode():
        raise UserError(complaint)


def shared_device(devices: Sequence[str]) -> str | None:
    """Return a line on the first two ranks that have one device, given the devices by rank; None if there are none."""
    first: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if device in first:
            return (
                f"ranks {first[device]} and {rank} have the same GPU ({device}): start as many processes on a machine "
                "as it has GPUs, and let each see all of them, or only its own"
            )
        first[device] = rank
    return None


def _answer(store: dist.Store, rank: int, word: str, *, deadline: float) -> str:
    key = f"{_PLACE}/answer/{rank}"
    while True:
        try:
            store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
        except dist.DistStoreError as error:
            raise TimeoutError(_APART) from error
        name, _, heard = store.get(key).decode().partition(" ")
        if heard == word:
            store.set(_arrival(name, rank), "")
            store.add(f"{name}/arrived", 1)
            return name
        _pause_until(deadline)


def _arrival(name: str, rank: int) -> str:
    return f"{name}/arrived/{rank}"


def _pause_until(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(_APART)
    time.sleep(_PAUSE)


_TURN = 1.0  # seconds between two exchanges


def in_step(action: Callable[[], None], *, tick: Callable[[], None]) -> list[Exception | None]:
    """Run an action of each rank that takes long, as a download does; return, on all ranks, what each one's raised.

    Every rank calls it, and each runs its action in a thread. While any of them runs, the ranks exchange a word every
    second and call `tick`, so that none waits for long.
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
