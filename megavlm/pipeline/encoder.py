"""The encoder of a colocated run on one rank: forward and backward on the rank's images and sounds, in passes.

With `--vision-tp` the ranks that hold one encoder encode the same images. Each returns an equal shard of the features,
and the gradients of the shards are gathered before the backward passes.

A pass encodes images of at most `--encoder-chunk-patches` patches, or sounds of as many mel frames. The last
`placement.encoder_keep_chunks` passes keep their activations for the backward pass. Earlier passes run without a graph
and are recomputed, with the same dropout, so that memory does not grow with the number of images in a step. A frozen
tower keeps almost nothing, so no pass is recomputed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megavlm.arch.image_tokens import Grid
from megavlm.arch.layers import encoder_names, is_audio, part_of, trained_layers
from megavlm.backend.accelerator import profiler_range
from megavlm.config.schema import Config
from megavlm.inputs.batch import ImageBatch, MicroBatch, SoundBatch, join_sizes
from megavlm.model.language import unpack
from megavlm.parallel.groups import ENCODER_RNG, Groups
from megavlm.pipeline.feature_cache import FeatureCache
from megavlm.rules.defaults import chunk_patches

Item = ImageBatch | SoundBatch  # one image, or one sound


class EncoderPasses:
    """The passes of an encoder over a step's images and sounds, queued one by one; the last returns the features."""

    def __init__(self, passes: Generator[None, None, Tensor]) -> None:
        """`passes` yields after each pass and returns the features."""
        self._passes = passes
        self._features: Tensor | None = None

    def advance(self) -> bool:
        """Queue the next pass; return whether more passes may follow."""
        if self._features is None:
            try:
                next(self._passes)
            except StopIteration as end:
                self._features = end.value
        return self._features is None

    def finish(self) -> Tensor:
        """Queue all remaining passes; return the features."""
        while self.advance():
            pass
        assert self._features is not None
        return self._features


@dataclass
class _EncoderPass:
    """One pass, with the state that its backward pass needs. Its inputs are on the device only while it runs."""

    items: Sequence[Item]  # usually on the host
    features: int  # number of feature rows
    learns: bool  # whether a layer that it runs through is trained
    random: dict[str, Any] = field(default_factory=dict)  # the states of the random generators before the pass
    output: Tensor | None = None  # with its graph, if that is kept


