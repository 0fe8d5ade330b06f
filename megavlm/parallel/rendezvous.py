"""Let the processes of a run find one another, again after each restart by torchrun, and wait for one another.

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
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from megavlm.backend import Backend
from megavlm.errors import RankError, RanksMissing, UserError

Found = TypeVar("Found")

_PLACE = "megavlm/rendezvous"
_PAUSE = 0.02  # seconds between two looks at the store
_GRACE = 10.0  # seconds for which the others outlast rank 0, which knows who is missing
_LOOK, _SAY = timedelta(seconds=60), 300.0  # of ranks that wait for rank 0
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


def meet(*, timeout_minutes: float) -> Meeting:
    """Find the other ranks that the environment names (`world_of`); the only process of a world meets itself."""
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

    NCCL is not given the device (`device_id`): it would connect each group at once, by a split of the world's
    communicator in which all ranks take part, and send what pipeline stages exchange through one queue.

    Args:
        shared_devices: whether ranks may share a GPU, as those of tests do.
    """
    if dist.is_initialized():
        return
    met = meeting or meet(timeout_minutes=timeout_minutes)
    if backend.communication == "nccl" and met.world > 1 and not shared_devices:
        refuse_shared_devices(met, device=str(torch.cuda.get_device_properties(backend.device).uuid))
    TorchWorld(backend.communication, met, timedelta(minutes=timeout_minutes)).begin()


@dataclass
class TorchWorld:
    """The ranks of this start, which begin anew for each layout that the same processes build."""

    backend: str
    met: Meeting
    timeout: timedelta
    layouts: int = 0
    turns: int = 0  # of rank 0, for which others waited
    current: ClassVar[TorchWorld | None] = None  # torch has one world in a process, too

    def begin(self) -> None:
        """Initialize torch.distributed with keys in the store that no group has had: ranks name a group alike again."""
        TorchWorld.current = self
        store = dist.PrefixStore(f"layout-{self.layouts}", self.met.store)
        dist.init_process_group(
            self.backend, store=store, rank=self.met.rank, world_size=self.met.world, timeout=self.timeout
        )
        self.layouts += 1

    def await_rank_0(self) -> None:
        """Wait, however long, until rank 0 calls this: in the store, as a collective that waits too long ends the run.

        A process that is gone ends its world by torchrun, or by the end of the store.
        """
        self.turns += 1
        key, began = f"turn-{self.turns}", time.monotonic()
        if self.met.rank == 0:
            self.met.store.set(key, "")
            return
        while not self._came(key):
            if self.met.rank == self.met.world - 1 and time.monotonic() - began > _SAY:
                print(f"rank 0 has worked alone for {(time.monotonic() - began) / 60:.0f} min; others wait", flush=True)

    def _came(self, key: str) -> bool:
        try:
            self.met.store.wait([key], _LOOK)
        except dist.DistStoreError:  # in time, it has not
            return False
        return True


def barrier() -> None:
    """Wait until all ranks are here. NCCL would guess the device from the rank, which may be wrong."""
    device = exchanged_on()
    dist.barrier(device_ids=None if device.index is None else [device.index])


def exchanged_on() -> torch.device:
    """Return the device of the tensors that this rank can exchange with others."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def on_rank_0(action: Callable[[], object]) -> None:
    """Run an action on rank 0 while the others wait. A UserError there is raised on every rank, so that none hangs."""

    def act() -> None:
        action()

    from_rank_0(act, None)


def from_rank_0(action: Callable[[], Found], received: Found) -> Found:
    """Return on all ranks what an action returns on rank 0; other ranks receive it in place of `received`.

    A UserError there is raised on all.
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
    result: Found = found[0]
    return result
