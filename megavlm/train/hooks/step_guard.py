"""Skip or undo steps whose numbers are bad (`--on-spike`), and find the rank, the layer and the samples to blame.

To find them, the step is recomputed with the same random numbers, and the norms of every layer's output and of its
gradient are recorded. For values that are not finite, the first such place is reported. A spike is attributed to the
micro-batch whose norms stand out from all others in the same layers. An error that does not recur was caused by a
device.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.checkpoint import state
from megavlm.checkpoint.folders import Holds
from megavlm.checkpoint.reading import Choices, choices_in, load_newest
from megavlm.data.types import SampleId, StepData
from megavlm.errors import BadNumbers
from megavlm.inputs.batch import MicroBatch
from megavlm.metrics.callback import Value
from megavlm.model.vlm import VLMChunk, bare_chunk
from megavlm.optim.slow_links import forget_errors
from megavlm.parallel.rendezvous import from_rank_0, of_all_ranks
from megavlm.resilience import events
from megavlm.resilience.bad_steps import BadSteps, iterations
from megavlm.resilience.phases import OTHER, START
from megavlm.train.engine import StateBeforeStep
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.run import Run
from megavlm.train.step_result import StepResult

_PIXELS, _OUTPUT, _GRADIENT = range(3)  # in the order in which a step computes them
_MOST_NAMED = 16  # samples
_STANDS_OUT = 3.0  # times the median: healthy micro-batches differ by less


@dataclass(frozen=True, order=True)
class DataPlace:
    """A tensor that a step computes, ordered as computed. The smallest place that is not finite is the first one:
    later layers only pass the values on.
    """

    kind: int
    depth: int  # of the layer, from the input for an output, from the loss for a gradient
    micro_batch: int  # of this rank; -1 in a colocated encoder, whose passes are not micro-batches
    rank: int
    replica: int


Norms = list[tuple[DataPlace, float]]


def find_culprit(run: Run, step: StepData, result: StepResult) -> tuple[str, dict[str, Any]]:
    """Recompute a bad step; return a sentence on the first place that went wrong, and details for the event.

    Every rank calls it.
    """
    names = [name for chunk in ([*run.plan.encoder], *run.plan.chunks) for name in chunk]
    own, squared = _computed_again(run, step.batches, names)
    spike = math.isfinite(result.loss) and math.isfinite(result.grad_norm or 0.0)
    every = of_all_ranks((own if spike else [each for each in own if not math.isfinite(each[1])][:1], squared))
    norms = sorted(each for places, _ in every for each in places)
    again = sum(squared for _, squared in every) ** 0.5 / max(result.trained_tokens, 1)
    if not norms or (spike and again < (result.grad_norm or 0.0) / 2):
        return "all is well when the step is computed again: look for a device that computes wrongly", {}
    place, how, blames_layer = norms[0][0], "is not finite", True
    if spike:
        found = standing_out(norms)
        if found is None:
            return "no micro-batch stands out: look at the learning rate", {}
        place, how = found[0], f"is {found[1]:.3g} times the median's"
        blames_layer = place.kind != _GRADIENT or place.depth > 1  # else the loss sends it down: unusual samples
    layer = (names if place.kind == _OUTPUT else names[::-1])[place.depth] if place.kind != _PIXELS else "pixels"
    what = {
        _PIXELS: "pixels of its images",
        _OUTPUT: f"the output of {layer}",
        _GRADIENT: f"the gradient of the output of {layer}",
    }[place.kind]
    samples = _samples(run, step, place)
    named = ", ".join(samples[:_MOST_NAMED]) + (" …" if len(samples) > _MOST_NAMED else "")
    line = f"rank {place.rank} is the first where {what} {how}" + (f"; samples: {named}" if named else "")
    details = {"culprit": place.rank, **({"module": layer} if blames_layer else {}), "samples": samples[:_MOST_NAMED]}
    return line, details


def standing_out(norms: Norms) -> tuple[DataPlace, float] | None:
    """Return the first place where the norms of the most deviant micro-batch stand out, and its ratio to the median.

    A norm is compared with the median of the same layer over all micro-batches of the step. The micro-batch with the
    largest ratio r to that median is the deviant one; its first place with a ratio of at least √r is returned.
    None if no micro-batch stands out.
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
    return first, ratios[first]


