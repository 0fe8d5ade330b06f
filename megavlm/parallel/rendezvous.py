"""Rendezvous and synchronisation of the ranks of a run, which also work after a restart by torchrun.

torchrun keeps one store for all attempts, including the entries of dead ranks. Each agent counts its restarts after a
failure (TORCHELASTIC_RESTART_COUNT), but not restarts after an agent joined or left, so that no number in the
environment distinguishes two starts. The ranks of a start therefore agree on a unique name, the prefix of all their
keys in the store.
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
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from megavlm.backend import Backend
from megavlm.errors import RankError, RanksMissing, UserError

Found = TypeVar("Found")

_PLACE = "megavlm/rendezvous"
_PAUSE = 0.02  # seconds between two polls of the store
_GRACE = 10.0  # seconds by which other ranks wait longer than rank 0, which can name the missing ranks
_LOOK, _SAY = timedelta(seconds=60), 300.0  # while waiting for rank 0: time per poll; seconds before a message
_LAST_CHANCE = 1.0  # seconds after the timeout for present ranks to confirm their arrival
_APART = "the ranks of this start did not find one another in --distributed-timeout-minutes"


@dataclass(frozen=True)
class Meeting:
    """Result of the rendezvous: the store of this start, this rank and the world size."""

    store: dist.Store  # no earlier start has written to it
    rank: int
    world: int


def store_of_agents() -> dist.Store | None:
    """Connect to the store of torchrun's agents, which exists before the rendezvous; None if there is no store."""
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
    """Rendezvous with the other ranks of this start. Raises TimeoutError, which on rank 0 names the missing ranks, and
    RankError if there is no connection to rank 0 at MASTER_ADDR and MASTER_PORT.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        socket.getaddrinfo(address, port)
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    except socket.gaierror as error:
        line = f"MASTER_ADDR {address} is not known here: set it to the address of rank 0's machine"
        raise RankError(line) from error
    except dist.DistNetworkError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise RankError(
            f"no connection at MASTER_ADDR {address}, MASTER_PORT {port}: {reason}: rank 0 must run there, with a port "
            "that is free and reachable"
        ) from error
    except dist.DistStoreError as error:  # without torchrun: its store exists before
        raise TimeoutError(
            f"{str(error).rstrip('.')} (--distributed-timeout-minutes): start the others, with the same MASTER_ADDR "
            "and MASTER_PORT, or look why they end"
        ) from error
    return Meeting(dist.PrefixStore(agree(store, rank, world, timeout=timeout), store), rank, world)


def agree(store: dist.Store, rank: int, world: int, *, timeout: timedelta) -> str:
    """Return a new unique name, the same on all `world` ranks that call this together. Raises TimeoutError.

    Each rank writes a random word to the store, and rank 0 answers each rank with the name and that rank's word. A rank
    accepts only an answer with its own word: answers left in the store by an earlier start have other words.
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
    """Answer the words at `keys` that are new or have changed since they were `answered`."""
    for key, heard in zip(keys, store.multi_get(list(keys)) if keys else (), strict=True):
        if answered.get(key) != heard:
            store.set(key.replace("/word/", "/answer/"), f"{word} {heard.decode()}")
            answered[key] = heard


