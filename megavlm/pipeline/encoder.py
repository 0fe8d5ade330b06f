"""The encoder of a colocated run on one rank: its share of a window's images, forward and backward, in passes.

With `--vision-tp` the ranks that hold an encoder together do all of this alike, on the same images; each hands out an
equal run of the features, and the gradients that come back to it are gathered among them.

A pass takes images of at most `--encoder-chunk-patches` patches. The last `--encoder-keep-chunks` passes keep their
activations for the backward pass; those before run without a graph and are computed again, with the same dropout, so
that memory is bounded however many images a window has. A frozen tower keeps next to nothing, and no pass is repeated.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megavlm.arch.layers import encoder_names, part_of, trained_layers
from megavlm.backend.profiler_range import profiler_range
from megavlm.config.device_defaults import chunk_patches
from megavlm.config.schema import Config
from megavlm.data.batch import MicroBatch
from megavlm.model.deepstack import unpack
from megavlm.parallel.groups import ENCODER_RNG, Groups
from megavlm.pipeline.feature_cache import FeatureCache
from megavlm.pipeline.feature_exchange import shard_size
from megavlm.pipeline.images import EncoderInput, split_into_passes


class EncoderPasses:
    """EncoderPasses of an encoder that are queued one by one, and what they end with: features."""

    def __init__(self, passes: Generator[None, None, Tensor]) -> None:
        """`passes` stops after each and returns the features."""
        self._passes = passes
        self._features: Tensor | None = None

    def advance(self) -> bool:
        """Queue the next pass. Returns whether there may be more."""
        if self._features is None:
            try:
                next(self._passes)
            except StopIteration as end:
                self._features = end.value
        return self._features is None

    def finish(self) -> Tensor:
        """Queue all that are left. Returns the features."""
        while self.advance():
            pass
        assert self._features is not None
        return self._features


@dataclass
class _EncoderPass:
    """One pass: what it takes, and what is known of it until its backward. Pixels are on the device while it runs."""

    inputs: Sequence[EncoderInput]
    batches: Sequence[MicroBatch]  # which have the pixels, on the host as a rule
    features: int
    random: dict[str, Any] = field(default_factory=dict)  # the generators' states before it
    output: Tensor | None = None  # with its graph, where that is kept


class EncoderRunner:
    """`module` is the chunk of all encoder layers, wrapped for data parallelism if any are trained."""

    def __init__(self, module: Any, config: Config, groups: Groups, *, cache: FeatureCache | None = None) -> None:
        """`groups` are the encoder's own. `cache` is of a frozen encoder's features."""
        self.module = module
        self._groups = groups
        self._cache = cache
        trained = trained_layers(config).intersection(encoder_names(config.model))
        self.trained = bool(trained)
        self._model = config.model
        self._deepstack = len(config.model.vision.deepstack_layers)
        tower_trained = any(part_of(name) == "vision" for name in trained)
        self._keep = config.placement.encoder_keep_chunks if tower_trained else None
        dropout = max(config.model.hidden_dropout, config.model.attention_dropout)
        self._dropout = dropout > 0 or (self.trained and config.lora.dropout > 0)
        self._passes: list[_EncoderPass] = []
        self.device = next(iter(module.parameters())).device
        self._chunk_patches = chunk_patches(config, on_gpu=self.device.type == "cuda")
        self._dtype = next(iter(module.parameters())).dtype

    def forward(self, inputs: Sequence[EncoderInput], batches: Sequence[MicroBatch]) -> EncoderPasses:
        """Return the passes that encode `inputs`. None runs before it is asked for; the last one ends with this rank's
        contiguous shard of the feature rows, [R, 1 + DeepStack layers, Hl], detached.

        All ranks that share an encoder must call it with the same images; each gets its own shard (`shard_size`).
        Where gradients are enabled and something is trained, `backward` must follow.
        """
        return EncoderPasses(self._run_of_features(inputs, batches))

    def _run_of_features(
        self, inputs: Sequence[EncoderInput], batches: Sequence[MicroBatch]
    ) -> Generator[None, None, Tensor]:
        if self._cache is None:
            features = yield from self._computed(inputs, batches)
        else:
            features = yield from self._looked_up(self._cache, inputs, batches)
        length = shard_size(len(features), self._groups.dims.tp)
        return features[self._groups.coords.tp * length :][:length]

    def _computed(self, inputs: Sequence[EncoderInput], batches: Sequence[MicroBatch]) -> Generator[None, None, Tensor]:
        passes = [self._pass(group, batches) for group in split_into_passes(inputs, self._chunk_patches)]
        learns = self.trained and torch.is_grad_enabled()
        outputs = []
        for index, one in enumerate(passes):
            keeps = learns and (self._keep is None or index >= len(passes) - self._keep)
            one.random = get_cuda_rng_tracker().get_states()
            output = self._run(one, graph=keeps)
            one.output = output if keeps else None
            outputs.append(output.detach())
            yield
        self._passes = passes if learns else []
        return torch.cat(outputs) if outputs else self.no_features()

    def _looked_up(
        self, cache: FeatureCache, inputs: Sequence[EncoderInput], batches: Sequence[MicroBatch]
    ) -> Generator[None, None, Tensor]:
        """What `forward` gives, from the cache where it has it."""
        keys = [cache.key(pixels_of(image, batches), (image.grids, image.tile_groups)) for image in inputs]
        found = [cache.get(key) for key in keys]
        missing = self._lacked_by_any([features is None for features in found])
        for group in split_into_passes([inputs[index] for index in missing], self._chunk_patches):
            one = self._pass(group, batches)
            parts = self._run(one, graph=False).split([image.features for image in group])
            for features in parts:
                index = missing.pop(0)
                if self._groups.is_first_tp:
                    cache.put(keys[index], features)
                found[index] = features
            yield
        held = [features.to(self.device) for features in found if features is not None]
        return torch.cat(held) if held else self.no_features()

    def _lacked_by_any(self, lacked: Sequence[bool]) -> list[int]:
        """Indices of what any of the ranks of this encoder lacks: others may delete a file between two looks."""
        if self._groups.dims.tp == 1 or not lacked:
            return [index for index, lacks in enumerate(lacked) if lacks]
        mask = torch.tensor(lacked, dtype=torch.int32, device=self.device)
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._groups.tp)
        return [index for index, lacks in enumerate(mask.tolist()) if lacks]

    def backward(self, gradients: Tensor) -> None:
        """Add up gradients of the parameters, from those of the features that `forward` gave."""
        parts = self._of_all_ranks(gradients).split([one.features for one in self._passes])
        while self._passes:  # what is kept goes first, and frees its memory
            one = self._passes.pop()
            output = self._again(one) if one.output is None else one.output
            with profiler_range("backward of the encoder"):
                torch.autograd.backward(output, parts[len(self._passes)])

    def _of_all_ranks(self, run: Tensor) -> Tensor:
        """The rows of all ranks that hold this encoder, in order, from each one's run of them."""
        ranks, rows = self._groups.dims.tp, sum(one.features for one in self._passes)
        if ranks == 1 or not rows:
            return run
        length = shard_size(rows, ranks)
        padded = run.new_zeros(length, *run.shape[1:])
        padded[: len(run)] = run
        whole = run.new_empty(ranks * length, *run.shape[1:])
        dist.all_gather_into_tensor(whole, padded, group=self._groups.tp)
        return whole[:rows]

    def zero_gradients(self) -> None:
        if self.trained:
            self.module.zero_grad_buffer()

    def reduce(self) -> None:
        """Sum gradients over all encoders."""
        finalize_model_grads([self.module], pg_collection=self._groups.collection)

    def _again(self, one: _EncoderPass) -> Tensor:
        tracker = get_cuda_rng_tracker()
        now = tracker.get_states()
        tracker.set_states(dict(one.random))
        output = self._run(one, graph=True)
        tracker.set_states(now)
        return output

    def _run(self, one: _EncoderPass, *, graph: bool) -> Tensor:
        # What is encoded ahead has no dropout, and leaves the generators alone, which the pipeline draws from.
        draws = get_cuda_rng_tracker().fork(ENCODER_RNG) if self._dropout else nullcontext()
        with profiler_range("forward of the encoder"), draws, torch.set_grad_enabled(graph):
            width = self._model.language.hidden_size
            output = self.module(self._taken(one))
            first, others = unpack(output, hidden=(1, width), carried=[(one.features, 1, width)] * self._deepstack)
            return torch.cat([first, *others], dim=1)

    def _pass(self, inputs: Sequence[EncoderInput], batches: Sequence[MicroBatch]) -> _EncoderPass:
        return _EncoderPass(inputs, batches, features=sum(image.features for image in inputs))

    def _taken(self, one: _EncoderPass) -> MicroBatch:
        """What the encoder's layers read of a pass's images."""
        none = torch.empty(0, 0, dtype=torch.int64)
        return MicroBatch(
            tokens=none,
            labels=none,
            loss_mask=none,
            positions=none,
            feature_positions=none,
            grids=tuple(grid for image in one.inputs for grid in image.grids),
            tile_groups=tuple(group for image in one.inputs for group in image.tile_groups),
            patches=self._pixels(one),
        )

    def _pixels(self, one: _EncoderPass) -> Tensor:
        """[P, D] patches of a pass, on the device: each image goes there from where it lies, page-locked as a rule."""
        found = [pixels_of(image, one.batches) for image in one.inputs]
        pixels = found[0].new_empty(sum(map(len, found)), found[0].shape[1], device=self.device)
        for part, patches in zip(pixels.split([len(each) for each in found]), found, strict=True):
            part.copy_(patches, non_blocking=True)
        return pixels

    def no_features(self) -> Tensor:
        """[0, 1 + DeepStack layers, Hl]."""
        shape = 0, 1 + self._deepstack, self._model.language.hidden_size
        return torch.empty(*shape, dtype=self._dtype, device=self.device)


def encoder_config(config: Config) -> Config:
    """The configuration as the encoder sees it: its own tensor parallelism alone, its gradients reduced once, at the
    step's end.
    """
    tp = config.parallel.vision_tensor_model_parallel_size
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=1,
        sequence_parallel=tp > 1 and config.parallel.sequence_parallel is not False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        tp_comm_overlap=False,
    )
    return replace(config, parallel=parallel, placement=replace(config.placement, pipeline_cuts=None))


def pixels_of(image: EncoderInput, batches: Sequence[MicroBatch]) -> Tensor:
    """[P, D] patches of one image."""
    patches = batches[image.batch].patches
    assert patches is not None, "every rank that encodes has pixels"
    return patches[image.patches]
