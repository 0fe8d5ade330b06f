"""Find where the numbers of a step went wrong: the rank, the layer and the samples.

The step is computed once more, with the random numbers it had, while the norms of every layer's output and of the
gradient of it are taken. That costs a step, and only after a bad one. What is not finite has a first place. A spike has
none: it is looked for in the micro-batch whose norms stand out from those of all others in the same layers. What does
not happen again was not caused by the data or the weights: a device computed wrongly.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.types import SampleId, StepData, StreamSample
from megavlm.inputs.batch import MicroBatch
from megavlm.model.vlm import VLMChunk, bare_chunk
from megavlm.optim.slow_links import forget_errors
from megavlm.train.run import Run
from megavlm.train.state_before import StateBeforeStep
from megavlm.train.step_result import StepResult

_PIXELS, _OUTPUT, _GRADIENT = range(3)  # in the order in which a step computes them
_MOST_NAMED = 16  # samples
_STANDS_OUT = 3.0  # times the median: healthy micro-batches differ by less


@dataclass(frozen=True, order=True)
class Place:
    """Something that a step computes. Of those that are not finite the least is the first: layers pass on what they
    get.
    """

    kind: int
    depth: int  # of the layer, from the input for an output, from the loss for a gradient
    micro_batch: int  # of this rank; -1 in a colocated encoder, whose passes are not micro-batches
    rank: int
    replica: int


Norms = list[tuple[Place, float]]


@dataclass(frozen=True)
class Culprit:
    """What is known of a bad step."""

    where: str  # in words
    details: dict[str, Any] = field(default_factory=dict)  # for events.jsonl


_NOT_AGAIN = Culprit("all is well when the step is computed again: look for a device that computes wrongly")
_NOBODY = Culprit("no micro-batch stands out: look at the learning rate")


def find_culprit(run: Run, step: StepData, result: StepResult) -> Culprit:
    """Compute a bad step again and return what was the first to go wrong; every rank calls it."""
    names = [name for chunk in ([*run.plan.encoder], *run.plan.chunks) for name in chunk]
    own, norm = _computed_again(run, step.batches, names)
    spike = math.isfinite(result.loss) and math.isfinite(result.grad_norm or 0.0)
    told: list[tuple[Norms, float]] = [([], 0.0)] * dist.get_world_size()
    dist.all_gather_object(told, (own if spike else [each for each in own if not math.isfinite(each[1])][:1], norm))
    norms = sorted(each for places, _ in told for each in places)
    if not spike:
        return _named(run, step, norms[0][0], names, "is not finite") if norms else _NOT_AGAIN
    largest = max(norm for _, norm in told)
    if largest / max(result.trained_tokens, 1) < (result.grad_norm or 0.0) / 2:
        return _NOT_AGAIN
    found = standing_out(norms)
    if found is None:
        return _NOBODY
    return _named(run, step, found.place, names, f"is {found.ratio:.3g} times the median's", known=found.known)


def _named(run: Run, step: StepData, place: Place, names: Sequence[str], how: str, *, known: bool = True) -> Culprit:
    """Return a place in words; `known` says whether it is where things went wrong, and not only where they show."""
    layer = None if place.kind == _PIXELS else (names if place.kind == _OUTPUT else names[::-1])[place.depth]
    samples = _samples(run, step, place)
    what = {
        _PIXELS: "pixels of its images",
        _OUTPUT: f"the output of {layer}",
        _GRADIENT: f"the gradient of the output of {layer}",
    }[place.kind]
    named = ", ".join(samples[:_MOST_NAMED]) + (" …" if len(samples) > _MOST_NAMED else "")
    return Culprit(
        f"rank {place.rank} is the first where {what} {how}" + (f"; samples: {named}" if named else ""),
        {
            "culprit": place.rank,
            **({"module": layer or "pixels"} if known else {}),
            "samples": samples[:_MOST_NAMED],
        },
    )


@dataclass(frozen=True)
class StandingOut:
    """The first place of the micro-batch that stands out, `ratio` times the median of all micro-batches."""

    place: Place
    ratio: float
    known: bool  # whether the layer is to blame: layers before it were like those of other micro-batches


def standing_out(norms: Norms) -> StandingOut | None:
    """Return where the norms of the oddest micro-batch leave those of the others, if it stands out.

    A norm is compared with the median of the same layer over all micro-batches of the step. The micro-batch with the
    largest such ratio r is the odd one, and the first of its places with a ratio of at least √r is where it begins. If
    that is the gradient that the loss sends down, the samples are unusual, and no layer is to blame.
    """
    layers: dict[tuple[int, int], list[float]] = defaultdict(list)
    for place, norm in norms:
        if norm > 0:  # a micro-batch without images has no gradient in the encoder
            layers[place.kind, place.depth].append(norm)
    medians = {layer: statistics.median_low(found) for layer, found in layers.items()}
    ratios = {place: norm / medians[place.kind, place.depth] for place, norm in norms if norm > 0}
    odd = max(ratios, key=lambda place: ratios[place], default=None)
    if odd is None or ratios[odd] < _STANDS_OUT:
        return None
    its = sorted(place for place in ratios if (place.replica, place.micro_batch) == (odd.replica, odd.micro_batch))
    first = next(place for place in its if ratios[place] >= math.sqrt(ratios[odd]))
    return StandingOut(first, ratios[first], known=first.kind != _GRADIENT or first.depth > 1)


def _computed_again(run: Run, batches: Sequence[MicroBatch], names: Sequence[str]) -> tuple[Norms, float]:
    """Return this rank's norms, first to last, and that of the gradient's sum over tokens. All else is as before."""
    rank, replica, engine = dist.get_rank(), run.engine.groups.coords.dp, run.engine
    before = StateBeforeStep.of(engine.model_chunks, engine.optimizer)
    seen: list[tuple[Place, Tensor]] = []

    def look(kind: int, name: str, micro_batch: int, value: Tensor) -> None:
        depth = names.index(name) if kind == _OUTPUT else len(names) - 1 - names.index(name)
        seen.append((Place(kind, depth, micro_batch, rank, replica), _norm(value)))

    for number, batch in enumerate(batches):
        if batch.images is not None and not batch.images.patches.is_meta:
            seen.append((Place(_PIXELS, 0, number, rank, replica), _norm(batch.images.patches)))
    colocated = engine.schedule.colocated
    encoder = None if colocated is None else colocated.encoder.module
    with _watched(engine.model_chunks, encoder, look):
        engine.schedule.train(batches)
    squared = engine.optimizer.squared_norm()
    before.restore()
    forget_errors(engine.model_chunks)
    values = torch.stack([norm.to(engine.schedule.backend.device) for _, norm in seen]).tolist() if seen else []
    norms = sorted((place, value) for (place, _), value in zip(seen, values, strict=True))
    return norms, math.inf if squared is None else float(squared) ** 0.5


def _norm(value: Tensor) -> Tensor:
    """Return the norm in float64, whose squares overflow for no fp32 number; it is finite if all numbers are."""
    return torch.linalg.vector_norm(value.detach(), dtype=torch.float64)


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
        if numbered and not torch.is_grad_enabled():
            return output  # the first pass of a gradient cache: the second one sees the same
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
