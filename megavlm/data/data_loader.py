"""The data loader of a run: it decides which ranks read and which receive the data by broadcast.

Data that is computed (synthetic, digits) each rank makes for itself. Files are read by the first rank of each model
replica, which broadcasts them, so that no image is read or decoded twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megavlm.data.batch import MicroBatch
from megavlm.data.batch_sampler import LoaderState
from megavlm.data.rank_loader import RankLoader, StepData
from megavlm.data.wire import lay_out, packed, room, size_of, unpacked
from megavlm.errors import UserError

# Of a step's micro-batches: the places of each rank's patches among all of them.
PatchShards = Callable[[Sequence[MicroBatch]], Sequence[NDArray[np.int64]]]


@dataclass(frozen=True)
class ReplicaBroadcast:
    """This rank's place in its replica.

    The first rank of `replica` reads. `vision_group` are its ranks that need pixels, the reader first; None on a rank
    that needs none. If each rank needs other patches, `patch_shards` returns the rows of each rank, ascending; a
    micro-batch then holds this rank's patches only.
    """

    replica: dist.ProcessGroup
    vision_group: dist.ProcessGroup | None
    device: torch.device
    patch_dim: int
    patch_shards: PatchShards | None = None

    @property
    def reads(self) -> bool:
        return self.replica.rank() == 0

    def share(self, read: Callable[[], StepData]) -> StepData:
        """The step that the replica's first rank reads, on every rank of it, on the host. Pixels are there already
        (`patch_shards`), or go to the other vision_group when a micro-batch travels to the device.

        A UserError there is raised everywhere, so that none waits for data that never comes.
        """
        if self.replica.size() == 1:
            return read()
        step: StepData | None = None
        complaint = ""
        if self.reads:
            try:
                step = read()
            except UserError as error:
                complaint = str(error)
        told = self._told(step, complaint)
        if isinstance(told, UserError):
            raise told
        return self._with_pixels(told if step is None else step)

    def share_place(self, place: LoaderState | None) -> LoaderState:
        """The reader's place in the data, on every rank. Only for checkpoints: it pickles."""
        told = [place]
        if self.replica.size() > 1:
            dist.broadcast_object_list(told, group=self.replica, group_src=0, device=self.device)
        assert told[0] is not None
        return told[0]

    def _told(self, step: StepData | None, complaint: str) -> StepData | UserError:
        """What the reader says, in two messages: how long it is, and itself. The host waits for both."""
        description, tensors = packed(step) if step is not None else (complaint.encode(), [])
        header = torch.tensor([step is not None, len(description), size_of(tensors)])
        header = self._from_reader(header)
        is_step, words, numbers = header.tolist()
        start = room(words)
        message = torch.empty(start + numbers, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        if self.reads:
            message[:words] = torch.frombuffer(bytearray(description), dtype=torch.uint8)
            lay_out(tensors, message[start:])
        message = self._from_reader(message)
        text = message[:words].numpy().tobytes()
        return unpacked(text, message[start:]) if is_step else UserError(text.decode())

    def _from_reader(self, values: Tensor) -> Tensor:
        """The reader's numbers, in every rank's host memory."""
        there = values.to(self.device, non_blocking=True)
        dist.broadcast(there, group=self.replica, group_src=0)
        return values if self.reads else values.copy_(there)

    def _with_pixels(self, step: StepData) -> StepData:
        if self.vision_group is None:
            return replace(step, batches=[replace(batch, patches=None) for batch in step.batches])
        if self.patch_shards is not None:
            return replace(step, batches=self._dealt(step.batches, self.patch_shards(step.batches)))
        if self.vision_group.size() == 1:
            return step
        return replace(step, batches=[replace(batch, vision_group=self.vision_group) for batch in step.batches])

    def _dealt(self, batches: Sequence[MicroBatch], patch_shards: Sequence[NDArray[np.int64]]) -> list[MicroBatch]:
        """Each rank's patches from the reader, which sends each as often as ranks need it, a micro-batch at a time."""
        ends = np.cumsum([batch.num_patches for batch in batches])
        cuts = [np.searchsorted(share, ends[:-1]) for share in patch_shards]
        parts = [np.split(share, cut) for share, cut in zip(patch_shards, cuts, strict=True)]
        found = []
        for index, batch in enumerate(batches):
            places = [part[index] - (ends[index] - batch.num_patches) for part in parts]
            found.append(replace(batch, patches=self._dealt_of(batch, places)))
        return found

    def _dealt_of(self, batch: MicroBatch, places: Sequence[NDArray[np.int64]]) -> Tensor:
        """[P', D] this rank's patches of a micro-batch; `places` are every rank's."""
        assert batch.patches is not None
        mine = len(places[self.replica.rank()])
        outgoing = torch.empty(0, self.patch_dim, dtype=batch.patches.dtype, device=self.device)
        sent = [0] * len(places)
        if self.reads:
            order = torch.from_numpy(np.concatenate(places)).to(self.device, non_blocking=True)
            outgoing = batch.patches.to(self.device, non_blocking=True).index_select(0, order)
            sent = [len(each) for each in places]
        received = [mine if rank == 0 else 0 for rank in range(len(places))]
        patches = outgoing.new_empty(mine, self.patch_dim)
        dist.all_to_all_single(patches, outgoing, received, sent, group=self.replica)
        return patches


class DataLoader:
    """Steps of the data, with the state that resumes them."""

    def __init__(
        self,
        loader: RankLoader | None,
        *,
        exchange: ReplicaBroadcast | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        """`loader` is this rank's, if it reads. With `replicas`, each of these ranks' data has a place of its own."""
        assert (loader is not None) == (exchange is None or exchange.reads)
        self._loader = loader
        self._exchange = exchange
        self._replicas = replicas
        self._peeked: tuple[LoaderState | None, StepData] | None = None

    def peek(self) -> StepData:
        """What `next_step` will give; the place in the data stays where it is. Every rank of a replica calls it."""
        if self._peeked is None:
            place = self._own_place()
            self._peeked = place, self._read()
        return self._peeked[1]

    def next_step(self) -> StepData:
        """What the next optimizer step trains on. Raises UserError on every rank of a replica alike."""
        if self._peeked is None:
            return self._read()
        (_, step), self._peeked = self._peeked, None
        return step

    def _read(self) -> StepData:
        if self._exchange is None:
            return self._own.next_step()
        return self._exchange.share(lambda: self._own.next_step())

    def state_dict(self) -> LoaderState:
        """Where the next step begins; every rank calls it."""
        own = self._own_place() if self._peeked is None else self._peeked[0]
        if self._exchange is not None:
            own = self._exchange.share_place(own)
        assert own is not None
        place: LoaderState = own
        if self._replicas is None:
            return place
        places: list[Any] = [None] * self._replicas.size()
        dist.all_gather_object(places, place, group=self._replicas)
        return {"replicas": places}

    def load_state_dict(self, state: LoaderState) -> None:
        """Raises UserError for the place in data of another kind, or dealt to another number of replicas."""
        self._peeked = None
        if self._replicas is not None:
            places = state.get("replicas")
            if places is None or len(places) != self._replicas.size():
                was = "other data" if places is None else f"{len(places)} data-parallel replicas"
                raise UserError(
                    f"the checkpoint is of a run on {was}, but WebDataset streams go on exactly only where they were "
                    f"left: use the same --datasets and the same number of replicas, now {self._replicas.size()}"
                )
            state = places[self._replicas.rank()]
        if self._loader is not None:
            self._loader.load_state_dict(state)

    def close(self) -> None:
        """End what reads ahead."""
        if self._loader is not None:
            self._loader.close()

    def _own_place(self) -> LoaderState | None:
        """Where the next step of this rank's loader begins; None on a rank that does not read."""
        return None if self._loader is None else self._loader.state_dict()

    @property
    def _own(self) -> RankLoader:
        assert self._loader is not None
        return self._loader