class EncoderRunner:
    """Runs the encoder of this rank."""

    def __init__(self, module: Any, config: Config, groups: Groups, *, cache: FeatureCache | None = None) -> None:
        """`module` is the chunk of all encoder layers, wrapped for data parallelism if any are trained. `groups` are
        the encoder's own. `cache` holds features of a frozen encoder.
        """
        self.module = module
        self._groups = groups
        self._cache = cache
        trained = trained_layers(config).intersection(encoder_names(config.model))
        self.trained = bool(trained)
        self._learns_from = {SoundBatch if is_audio(name) else ImageBatch for name in trained}
        self._model = config.model
        self._deepstack = len(config.model.vision.deepstack_layers)
        tower_trained = any(part_of(name) == "vision" for name in trained)
        self._keep = config.placement.encoder_keep_chunks if tower_trained else None
        dropout = max(config.model.hidden_dropout, config.model.attention_dropout)
        self._dropout = dropout > 0 or (self.trained and config.lora.dropout > 0)
        self._passes: list[_EncoderPass] = []
        # With a cache: grids of images, and mel frames of sounds, that this rank counts as encoded, and not found.
        self.encoded: list[Grid | int] = []
        self.device = next(iter(module.parameters())).device
        self._chunk_patches = chunk_patches(config, on_gpu=self.device.type == "cuda")
        self._dtype = next(iter(module.parameters())).dtype

    def forward(self, items: Sequence[Item]) -> EncoderPasses:
        """Return the passes that encode images and sounds; a pass runs when it is queued. The last returns this rank's
        contiguous shard of the features, [R, 1 + DeepStack layers, Hl], detached.

        All ranks that share an encoder must pass the same items; each gets its own shard (`shard_size`).
        If gradients are enabled and a part of the encoder is trained, `backward` must follow.
        """
        return EncoderPasses(self._shard_of_features(items))

    def _shard_of_features(self, items: Sequence[Item]) -> Generator[None, None, Tensor]:
        if self._cache is None:
            features = yield from self._computed(items)
        else:
            features = yield from self._looked_up(self._cache, items)
        length = shard_size(len(features), self._groups.dims.tp)
        return features[self._groups.coords.tp * length :][:length]

    def _computed(self, items: Sequence[Item]) -> Generator[None, None, Tensor]:
        passes = [self._pass(group) for group in split_into_passes(items, self._chunk_patches)]
        learns = self.trained and torch.is_grad_enabled()
        outputs = []
        for index, one in enumerate(passes):
            keeps = learns and one.learns and (self._keep is None or index >= len(passes) - self._keep)
            one.random = get_cuda_rng_tracker().get_states()
            output = self._run(one, graph=keeps)
            one.output = output if keeps else None
            outputs.append(output.detach())
            yield
        self._passes = passes if learns else []
        return torch.cat(outputs) if outputs else self.no_features()

    def _looked_up(self, cache: FeatureCache, items: Sequence[Item]) -> Generator[None, None, Tensor]:
        """Return the features of all items; compute and store those that the cache lacks."""
        keys = [cache.key(_values(item), _layout(item)) for item in items]
        found = [cache.get(key) for key in keys]
        missing = self._missing_anywhere([features is None for features in found])
        for group in split_into_passes([items[index] for index in missing], self._chunk_patches):
            output = self._run(self._pass(group), graph=False)
            for features in output.split(self._feature_counts(group)):
                index = missing.pop(0)
                if self._groups.is_first_tp:
                    cache.put(keys[index], features)
                    item = items[index]
                    self.encoded += item.frames if isinstance(item, SoundBatch) else item.sizes.grids
                found[index] = features
            yield
        held = [features.to(self.device) for features in found if features is not None]
        return torch.cat(held) if held else self.no_features()

    def _missing_anywhere(self, missing: Sequence[bool]) -> list[int]:
        """Return the indices of items that any rank of this encoder did not find in the cache.

        Ranks may differ, because another run may delete a file after one rank has read it.
        """
        if self._groups.dims.tp == 1 or not missing:
            return [index for index, misses in enumerate(missing) if misses]
        mask = torch.tensor(missing, dtype=torch.int32, device=self.device)
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._groups.tp)
        return [index for index, misses in enumerate(mask.tolist()) if misses]

    def backward(self, gradients: Tensor) -> None:
        """Accumulate parameter gradients, given the gradients of the features that `forward` returned."""
        parts = self._gathered(gradients).split([one.features for one in self._passes])
        while self._passes:  # from the last, whose activations are kept, so that their memory is freed first
            one = self._passes.pop()
            if one.learns:
                output = self._recomputed(one) if one.output is None else one.output
                with profiler_range("backward of the encoder"):
                    torch.autograd.backward(output, parts[len(self._passes)])

    def _gathered(self, shard: Tensor) -> Tensor:
        """Return the rows of all ranks that hold this encoder, in order, given this rank's shard of them."""
        ranks, rows = self._groups.dims.tp, sum(one.features for one in self._passes)
        if ranks == 1 or not rows:
            return shard
        length = shard_size(rows, ranks)
        padded = shard.new_zeros(length, *shard.shape[1:])
        padded[: len(shard)] = shard
        whole = shard.new_empty(ranks * length, *shard.shape[1:])
        dist.all_gather_into_tensor(whole, padded, group=self._groups.tp)
        return whole[:rows]

    def zero_gradients(self) -> None:
        """Set the gradients of a trained encoder to zero."""
        if self.trained:
            self.module.zero_grad_buffer()

    def reduce(self) -> None:
        """Sum the gradients over all copies of the encoder."""
        finalize_model_grads([self.module], pg_collection=self._groups.collection)

    def _recomputed(self, one: _EncoderPass) -> Tensor:
        """Return the output of a pass with its graph, and leave the random generators as they are."""
        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        tracker.set_states(dict(one.random))
        output = self._run(one, graph=True)
        tracker.set_states(now)
        return output

    def _run(self, one: _EncoderPass, *, graph: bool) -> Tensor:
        # Without dropout the generators stay untouched: during encoding ahead the pipeline draws from them.
        draws = get_cuda_rng_tracker().fork(ENCODER_RNG) if self._dropout else nullcontext()
        with profiler_range("forward of the encoder"), draws, torch.set_grad_enabled(graph):
            width = self._model.language.hidden_size
            batch = self._on_device(one.items)
            depths = self._deepstack if batch.images is not None else 0
            first, others = unpack(self.module(batch), hidden=(1, width), carried=[(one.features, 1, width)] * depths)
            zeros = (torch.zeros_like(first) for _ in range(self._deepstack - depths))  # of sounds, for DeepStack
            return torch.cat([first, *others, *zeros], dim=1)

    def _pass(self, items: Sequence[Item]) -> _EncoderPass:
        learns = type(items[0]) in self._learns_from
        return _EncoderPass(items, features=sum(self._feature_counts(items)), learns=learns)

    def _feature_counts(self, items: Sequence[Item]) -> list[int]:
        return [count for item in items for count in item.feature_counts(self._model)]

    def _on_device(self, items: Sequence[Item]) -> MicroBatch:
        """Return items as one batch on the device; each is copied from host memory, which is pinned on a GPU."""
        found = [_values(item) for item in items]
        values = found[0].new_empty(sum(map(len, found)), found[0].shape[1], device=self.device)
        for part, one in zip(values.split([len(each) for each in found]), found, strict=True):
            part.copy_(one, non_blocking=True)
        if sounds := [item for item in items if isinstance(item, SoundBatch)]:
            frames = tuple(length for sound in sounds for length in sound.frames)
            return MicroBatch.of_images(None, replace(sounds[0], frames=frames, mels=values))
        sizes = join_sizes([item.sizes for item in items if isinstance(item, ImageBatch)])
        return MicroBatch.of_images(ImageBatch(sizes, values))

    def no_features(self) -> Tensor:
        """Return the features of no item, [0, 1 + DeepStack layers, Hl]."""
        shape = 0, 1 + self._deepstack, self._model.language.hidden_size
        return torch.empty(*shape, dtype=self._dtype, device=self.device)


