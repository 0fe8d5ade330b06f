"""The colocated encoder's place in a step: images to ranks, features to the embedding, gradients back.

Every rank of a model replica (TP × PP) holds an encoder, or with `--vision-tp` a part of one. All of them know the same
window of micro-batches and so compute the same assignment and the same routes; nothing but features and their gradients
is sent, in one all-to-all each. The language model's pipeline then runs on leaf tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.backend.streams import InlineStream, SideStream, side_stream
from megavlm.config.derived import sequence_parallel
from megavlm.config.schema import Config
from megavlm.data.batch import MicroBatch
from megavlm.model.context import shard_of
from megavlm.parallel.groups import Groups
from megavlm.pipeline.encoder import EncoderPasses, EncoderRunner
from megavlm.pipeline.feature_exchange import FeatureExchange, Route, Rows, feature_exchange_of, senders
from megavlm.pipeline.images import EncoderInput, assign_images, held_inputs


@dataclass(frozen=True)
class _Window:
    """Micro-batches on their way through the language model."""

    exchange: FeatureExchange
    leaves: tuple[Tensor, ...]  # per micro-batch [F', 1 + DeepStack layers, H]; none on ranks that do not embed


@dataclass(frozen=True)
class _Ahead:
    """A share of a window whose passes are queued one by one, beside what trains on the window before."""

    batches: Sequence[MicroBatch]
    passes: EncoderPasses


class ColocatedEncoder:
    """Encodes windows of micro-batches over the encoders of a model replica."""

    def __init__(self, encoder: EncoderRunner, config: Config, groups: Groups) -> None:
        self.encoder = encoder
        self._config = config
        self._groups = groups
        self._width = config.parallel.vision_tensor_model_parallel_size  # ranks of an encoder
        self._window: _Window | None = None
        self._upcoming: Sequence[MicroBatch] | None = None
        self._ahead: _Ahead | None = None
        self._side_stream: SideStream = side_stream(encoder.device) if config.placement.encode_ahead else InlineStream()

    def prefetch(self, batches: Sequence[MicroBatch]) -> None:
        """Encode this window beside what trains on the next one to be handed out: `advance` says when. For frozen
        encoders: only computation runs ahead; the exchange waits for the window's turn.
        """
        assert not self.encoder.trained, "the configuration rules refuse this"
        self._upcoming = batches

    def advance(self) -> bool:
        """Queue a pass of what is encoded ahead, if anything is. Returns whether there may be more."""
        if self._ahead is None:
            return False
        with self._side_stream.run(_patches(self._ahead.batches)):
            return self._ahead.passes.advance()

    def encode(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Micro-batches for the language model: still on the host, without pixels, and with features (on the device)
        where they are merged.

        Every rank of the replica calls it, with the same micro-batches.
        """
        images, owners = self._assigned(batches)
        rank, ranks = self._groups.mp_rank, self._groups.mp.size()
        encoder = np.repeat(np.asarray(owners, dtype=np.int64), [image.features for image in images])
        rows = senders(encoder, width=self._width)
        exchange = feature_exchange_of(rows, self._shards(batches), merging=self._groups.dims.tp, ranks=ranks)
        features = self._send(self._share(batches), exchange.features(rank))
        self._begin_upcoming()

        text = [self._for_language(batch) for batch in batches]
        leaves: tuple[Tensor, ...] = ()
        if self._groups.coords.pp == 0:
            counts = self._merged_here(batches, exchange)
            leaves = tuple(part.detach().requires_grad_(self._keeps()) for part in features.split(counts))
            text = [replace(batch, features=leaf) for batch, leaf in zip(text, leaves, strict=True)]
        self._window = _Window(exchange, leaves) if self._keeps() else None
        return text

    def finish(self) -> None:
        """After the language model's backward: the encoder's, and its gradients summed over the encoders."""
        if not self.encoder.trained:
            return
        if self._window is not None:
            window, self._window = self._window, None
            found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in window.leaves]
            gradients = torch.cat(found) if found else self.encoder.no_features()
            self.encoder.backward(self._send(gradients, window.exchange.gradients(self._groups.mp_rank)))
        self.encoder.reduce()

    def _assigned(self, batches: Sequence[MicroBatch]) -> tuple[list[EncoderInput], tuple[int, ...]]:
        return assign_images(batches, self._config.model, encoders=self._groups.mp.size() // self._width)

    def _share(self, batches: Sequence[MicroBatch]) -> Tensor:
        """What this rank sends of its images' features, encoded ahead or now."""
        if self._ahead is None or self._ahead.batches is not batches:
            return self._passes(batches).finish()
        with self._side_stream.run(_patches(batches)):
            features = self._ahead.passes.finish()
        self._ahead = None
        self._side_stream.join([features])
        return features

    def _passes(self, batches: Sequence[MicroBatch]) -> EncoderPasses:
        images, owners = self._assigned(batches)
        here = self._groups.mp_rank // self._width
        mine = [image for image, owner in zip(images, owners, strict=True) if owner == here]
        return self.encoder.forward(held_inputs(mine, batches), batches)

    def _begin_upcoming(self) -> None:
        if self._upcoming is None:
            return
        batches, self._upcoming = self._upcoming, None
        self._ahead = _Ahead(batches, self._passes(batches))
        self._side_stream.fork()

    def _keeps(self) -> bool:
        return self.encoder.trained and torch.is_grad_enabled()

    def _shards(self, batches: Sequence[MicroBatch]) -> Rows | None:
        """[R] which tensor-parallel rank's part of the sequence each row of features lies in."""
        if not sequence_parallel(self._config):
            return None
        shards = self._groups.dims.tp
        found = [
            shard_of(batch.feature_positions, length=batch.tokens.shape[1], shards=shards).numpy() for batch in batches
        ]
        return np.concatenate(found)

    def _for_language(self, batch: MicroBatch) -> MicroBatch:
        """The same batch without pixels, and with those image tokens alone whose features this rank merges."""
        places = batch.feature_positions
        if sequence_parallel(self._config):
            shards = shard_of(places, length=batch.tokens.shape[1], shards=self._groups.dims.tp)
            places = places[shards == self._groups.coords.tp]
        return replace(batch, patches=None, feature_positions=places)

    def _merged_here(self, batches: Sequence[MicroBatch], exchange: FeatureExchange) -> list[int]:
        """Rows of each micro-batch that this rank merges."""
        counts = [batch.feature_positions.numel() for batch in batches]
        wanted = exchange.wants[self._groups.mp_rank]
        return [int(part.sum()) for part in np.split(wanted, np.cumsum(counts)[:-1])]

    def _send(self, values: Tensor, route: Route) -> Tensor:
        """Rows [before, …] → rows [after, …]."""
        if self._groups.mp.size() == 1:
            return values
        order = torch.from_numpy(np.concatenate(route.send)).to(values.device, non_blocking=True)
        outgoing = values.flatten(1).index_select(0, order)
        incoming = outgoing.new_empty(route.received, outgoing.shape[1])
        dist.all_to_all_single(
            incoming,
            outgoing,
            output_split_sizes=[len(rows) for rows in route.receive],
            input_split_sizes=[len(rows) for rows in route.send],
            group=self._groups.mp,
        )
        places = torch.from_numpy(np.concatenate(route.receive)).to(values.device, non_blocking=True)
        return torch.empty_like(incoming).index_copy_(0, places, incoming).view(-1, *values.shape[1:])


def _patches(batches: Sequence[MicroBatch]) -> list[Tensor]:
    return [batch.patches for batch in batches if batch.patches is not None]
