"""Predict the time of a whole step: colocated encoder, pipeline, gradient reduction and weight update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from megavlm.arch.kinds import hidden_bytes
from megavlm.arch.layers import EMBEDDING, is_audio
from megavlm.arch.objectives import objective_of
from megavlm.arch.scenario import Scenario, encoder_scenario
from megavlm.arch.schedules import PipelineShape, scenario_shape
from megavlm.arch.workload import OF_ENCODERS
from megavlm.config.schema import Config
from megavlm.planner.cost import (
    gradient_seconds,
    held_parameters,
    layer_seconds,
    optimizer_seconds,
    trained_parameters,
)
from megavlm.planner.hardware import Hardware
from megavlm.planner.host_memory import HostMemory, host_memory, of_update, pinned_bytes
from megavlm.planner.layer_profiles import LayerProfiles, measured_once
from megavlm.planner.memory import Memory, batch_bytes, kept_bytes, matrix_seconds, rank_memory, replicated_encoder
from megavlm.planner.partition import simulate_partition
from megavlm.rules.defaults import chunk_patches


@dataclass(frozen=True)
class EncoderEstimate:
    """Seconds per step and peak bytes that a colocated encoder adds to every rank of a model replica."""

    scenario: Scenario  # one of its passes, on a layout of its own
    forward: float
    backward: float  # recomputation included
    exchange: float  # features out, their gradients back
    memory: Memory
    host: HostMemory = field(default_factory=HostMemory)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.exchange


@dataclass(frozen=True)
class StepEstimate:
    """Predicted seconds of one optimizer step by part, and memory of each pipeline rank."""

    pipeline: float
    encoder: float
    gradients: float
    optimizer: float
    bubble: float  # of the pipeline, share of the ranks' time
    memory: tuple[Memory, ...]  # of each pipeline rank
    host: tuple[HostMemory, ...] = ()  # of each pipeline rank, with `--offload`

    @property
    def seconds(self) -> float:
        return self.pipeline + self.encoder + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        return max(memory.total for memory in self.memory)


def encoder_layers(scenario: Scenario) -> int:
    """Return the number of layers before the embedding, which a colocated encoder consists of."""
    return scenario.names.index(EMBEDDING)


def colocated_encoder(
    scenario: Scenario, *, hardware: Hardware, config: Config, images: int, vision_tp: int
) -> EncoderEstimate:
    """Return the encoder's time and memory on each of the TP × CP × PP ranks of a model replica.

    `images`: number of equal images in one micro-batch, to each of which belongs a part of its sounds. Each group of
    `vision_tp` ranks is an encoder. It encodes ⌈images of the step / encoders⌉ images in passes of about
    `--encoder-chunk-patches`. All passes but the last `placement.encoder_keep_chunks` are recomputed for their backward
    passes.
    """
    kept = config.placement.encoder_keep_chunks
    dims, ranks = scenario.dims, scenario.dims.replica
    all_images = images * scenario.micro_batches
    own = math.ceil(all_images * vision_tp / ranks)
    model_state = replicated_encoder(scenario, vision_tp=vision_tp)
    trained = trained_parameters(encoder_scenario(scenario, vision_tp), 0, encoder_layers(scenario))
    host = of_update(trained / encoder_scenario(scenario, vision_tp).shards, scenario)
    if not all_images:
        return EncoderEstimate(encoder_scenario(scenario, vision_tp), 0.0, 0.0, 0.0, model_state, host)
    per_image = (scenario.work.patches + scenario.work.frames) / images
    in_pass = max(1, min(own, int(chunk_patches(config, on_gpu=hardware.on_gpu) // per_image)))
    share = in_pass / images
    in_passes = {name: round(getattr(scenario.work, name) * share) for name in OF_ENCODERS}
    alone = replace(encoder_scenario(scenario, vision_tp), work=replace(scenario.work, **in_passes))
    each = measured_once(alone, range(encoder_layers(scenario)))
    # An encoder's ranks are neighbours inside a tensor-parallel group; a larger encoder spans pipeline stages.
    between = hardware.link(vision_tp if dims.tp % vision_tp == 0 else dims.world)
    seconds = each(partial(layer_seconds, scenario=alone, hardware=replace(hardware, near=between)))
    passes = own / in_pass
    # Pass after pass: the slower of device and host counts.
    forward = passes * max(sum(s.forward for s in seconds), sum(s.launch[0] for s in seconds))
    backward = passes * max(sum(s.backward for s in seconds), sum(s.launch[1] for s in seconds))
    kinds = (False, True)[: 1 + (scenario.work.frames > 0)]  # passes of images, then passes of sounds
    if backward:
        backward += max(0.0, 1 - kept / passes / len(kinds)) * forward
    features = scenario.micro_batches * hidden_bytes(EMBEDDING, scenario)
    link = hardware.link(dims.world)
    exchange = link.seconds(features / ranks * (ranks - 1)) * (2 if backward else 1) if ranks > 1 else 0.0
    if backward and vision_tp > 1:  # an encoder's ranks gather the gradients of what it made
        exchange += between.seconds(features / ranks * (vision_tp - 1))

    def held(count: Callable[..., float]) -> float:
        """Return the bytes of the passes that keep their activations, the last ones."""
        layers = list(zip(scenario.names, each(partial(count, scenario=alone)), strict=False))
        of_kinds = (sum(size for name, size in layers if is_audio(name) == kind) for kind in kinds)
        return sum([size for size in of_kinds for _ in range(math.ceil(passes))][-max(1, kept) :])

    saved = held(kept_bytes)
    host += HostMemory(activations=held(pinned_bytes))
    pixels = batch_bytes(alone, with_patches=True) - batch_bytes(alone, with_patches=False)
    memory = model_state + Memory(activations=saved, data=features + pixels * passes)
    return EncoderEstimate(alone, forward, backward, exchange, memory, host)


def step_of(
    profiles: LayerProfiles,
    hardware: Hardware,
    cuts: tuple[int, ...],
    *,
    encoder: EncoderEstimate | None = None,
    with_memory: bool = True,
) -> StepEstimate:
    """Return the estimate of one step of a partition; `cuts` are indices into the layers of `profiles`."""
    scenario, dims = profiles.scenario, profiles.scenario.dims
    timeline = simulate_partition(profiles, scenario_shape(scenario), cuts)
    bounds = [profiles.first, *(profiles.first + cut for cut in cuts), len(scenario.names)]
    memory = [
        rank_memory(scenario, [0, *bounds[1:]], rank, recompute=profiles.recompute, skip=profiles.first)
        for rank in range(dims.pp if with_memory else 0)
    ]
    host = [
        host_memory(scenario, [0, *bounds[1:]], rank, recompute=profiles.recompute, skip=profiles.first)
        for rank in range(dims.pp if scenario.offload else 0)
    ]
    ends = [_ending(scenario, bounds, rank, hardware) for rank in range(dims.pp)]
    gradients, optimizer = (max(seconds) for seconds in zip(*ends, strict=True))
    gradients = exposed_seconds(gradients, scenario, pipeline=timeline.seconds)
    if encoder is not None:
        memory = [each + encoder.memory for each in memory]
        host = [each + encoder.host for each in host]
        count = trained_parameters(encoder.scenario, 0, profiles.first)
        gradients += gradient_seconds(count, encoder.scenario, hardware)
        optimizer += optimizer_seconds(count, encoder.scenario, hardware)
        optimizer += matrix_seconds(scenario.names[: profiles.first], encoder.scenario, hardware)
    return StepEstimate(
        pipeline=timeline.seconds + cached_seconds(profiles, cuts),
        encoder=encoder.seconds if encoder is not None else 0.0,
        gradients=gradients,
        optimizer=optimizer,
        bubble=timeline.bubble,
        memory=tuple(memory),
        host=tuple(host),
    )


def cached_seconds(profiles: LayerProfiles, cuts: tuple[int, ...]) -> float:
    """Return the seconds of the forward passes that a gradient cache adds to the start of a step; without a cache 0.

    The first micro-batch passes all chunks; each of the others adds the time of the busiest rank.
    """
    scenario = profiles.scenario
    if not objective_of(scenario.model).embeds:
        return 0.0
    ends = profiles.forward[[0, *cuts, profiles.count]]
    chunks, pp = [end - start for start, end in pairwise(ends.tolist())], scenario.dims.pp
    return sum(chunks) + (scenario.micro_batches - 1) * max(sum(chunks[rank::pp]) for rank in range(pp))


def exposed_seconds(gradients: float, scenario: Scenario, *, pipeline: float) -> float:
    """Return the seconds of gradient communication that do not overlap with the pipeline's passes."""
    if scenario.shards_gradients and scenario.on_gpu:  # layer by layer, behind the passes of other layers
        return max(gradients * 0.1, gradients - pipeline)
    # All but the last bucket overlaps with the last micro-batch's backward pass.
    if scenario.overlap_grad_reduce and scenario.on_gpu and not scenario.sends_codes:
        return max(gradients * 0.1, gradients - pipeline / (scenario.micro_batches + scenario.dims.pp - 1))
    return gradients


