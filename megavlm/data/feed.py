"""`Feed`: the data of a run, as every rank sees it; who reads and who is told is decided here.

Data that is computed (synthetic, digits) each rank makes for itself. Files are read by the first rank of each model
replica, which tells the others, so that no image is read or decoded twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megavlm.data.batch import PackedBatch
from megavlm.data.composer import Place
from megavlm.data.loader import Loader, Step
from megavlm.errors import UserError

# Of a step's micro-batches: the places of each rank's patches among all of them.
Shares = Callable[[Sequence[PackedBatch]], Sequence[NDArray[np.int64]]]


@dataclass(frozen=True)
class Exchange:
    """This rank's place in its replica.

    The first rank of `replica` reads. `seers` are the ranks of it that need pixels, the reader first; None on a rank
    that needs none. Where each needs others, `shares` says which, in rising order; a micro-batch then holds a rank's
    own patches only.
    """

    replica: dist.ProcessGroup
    seers: dist.ProcessGroup | None
    device: torch.device
    patch_dim: int
    shares: Shares | None = None

    @property
    def reads(self) -> bool:
        return self.replica.rank() == 0

    def share(self, read: Callable[[], Any]) -> Any:
        """What the replica's first rank reads, on every rank of it; pixels where they are needed.

        A UserError there is raised everywhere, so that none waits for data that never comes.
        """
        told: list[Any] = [None]
        result: Any = None
        if self.reads:
            try:
                result = read()
                told = [_without_patches(result)]
            except UserError as error:
                told = [error]
        if self.replica.size() > 1:
            dist.broadcast_object_list(told, group=self.replica, group_src=0, device=self.device)
        if isinstance(told[0], UserError):
            raise told[0]
        if not isinstance(told[0], Step):
            return told[0]
        step: Step = result or told[0]
        if self.seers is None or self.seers.size() == 1:
            return step
        if self.shares is not None:
            return replace(step, batches=self._dealt(step.batches, self.shares(step.batches)))
        return replace(step, batches=[self._seen(batch) for batch in step.batches])

    def _seen(self, batch: PackedBatch) -> PackedBatch:
        patches = batch.patches
        if patches is None:
            patches = torch.empty(batch.num_patches, self.patch_dim, device=self.device)
        patches = patches.to(self.device).contiguous()
        if patches.numel():
            dist.broadcast(patches, group=self.seers, group_src=0)
        return replace(batch, patches=patches)

    def _dealt(self, batches: Sequence[PackedBatch], shares: Sequence[NDArray[np.int64]]) -> list[PackedBatch]:
        """Each rank's patches from the reader, which sends each as often as ranks need it."""
        mine = shares[self.replica.rank()]
        outgoing = torch.empty(0, self.patch_dim, device=self.device)
        sent = [0] * len(shares)
        if self.reads:
            places = torch.from_numpy(np.concatenate(shares))
            held = [batch.patches.to(self.device) for batch in batches if batch.patches is not None]
            outgoing = torch.cat([outgoing, *held])[places.to(self.device)]
            sent = [len(share) for share in shares]
        received = [len(mine) if rank == 0 else 0 for rank in range(len(shares))]
        patches = outgoing.new_empty(len(mine), self.patch_dim)
        dist.all_to_all_single(patches, outgoing, received, sent, group=self.replica)
        ends = np.cumsum([batch.num_patches for batch in batches])
        counts = np.diff(np.searchsorted(mine, ends), prepend=0)
        parts = patches.split(counts.tolist())
        return [replace(batch, patches=part) for batch, part in zip(batches, parts, strict=True)]


def _without_patches(result: Any) -> Any:
    if not isinstance(result, Step):
        return result
    return replace(result, batches=[replace(batch, patches=None) for batch in result.batches])


class Feed:
    """Steps of the data, with the state that resumes them."""

    def __init__(
        self, loader: Loader | None, *, exchange: Exchange | None = None, replicas: dist.ProcessGroup | None = None
    ) -> None:
        """`loader` is this rank's, if it reads. With `replicas`, each of these ranks' data has a place of its own."""
        assert (loader is not None) == (exchange is None or exchange.reads)
        self._loader = loader
        self._exchange = exchange
        self._replicas = replicas
        self._peeked: tuple[Place, Step] | None = None

    def peek(self) -> Step:
        """What `next_step` will give; the place in the data stays where it is. Every rank of a replica calls it."""
        if self._peeked is None:
            place = self.state_dict()
            self._peeked = place, self._read()
        return self._peeked[1]

    def next_step(self) -> Step:
        """What the next optimizer step trains on. Raises UserError on every rank of a replica alike."""
        if self._peeked is None:
            return self._read()
        (_, step), self._peeked = self._peeked, None
        return step

    def _read(self) -> Step:
        if self._exchange is None:
            return self._own.next_step()
        step: Step = self._exchange.share(lambda: self._own.next_step())
        return step

    def state_dict(self) -> Place:
        """Where the next step begins; every rank calls it."""
        if self._peeked is not None:
            return self._peeked[0]
        if self._exchange is None:
            return self._own.state_dict()
        place: Place = self._exchange.share(lambda: self._own.state_dict())
        if self._replicas is None:
            return place
        places: list[Any] = [None] * self._replicas.size()
        dist.all_gather_object(places, place, group=self._replicas)
        return {"replicas": places}

    def load_state_dict(self, state: Place) -> None:
        """Raises UserError for the place in data of another kind, or dealt to another number of replicas."""
        self._peeked = None
        if self._replicas is not None:
            places = state.get("replicas")
            if places is None or len(places) != self._replicas.size():
                was = "other data" if places is None else f"{len(places)} data-parallel replicas"
                raise UserError(
                    f"the checkpoint is of a run on {was}, but WebDataset streams go on exactly only where they were "
                    f"left: use the same --sources and the same number of replicas, now {self._replicas.size()}"
                )
            state = places[self._replicas.rank()]
        if self._loader is not None:
            self._loader.load_state_dict(state)

    def close(self) -> None:
        """End what reads ahead."""
        if self._loader is not None:
            self._loader.close()

    @property
    def _own(self) -> Loader:
        assert self._loader is not None
        return self._loader
