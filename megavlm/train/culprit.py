"""Find where the numbers of a step stopped being finite: the rank, the layer and the samples.

The step is computed once more, with the random numbers it had, while every layer's output and the gradient of it are
looked at. That costs a step, and only after one that was not finite. What does not happen again was not caused by the
data or the weights: a device computed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.batch import MicroBatch
from megavlm.data.types import SampleId, StepData, StreamSample
from megavlm.model.vlm import VLMChunk, bare_chunk
from megavlm.train.build import Run
from megavlm.train.state_before import StateBeforeStep

_PIXELS, _OUTPUT, _GRADIENT = range(3)  # in the order in which a step computes them
_MOST_NAMED = 16  # samples


@dataclass(frozen=True, order=True)
class Place:
    """Something that is not finite. The least place is the first: each layer passes on what it got."""

    kind: int
    depth: int  # of the layer, from the input for an output, from the loss for a gradient
    micro_batch: int  # of this rank; -1 in a colocated encoder, whose passes are not micro-batches
    rank: int
    replica: int


@dataclass(frozen=True)
class Culprit:
    """What is known of a step that was not finite."""

    where: str  # in words
    details: dict[str, Any] = field(default_factory=dict)  # for events.jsonl


def find_culprit(run: Run, step: StepData) -> Culprit:
    """Compute a step again and return what was the first to be not finite; every rank calls it."""
    names = [name for chunk in ([*run.plan.encoder], *run.plan.chunks) for name in chunk]
    own = _own_places(run, step.batches, names)
    every: list[list[Place]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own[:1])
    places = sorted(place for each in every for place in each)
    if not places:
        return Culprit("all is finite when the step is computed again: look for a device that computes wrongly")
    first = places[0]
    layer = None if first.kind == _PIXELS else (names if first.kind == _OUTPUT else names[::-1])[first.depth]
    samples = _samples(run, step, first)
    what = {
        _PIXELS: "pixels of its images",
        _OUTPUT: f"the output of {layer}",
        _GRADIENT: f"the gradient of the output of {layer}",
    }[first.kind]
    named = ", ".join(samples[:_MOST_NAMED]) + (" …" if len(samples) > _MOST_NAMED else "")
    return Culprit(
        f"rank {first.rank} is the first where {what} is not finite" + (f"; samples: {named}" if named else ""),
        {"culprit": first.rank, "module": layer or "pixels", "samples": samples[:_MOST_NAMED]},
    )


def _own_places(run: Run, batches: Sequence[MicroBatch], names: Sequence[str]) -> list[Place]:
    """Return this rank's places, first to last. The step is computed again, and the update is left out again."""
    rank, replica = dist.get_rank(), run.engine.groups.coords.dp
    before = StateBeforeStep.of(run.engine.model_chunks, run.engine.optimizer)
    seen: list[tuple[Place, Tensor]] = []

    def look(kind: int, name: str, micro_batch: int, value: Tensor) -> None:
        depth = names.index(name) if kind == _OUTPUT else len(names) - 1 - names.index(name)
        seen.append((Place(kind, depth, micro_batch, rank, replica), torch.isfinite(value.detach()).all()))

    for number, batch in enumerate(batches):
        if batch.images is not None and not batch.images.patches.is_meta:
            seen.append((Place(_PIXELS, 0, number, rank, replica), torch.isfinite(batch.images.patches).all()))
    colocated = run.engine.schedule.colocated
    encoder = None if colocated is None else colocated.encoder.module
    with _watched(run.engine.model_chunks, encoder, look):
        run.engine.schedule.train(batches)
    before.restore()
    return sorted(place for place, finite in seen if not finite)


@contextmanager
def _watched(chunks: Sequence[Any], encoder: Any, look: Any) -> Iterator[None]:
    """Call `look`, within this context, with the output of each layer that runs, and with the gradient of it."""
    watched = [(bare_chunk(chunk), chunk is encoder) for chunk in chunks]
    for chunk, is_encoder in watched:
        chunk.__dict__["run_layer"] = _watching(chunk, look, numbered=not is_encoder)
    try:
        yield
    finally:
        for chunk, _ in watched:
            del chunk.__dict__["run_layer"]


def _watching(chunk: VLMChunk, look: Any, *, numbered: bool) -> Any:
    passes = dict.fromkeys(chunk.names, -1)

    def run_layer(name: str, hidden: Any, context: Any) -> Tensor:
        output = VLMChunk.run_layer(chunk, name, hidden, context)
        passes[name] += 1
        number = passes[name] if numbered else -1
        look(_OUTPUT, name, number, output)
        if output.requires_grad:
            output.register_hook(lambda gradient: look(_GRADIENT, name, number, gradient))
        return output

    return run_layer


def _samples(run: Run, step: StepData, place: Place) -> list[str]:
    """Return the samples of a place's micro-batch, or of the replica's step. The replica's reader knows them."""
    groups = run.engine.groups
    known = step.samples if groups.is_reader and groups.coords.dp == place.replica else ()
    chosen = known[place.micro_batch : place.micro_batch + 1] if place.micro_batch >= 0 else known
    mine = [_label(run.source, sample) for samples in chosen for sample in samples]
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    return next(filter(None, every), [])


def _label(source: Any, sample: SampleId) -> str:
    if isinstance(sample, StreamSample):
        return sample.label
    return str(source.label(sample)[1]) if hasattr(source, "label") else f"sample {sample}"