def least_pipeline_time(shape: PipelineShape, *, work: float, path: float) -> float:
    """Return a lower bound of a pipeline's seconds, over all partitions.

    With one chunk per rank, rank r of p ends no sooner than load₀ + … + load_(r−1) + m·load_r. The largest of these
    is least where all are equal, at B: load_r = B/m·(1 − 1/m)^r, which add up to the `work` W of a micro-batch. So
    B = W / (1 − (1 − 1/m)^p). With more chunks only the ranks' own work is certain.

    `path` is the part of the work on the critical path: without weight gradients that have separate passes.
    """
    m, pp = shape.micro_batches, shape.pp
    share = 1 - (1 - 1 / m) ** pp if shape.vpp == 1 else pp / m
    if shape.splits_backward:
        return max(path, path / share, work * m / pp)
    return work * max(1.0, 1 / share)


def _ending(scenario: Scenario, bounds: Sequence[int], rank: int, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of a pipeline rank's gradient reduction and of its weight update."""
    spans, chunks = list(pairwise(bounds)), scenario.dims.chunks_of(rank)
    gradients = optimizer = 0.0
    for layout in scenario.layouts:
        trained, held = (
            sum(count(layout, *spans[chunk]) for chunk in chunks) for count in (trained_parameters, held_parameters)
        )
        gradients += gradient_seconds(trained, layout, hardware, held=held)
        optimizer += optimizer_seconds(trained, layout, hardware)
    names = [name for chunk in chunks for name in scenario.names[slice(*spans[chunk])]]
    return gradients, optimizer + matrix_seconds(names, scenario, hardware)