def refuse_shared_devices(met: Meeting, *, device: str) -> None:
    """Raise UserError on all ranks of the world if two ranks passed the same `device`."""
    met.store.set(f"{_PLACE}/device/{met.rank}", device)
    if met.rank == 0:
        first: dict[bytes, int] = {}
        complaint = ""
        for rank, each in enumerate(met.store.multi_get([f"{_PLACE}/device/{rank}" for rank in range(met.world)])):
            if first.setdefault(each, rank) < rank:
                complaint = (
                    f"ranks {first[each]} and {rank} have the same GPU ({each.decode()}): start as many processes on a "
                    "machine as it has GPUs, and let each see all of them, or only its own"
                )
        met.store.set(f"{_PLACE}/devices", complaint)
    if complaint := met.store.get(f"{_PLACE}/devices").decode():
        raise UserError(complaint)


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
    """Run a long action, such as a download, on every rank; return each rank's exception, or None, on all ranks.

    All ranks call this function. The action runs in a thread. Until all actions have ended, the ranks exchange their
    status every second and call `tick`, so that no rank waits for long.
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


def meet(*, timeout_minutes: float) -> Meeting:
    """Rendezvous with the ranks that the environment describes (`world_of`); a single process gets a world of one rank.

    Raises RanksMissing after the timeout.
    """
    if dist.is_initialized():
        return Meeting(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    if dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        try:
            return join(timedelta(minutes=timeout_minutes))
        except TimeoutError as error:
            raise RanksMissing(str(error)) from error
    return Meeting(dist.HashStore(), 0, 1)


def start(
    backend: Backend, *, timeout_minutes: float, meeting: Meeting | None = None, shared_devices: bool = False
) -> None:
    """Initialize torch.distributed with the ranks of `meet`, unless it is initialized.

    `device_id` is not passed to NCCL: with a device, NCCL would connect each group immediately, by a split of the
    world's communicator in which all ranks take part, and send all pipeline communication through one queue.

    Args:
        shared_devices: whether ranks may share a GPU, as in tests.
    """
    if dist.is_initialized():
        return
    met = meeting or meet(timeout_minutes=timeout_minutes)
    if backend.communication == "nccl" and met.world > 1 and not shared_devices:
        refuse_shared_devices(met, device=str(torch.cuda.get_device_properties(backend.device).uuid))
    TorchWorld(backend.communication, met, timedelta(minutes=timeout_minutes)).begin()


@dataclass
class TorchWorld:
    """World of torch.distributed for the ranks of this start, initialised anew for each layout."""

    backend: str
    met: Meeting
    timeout: timedelta
    layouts: int = 0
    turns: int = 0  # calls of `await_rank_0` so far
    current: ClassVar[TorchWorld | None] = None  # torch also has one world per process

    def begin(self) -> None:
        """Initialize torch.distributed with a new prefix in the store, so that all ranks name groups consistently."""
        TorchWorld.current = self
        store = dist.PrefixStore(f"layout-{self.layouts}", self.met.store)
        dist.init_process_group(
            self.backend, store=store, rank=self.met.rank, world_size=self.met.world, timeout=self.timeout
        )
        self.layouts += 1

    def await_rank_0(self) -> None:
        """Wait without a time limit until rank 0 calls this. Uses the store, because a collective would time out.

        If a rank dies, the wait ends because torchrun stops the others, or because the store is gone.
        """
        self.turns += 1
        key, began = f"turn-{self.turns}", time.monotonic()
        if self.met.rank == 0:
            self.met.store.set(key, "")
            return
        while not self.rank_0_came(key):
            if self.met.rank == self.met.world - 1 and time.monotonic() - began > _SAY:
                print(f"rank 0 has worked alone for {(time.monotonic() - began) / 60:.0f} min; others wait", flush=True)

    def rank_0_came(self, key: str) -> bool:
        """Wait a minute at most for a key of rank 0; return whether it is there. The watchdog knows this function."""
        try:
            self.met.store.wait([key], _LOOK)
        except dist.DistStoreError:  # not within the time
            return False
        return True


def barrier() -> None:
    """Wait until all ranks call this. The device is passed, because NCCL's guess from the rank may be wrong."""
    device = exchanged_on()
    dist.barrier(device_ids=None if device.index is None else [device.index])


def exchanged_on() -> torch.device:
    """Return the device for tensors in collectives: the current GPU with NCCL, else the CPU."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def of_all_ranks(value: Found, group: dist.ProcessGroup | None = None) -> list[Found]:
    """Return the values of all ranks of a group (default: the world), by rank. Every rank of the group calls it."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def on_rank_0(action: Callable[[], object]) -> None:
    """Run an action on rank 0 while the other ranks wait. A UserError of the action is raised on every rank."""

    def act() -> None:
        action()

    from_rank_0(act, None)


def from_rank_0(action: Callable[[], Found], received: Found) -> Found:
    """Run an action on rank 0 and return its result on all ranks. On other ranks, the result replaces `received`.

    A UserError of the action is raised on all ranks.
    """
    found: list[Any] = [received, None]
    if dist.get_rank() == 0:
        try:
            found[0] = action()
        except UserError as error:
            found[1] = str(error)
    if TorchWorld.current is not None:
        TorchWorld.current.await_rank_0()
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise UserError(found[1])
    return found[0]
