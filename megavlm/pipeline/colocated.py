"""A step of a colocated encoder: each rank encodes its images, features go to the embedding, gradients come back.

Every rank of a model replica (TP × CP × PP) holds an encoder, or with `--vision-tp` a shard of one. All of them know
the sizes of all images of a step, so they compute the same assignment of images (`data/costs.py`) and the
same routes; only features and their gradients are sent, in one all-to-all each. The features are leaf tensors of the
language model's pipeline. An audio encoder is part of it: sounds are encoded as images are, after them.

Legend: R rows of features of a step's micro-batches, in the order of their tokens: those of the images of all
micro-batches, then those of their sounds; M ranks of a model replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megavlm.arch.dims import RowSplit
from megavlm.arch.image_tokens import features_of
from megavlm.backend.accelerator import SideStream
from megavlm.config.derived import sequence_parallel
from megavlm.config.schema import Config
from megavlm.data.context_parts import in_parts
from megavlm.data.costs import ImageAssignment
from megavlm.inputs.batch import ImageBatch, LocalFeatures, MicroBatch
from megavlm.parallel.groups import Groups
from megavlm.pipeline.encoder import EncoderPasses, EncoderRunner, shard_size

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Route:
    """The rows that one rank sends and receives, as indices into its rows before and after an exchange."""

    send: tuple[Rows, ...]  # [M] indices of the rows held before that go to each rank
    receive: tuple[Rows, ...]  # [M] indices of the rows held after that come from each rank

    @classmethod
    def of(cls, rank: int, *, held: Mask, sent: Mask, received: Mask) -> Route:
        """Return a rank's route, given which rows [M, R] each rank holds, sends and receives."""
        before, after = np.flatnonzero(held[rank]), np.flatnonzero(received[rank])
        return cls(
            send=tuple(np.flatnonzero((sent[rank] & rows)[before]) for rows in received),
            receive=tuple(np.flatnonzero((rows & received[rank])[after]) for rows in sent),
        )

    @property
    def received(self) -> int:
        return sum(len(rows) for rows in self.receive)


@dataclass(frozen=True)
class FeatureExchange:
    """The transfer of features from the ranks that encode them to the ranks that merge them, and of gradients back.

    Without sequence parallelism all tensor-parallel ranks merge the same rows. Each of them then has a row's whole
    gradient, and one of them returns it.
    """

    encodes: Mask  # [M, R] whether a rank encodes a row
    wants: Mask  # [M, R] whether a rank merges a row
    returns: Mask  # [M, R] whether a rank returns the gradient of a row: one rank per row

    def features(self, rank: int) -> Route:
        """Return a rank's route from the rows that it encoded to the rows that it merges, both in order."""
        return Route.of(rank, held=self.encodes, sent=self.encodes, received=self.wants)

    def gradients(self, rank: int) -> Route:
        """Return a rank's route from gradients of the rows that it merges to those of the rows that it encoded."""
        return Route.of(rank, held=self.wants, sent=self.returns, received=self.encodes)


def senders(encoder: Rows, *, width: int) -> Rows:
    """Return [R], the rank that sends each row, from the encoder [R] that made it; `width` ranks are one encoder."""
    sender = encoder * width
    for number in np.unique(encoder):
        mine = np.flatnonzero(encoder == number)
        sender[mine] += np.arange(len(mine)) // shard_size(len(mine), width)
    return sender


def feature_exchange_of(owner: Sequence[int] | Rows, shards: Rows, reads: Sequence[int] | Rows) -> FeatureExchange:
    """Return which feature rows each rank sends and receives; rank `owner[r]` encodes row r of R.

    Args:
        shards: [R] which shard of the sequences each row lies in.
        reads: [M] the shard whose rows each rank merges, -1 for none. Ranks of the same shard merge the same rows, and
            divide the sending of gradients evenly.
    """
    count = len(owner)
    encodes = np.arange(len(reads))[:, None] == np.asarray(owner)
    wants = np.asarray(reads)[:, None] == np.asarray(shards)
    turn = np.arange(count) * wants.sum(axis=0) // max(count, 1)  # which of the ranks that want a row returns it
    return FeatureExchange(encodes, wants, wants & (wants.cumsum(axis=0) - 1 == turn))