def encoder_config(config: Config) -> Config:
    """Return the configuration of the encoder as a model of its own: with `--vision-tp` as its tensor parallelism,
    without a pipeline, with gradients reduced once, at the end of a step, and one group of all ranks that shard it.
    """
    tp = config.parallel.vision_tensor_model_parallel_size
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=1,
        hybrid_shard_size=None,
        sequence_parallel=tp > 1 and config.parallel.sequence_parallel is not False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    return replace(config, parallel=parallel, placement=replace(config.placement, pipeline_cuts=None))


def split_into_passes(items: Sequence[Item], most: int) -> list[Sequence[Item]]:
    """Return the items in order, in groups of at most `most` patches or mel frames; a larger one is a group of its own.

    A group is of images or of sounds. Its patches have one width: those of a micro-batch with a video span more frames
    than others.
    """
    starts, rows = [0], 0
    kinds = [(type(item), _values(item).shape[1]) for item in items]
    for index, item in enumerate(items):
        length = len(_values(item))
        if rows and (kinds[index] != kinds[index - 1] or rows + length > most):
            starts.append(index)
            rows = 0
        rows += length
    return [items[start:end] for start, end in pairwise([*starts, len(items)]) if end > start]


def _values(item: Item) -> Tensor:
    return item.mels if isinstance(item, SoundBatch) else item.patches


def _layout(item: Item) -> object:
    """Return the sizes on which an item's features depend, besides its values."""
    return item.frames if isinstance(item, SoundBatch) else (item.sizes.grids, item.sizes.tile_groups)


def shard_size(rows: int, ranks: int) -> int:
    """Return the rows per rank of `rows` cut into `ranks` contiguous shards; the last may be shorter or empty."""
    return -(-rows // ranks)