def _computed_again(run: Run, batches: Sequence[MicroBatch], names: Sequence[str]) -> tuple[Norms, float]:
    """Return this rank's norms in order, and its addend of the squared norm of the gradient, summed over tokens;
    restore all other state.
    """
    rank, replica, engine = dist.get_rank(), run.engine.groups.coords.dp, run.engine
    before = StateBeforeStep.of(engine.model_chunks, engine.optimizer)
    seen: list[tuple[DataPlace, Tensor]] = []

    def look(kind: int, name: str, micro_batch: int, value: Tensor) -> None:
        depth = names.index(name) if kind == _OUTPUT else len(names) - 1 - names.index(name)
        seen.append((DataPlace(kind, depth, micro_batch, rank, replica), _norm(value)))

    for number, batch in enumerate(batches):
        if batch.images is not None and not batch.images.patches.is_meta:
            seen.append((DataPlace(_PIXELS, 0, number, rank, replica), _norm(batch.images.patches)))
    colocated = engine.schedule.colocated
    encoder = None if colocated is None else colocated.encoder.module
    with _watched(engine.model_chunks, encoder, look):
        engine.schedule.train(batches)
    squared = engine.optimizer.squared_norm()
    before.restore()
    forget_errors(engine.model_chunks)
    values = torch.stack([norm.to(engine.schedule.backend.device) for _, norm in seen]).tolist() if seen else []
    norms = sorted((place, value) for (place, _), value in zip(seen, values, strict=True))
    return norms, math.inf if squared is None else float(squared)


def _norm(value: Tensor) -> Tensor:
    """Return the norm in float64, where no square of an fp32 number overflows: finite if all numbers are finite."""
    return torch.linalg.vector_norm(value.detach(), dtype=torch.float64)


@contextmanager
def _watched(chunks: Sequence[Any], encoder: Any, look: Any) -> Iterator[None]:
    """Call `look`, within this context, with the output of each layer that runs, and with its gradient."""
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


def _samples(run: Run, step: StepData, place: DataPlace) -> list[str]:
    """Return the samples of a place's micro-batch, or of the replica's whole step, from the replica's reader."""
    groups = run.engine.groups
    known = step.samples if groups.is_reader and groups.coords.dp == place.replica else ()
    chosen = known[place.micro_batch : place.micro_batch + 1] if place.micro_batch >= 0 else known
    mine = [_label(run.source, sample) for samples in chosen for sample in samples]
    return next(filter(None, of_all_ranks(mine)), [])


def _label(source: Any, sample: SampleId) -> str:
    return str(source.label(sample)[1]) if hasattr(source, "label") else f"sample {sample}"