class ColocatedEncoder:
    """Encodes the images of steps on all ranks of a model replica."""

    def __init__(self, encoder: EncoderRunner, config: Config, groups: Groups) -> None:
        self.encoder = encoder
        self._config = config
        self._groups = groups
        self._assignment = ImageAssignment.of(config, ranks=groups.replica.size())
        # Of a step in the language model's pipeline: per micro-batch features [F', 1 + DeepStack layers, Hl], none on
        # ranks without the embedding.
        self._encoded: tuple[FeatureExchange, tuple[Tensor, ...]] | None = None
        self._upcoming: Sequence[MicroBatch] | None = None
        self._ahead: tuple[Sequence[MicroBatch], EncoderPasses] | None = None  # the next step and its passes
        self._beside: Any = SideStream(encoder.device) if config.placement.encode_ahead else None

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """Encode the next step's images during this step, a pass at each call of `advance`.

        The encoder must be frozen. Only the passes run ahead; features are exchanged in the next step.
        """
        assert not self.encoder.trained, "the configuration rules refuse this"
        self._upcoming = batches

    def advance(self) -> bool:
        """Queue an encoder pass of the next step, if prefetched; return whether more passes may follow."""
        if self._ahead is None:
            return False
        batches, passes = self._ahead
        with self._beside.run(_patches(batches)):
            return passes.advance()

    def encode(self, batches: Sequence[MicroBatch], split: RowSplit) -> list[MicroBatch]:
        """Return the micro-batches for the language model: on the host, without images, and with the features that
        this rank merges (on the device).

        Every rank of the replica calls it with its own images of the same micro-batches. `split`: how rows are cut.
        """
        exchange = self._exchange(batches, split)
        features = self._send(self._own_features(batches), exchange.features(self._groups.replica_rank))
        self._begin_upcoming()

        positions, count = [self._local_positions(*each, split) for each in self._tokens(batches)], len(batches)
        values: Sequence[Tensor | None] = [None] * count
        leaves: tuple[Tensor, ...] = ()
        if self._groups.coords.pp == 0:
            parts = features.split([len(each) for each in positions])
            leaves = tuple(part.detach().requires_grad_(self._needs_gradients()) for part in parts)
            values = [_joined(leaves[number::count]) for number in range(count)]
        self._encoded = (exchange, leaves) if self._needs_gradients() else None
        return [
            replace(batch, images=None, sounds=None, features=LocalFeatures(_joined(positions[number::count]), value))
            for number, (batch, value) in enumerate(zip(batches, values, strict=True))
        ]

    def finish(self) -> None:
        """Run the encoder's backward pass after the language model's, and sum its gradients over all encoders."""
        if not self.encoder.trained:
            return
        if self._encoded is not None:
            (exchange, leaves), self._encoded = self._encoded, None
            found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            gradients = torch.cat(found) if found else self.encoder.no_features()
            self.encoder.backward(self._send(gradients, exchange.gradients(self._groups.replica_rank)))
        self.encoder.reduce()

    def with_own_images(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return micro-batches with only the images that this rank encodes, given all images of a step."""
        chosen = self._assignment.own([batch.image_sizes for batch in batches], rank=self._groups.replica_rank)
        return [
            replace(batch, images=_images_of(batch).select(mask)) for batch, mask in zip(batches, chosen, strict=True)
        ]

    def _exchange(self, batches: Sequence[MicroBatch], split: RowSplit) -> FeatureExchange:
        """Return which ranks send and receive each feature of a step."""
        model = self._config.model
        counts = [count for batch in batches for count in batch.image_sizes.image_tokens(model.projector)]
        counts += [features_of(length, model.audio) for batch in batches for length in batch.sound_frames]
        encoder = np.repeat(np.concatenate(self._encoders(batches)), counts)
        rows = senders(encoder, width=self._assignment.width)
        shards = np.concatenate([self._shards(*each, split).numpy() for each in self._tokens(batches)])
        dims = self._groups.dims
        first_stage = [self._own_shard(tp, cp, split) for cp in range(dims.cp) for tp in range(dims.tp)]
        return feature_exchange_of(rows, shards, [*first_stage, *[-1] * (dims.replica - len(first_stage))])

    def _own_features(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Return the features [R, 1 + DeepStack layers, Hl] that this rank sends, encoded ahead or now."""
        if self._ahead is None or self._ahead[0] is not batches:
            return self._passes(batches).finish()
        with self._beside.run(_patches(batches)):
            features = self._ahead[1].finish()
        self._ahead = None
        self._beside.join([features])
        return features

    def _passes(self, batches: Sequence[MicroBatch]) -> EncoderPasses:
        images = [image for batch in batches for image in _images_of(batch).split()]
        sounds = [sound for batch in batches if batch.sounds is not None for sound in batch.sounds.split()]
        encoders = np.concatenate(self._encoders(batches)[len(batches) :])
        own = self._groups.replica_rank // self._assignment.width
        return self.encoder.forward(
            [*images, *(sound for sound, encoder in zip(sounds, encoders, strict=True) if encoder == own)]
        )

    def _encoders(self, batches: Sequence[MicroBatch]) -> list[Rows]:
        sizes, sounds = [batch.image_sizes for batch in batches], [batch.sound_frames for batch in batches]
        return self._assignment.encoders(sizes, sounds)

    def _tokens(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, int]]:
        """Yield, for each micro-batch, the positions [F] of image features and the length of its rows, then, in a model
        that hears, for each the positions of features of sounds.
        """
        yield from ((batch.text.feature_positions, batch.text.tokens.shape[1]) for batch in batches)
        for batch in batches if self._config.model.audio.num_layers else ():
            none = batch.text.feature_positions[:0]
            yield none if batch.sounds is None else batch.sounds.positions, batch.text.tokens.shape[1]

    def _begin_upcoming(self) -> None:
        if self._upcoming is None:
            return
        batches, self._upcoming = self._upcoming, None
        self._ahead = batches, self._passes(batches)
        self._beside.fork()

    def _needs_gradients(self) -> bool:
        return self.encoder.trained and torch.is_grad_enabled()

    def _shards(self, positions: Tensor, length: int, split: RowSplit) -> Tensor:
        """Return [F], each feature's shard of its row: tensor-parallel shards of context-parallel parts."""
        owner, places = in_parts(positions, split, length=length)
        own = length // split.ranks
        return owner * self._sequence_shards + places % own // (own // self._sequence_shards)

    def _own_shard(self, tp: int, cp: int, split: RowSplit) -> int:
        """Return the shard that a rank merges; ranks that do not split rows all have whole rows."""
        return (cp if split.ranks > 1 else 0) * self._sequence_shards + tp % self._sequence_shards

    @property
    def _sequence_shards(self) -> int:
        return self._groups.dims.tp if sequence_parallel(self._config) else 1

    def _local_positions(self, positions: Tensor, length: int, split: RowSplit) -> Tensor:
        """Return those of the positions [F] whose features this rank merges."""
        at = self._groups.coords
        return positions[self._shards(positions, length, split) == self._own_shard(at.tp, at.cp, split)]

    def _send(self, values: Tensor, route: Route) -> Tensor:
        """Return the rows [received, …] that this rank holds after an exchange, given its rows before."""
        if self._groups.replica.size() == 1:
            return values
        order = torch.from_numpy(np.concatenate(route.send)).to(values.device, non_blocking=True)
        outgoing = values.flatten(1).index_select(0, order)
        incoming = outgoing.new_empty(route.received, outgoing.shape[1])
        dist.all_to_all_single(
            incoming,
            outgoing,
            output_split_sizes=[len(rows) for rows in route.receive],
            input_split_sizes=[len(rows) for rows in route.send],
            group=self._groups.replica,
        )
        places = torch.from_numpy(np.concatenate(route.receive)).to(values.device, non_blocking=True)
        return torch.empty_like(incoming).index_copy_(0, places, incoming).view(-1, *values.shape[1:])


def _images_of(batch: MicroBatch) -> ImageBatch:
    """Return the images of a micro-batch on a rank that encodes."""
    assert batch.images is not None, "every rank of a colocated run encodes"
    return batch.images


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _patches(batches: Sequence[MicroBatch]) -> list[Tensor]:
    return [_images_of(batch).patches for batch in batches]
