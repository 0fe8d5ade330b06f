"""`DataLoader`: the data of each step on every rank of a replica, of which one reads and the others receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megavlm.data.broadcast import ReplicaBroadcast
from megavlm.data.rank_loader import RankLoader
from megavlm.data.types import LoaderState, StepData
from megavlm.errors import UserError


class DataLoader:
    """Returns the data of each step, on every rank of a replica, and the state to resume from."""

    def __init__(
        self,
        loader: RankLoader | None,
        *,
        broadcast: ReplicaBroadcast | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        """Prepare the loader of a rank.

        `loader` is None on a rank that does not read. `replicas` is the data-parallel group if each replica has a state
        of its own, as with streams.
        """
        assert (loader is not None) == (broadcast is None or broadcast.reads)
        self._loader = loader
        self._broadcast = broadcast
        self._replicas = replicas
        self._peeked: tuple[LoaderState | None, StepData] | None = None

    def peek(self) -> StepData:
        """Return the data that `next_step` will return, without a change of state. Every rank of a replica calls it."""
        if self._peeked is None:
            state = self._own_state()
            self._peeked = state, self._read()
        return self._peeked[1]

    def next_step(self) -> StepData:
        """Return the data of the next optimizer step. Raises UserError on every rank of a replica alike."""
        if self._peeked is None:
            return self._read()
        (_, step), self._peeked = self._peeked, None
        return step

    def rewind(self) -> None:
        """Go back to the beginning of the data."""
        if self._loader is not None:
            self._loader.rewind()

    def is_ahead(self) -> bool:
        """Return whether the next step's data are prefetched, or could not be; true on a rank that does not read."""
        return self._loader is None or self._loader.is_ahead()

    def failure_ahead(self, *, unless: Callable[[], bool]) -> BaseException | None:
        """Wait until the prefetched step is ready or `unless()` is true; return the error that it raised, if any.

        The next step then raises this error on all ranks of the replica; the ranks of other replicas do not know.
        """
        return None if self._loader is None else self._loader.failure_ahead(unless=unless)

    def _read(self) -> StepData:
        if self._broadcast is None:
            return self._own.next_step()
        return self._broadcast.share(lambda: self._own.next_step())

    def state_dict(self) -> LoaderState:
        """Return the state at which the next step begins. Every rank must call it, since ranks communicate in it."""
        own = self._own_state() if self._peeked is None else self._peeked[0]
        if self._broadcast is not None:
            own = self._broadcast.share_state(own)
        assert own is not None
        state: LoaderState = own
        if self._replicas is None:
            return state
        states: list[Any] = [None] * self._replicas.size()
        dist.all_gather_object(states, state, group=self._replicas)
        return {"replicas": states}

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue at a state. Raises UserError for one of other data, or of streams with other replicas."""
        self._peeked = None
        if self._replicas is not None:
            states = state.get("replicas")
            if states is None or len(states) != self._replicas.size():
                was = "other data" if states is None else f"{len(states)} data-parallel replicas"
                raise UserError(
                    f"the checkpoint is of a run on {was}, but each replica resumes its own part of a WebDataset: use "
                    f"the same --datasets and the same number of replicas, now {self._replicas.size()}"
                )
            state = states[self._replicas.rank()]
        if self._loader is not None:
            self._loader.load_state_dict(state)

    def close(self) -> None:
        """Stop prefetching."""
        if self._loader is not None:
            self._loader.close()

    def _own_state(self) -> LoaderState | None:
        """Return the state at which this rank's loader begins its next step; None on a rank that does not read."""
        return None if self._loader is None else self._loader.state_dict()

    @property
    def _own(self) -> RankLoader:
        assert self._loader is not None
        return self._loader