class StepGuard(RankHook):
    """Detects bad steps and skips, stops or rewinds (`--on-spike`). All ranks take the same decisions."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._options = run.config.numerics
        self._steps = BadSteps(self._options.spike_factor)
        self._steps.load_state_dict(run.position.bad_steps)
        self._left_out = iterations(self._options.iterations_to_skip)

    def leaves_out(self, iteration: int) -> bool:
        """Return whether the batch of an iteration is left out of training (`--iterations-to-skip`)."""
        return iteration in self._left_out

    def state_dict(self) -> dict[str, Any]:
        """Return the state of bad-step detection for a checkpoint."""
        return self._steps.state_dict()

    def judge(self, loss: float, norm: float | None) -> str | None:
        """Return why the loss or gradient norm of a step is bad; None if both are good."""
        return self._steps.reason(loss, norm)

    @property
    def trusts_weights(self) -> bool:
        """Return whether the last step's numbers were good: weights that cause bad numbers must not be saved."""
        return self._steps.in_a_row == 0

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Count a step; return the number of steps of the whole run without a weight update."""
        result = step.result
        if result.updated and result.grad_norm is not None:
            self._steps.good(result.grad_norm)
        elif self._complaint(result):
            self._steps.bad()
        else:
            self._steps.left_out()
        return {"skipped_steps": self._steps.skipped}

    def on_step_end(self, step: Step) -> None:
        """Report a bad step; with --on-spike rewind, go back to a checkpoint. Raises BadNumbers to end the run."""
        iteration, result = step.iteration, step.result
        complaint = self._complaint(result)
        if complaint is None:
            return
        details: dict[str, Any] = {}
        if result.refused is not None:
            where, details = find_culprit(self._run, step.data, result)
            complaint = f"{complaint}: {where}"
        self.report("skip", iteration, complaint, **details)
        in_a_row, most = self._steps.in_a_row, self._options.max_consecutive_skips
        if self._options.on_spike == "stop":
            raise BadNumbers(
                f"iteration {iteration}: {complaint}, and --on-spike is stop; no checkpoint was saved after it"
            )
        if in_a_row >= most:
            raise BadNumbers(
                f"iteration {iteration}: {complaint}; this is bad step {in_a_row} in a row "
                "(numerics.max_consecutive_skips): no checkpoint was saved after the first of them; lower --lr, or "
                "look at the data"
            )
        if iteration == self._run.config.train.train_iters:
            raise BadNumbers(
                f"iteration {iteration}: {complaint}; this is the last step, and no checkpoint was saved after it or "
                f"bad ones before it; lower --lr, or leave its batch out with --iterations-to-skip {iteration}"
            )
        if self._options.on_spike == "rewind":
            self._rewind(iteration)

    def _rewind(self, iteration: int) -> None:
        """Load weights, moments and random states of the newest checkpoint, as at a start the one before if it is
        damaged, and go on with the data after this batch.

        The run then is as if the batches since that checkpoint had been left out.
        """
        if self._run.saver is not None:
            self._run.saver.wait()  # the newest checkpoint may still be under way
        run, phases, holds = self._run, self._run.engine.schedule.phases, Holds()
        root, fallback = run.run_dir / "checkpoints", run.config.checkpoint.fallback
        choices = from_rank_0(lambda: choices_in(root, holds, fallback=fallback), Choices(()))
        for remark in choices.remarks:
            self.report("damage", iteration, remark)
        if not choices.folders:
            run.say("there is no checkpoint yet to go back to: the batch is left out")
            return
        phases.enter(START, "weights")  # it may take as long as at a start, and more than a step
        folder, position = load_newest(
            choices,
            check=lambda _: None,
            load=lambda folder: state.load(run.engine.trained(), folder, config=run.config, plan=run.plan),
            say=lambda text: self.report("damage", iteration, text),
        )
        holds.release()
        phases.enter(OTHER)
        self._steps.go_back(position.bad_steps, left_out=iteration - position.iteration)
        self.report("rewind", iteration, f"went back to the weights of {folder}", back_to=position.iteration)

    def report(self, kind: str, iteration: int, reason: str, **details: Any) -> None:
        """Write an event, and print it."""
        if self._run.progress is not None:
            events.record(self._run.run_dir, kind, iteration=iteration, reason=reason, **details)
        self._run.say(f"iteration {iteration}: {reason}" + ("; its batch is left out" if kind == "skip" else ""))

    def _complaint(self, result: StepResult) -> str | None:
        """Return why a step is bad; None if it is not. An fp16 overflow is bad only at the smallest loss scale."""
        if result.updated or result.refused is not None:
            return result.refused
        smallest = self._run.config.optimizer.min_loss_scale
        if result.overflowed and result.loss_scale is not None and result.loss_scale <= smallest:
            return f"fp16 gradients overflow at the smallest loss scale {result.loss_scale:g}"
        return None
