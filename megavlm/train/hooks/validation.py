"""Measure the loss on samples that are not trained on, with the training pipeline and without a trace in the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megavlm.data.loader import DataLoader
from megavlm.data.survey import DEAR, cheaper
from megavlm.data.types import StepData
from megavlm.errors import UserError
from megavlm.metrics import callback
from megavlm.metrics.callback import Value
from megavlm.resilience.phases import OTHER, VALIDATION
from megavlm.train.evaluate import accuracies
from megavlm.train.held_out_texts import HeldOutTexts
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.hooks.stops import Stops
from megavlm.train.run import Run

_TOLD = 16  # most numbers of a line, which has only those of all data sets together if there are more


class Validation(RankHook):
    """Measures the validation loss of a run every `--eval-interval` steps and at its end; all ranks call it alike."""

    def __init__(self, run: Run, stops: Stops) -> None:
        self._run, self._stops = run, stops
        self._interval = run.config.evaluation.eval_interval
        self._last = run.config.train.train_iters
        self._since = time.perf_counter()  # the end of the last one
        self._said = self._measured = False  # that it takes long; that this process has measured before

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Return what a validation finds, if one is due."""
        due = self._is_due(step.iteration) and not self._stops.asked(step)
        return self.validate(step.iteration) if due else {}

    def _is_due(self, iteration: int) -> bool:
        """Return whether the loss is measured after an iteration."""
        if self._run.validation_loader is None:
            return False
        return iteration == self._last or (self._interval > 0 and iteration % self._interval == 0)

    def validate(self, iteration: int) -> dict[str, Value]:
        """Return the fields of the iteration's record: loss and perplexity in all and of each data set, the seconds
        that it took, and their fraction of the time since the last one.

        There are none if it was given up: a rank was asked to stop, or data cannot be read. Then training goes on.
        """
        run, began = self._run, time.perf_counter()
        with run.engine.evaluation():
            held_out = HeldOutTexts(run.engine.groups) if run.engine.schedule.cache is not None else None
            totals = self._totals(iteration, held_out)
            if totals is None:
                return {}
            found = fields(totals.tolist(), run.source.validation_names, of_tokens=held_out is None)
            if held_out is not None:
                found |= held_out.scores(run.source.validation_names, run.backend.device)
            found |= accuracies(run)
        run.engine.schedule.phases.enter(OTHER)
        ended = time.perf_counter()
        seconds, share = ended - began, (ended - began) / (ended - self._since)
        self._since, self._measured = ended, True
        self._tell(found, seconds, share)
        scores = {name: value for name, value in found.items() if isinstance(value, float)}
        run.callbacks.on_validation(callback.Validation(iteration, scores))
        return {**found, "eval_time_s": seconds, "eval_time_fraction": share}

    def _totals(self, iteration: int, held_out: HeldOutTexts | None) -> Tensor | None:
        """Return the sums of `Schedule.losses` over all batches and ranks; None if a rank was asked to stop.

        `held_out` collects the texts that are embedded.
        """
        see = (lambda found: None) if held_out is None else held_out.add
        engine, loader, names = self._run.engine, self._run.validation_loader, self._run.source.validation_names
        assert loader is not None, "the caller looks"
        num_sources = len(names) if len(names) > 1 else 0
        sums, number, last = engine.schedule.no_totals(num_sources), 0, False
        while not last:
            number += 1
            engine.schedule.phases.enter(VALIDATION, f"data of batch {number}")
            data = self._next_batch(loader)
            if data is None:
                loader.rewind()
                return None
            engine.schedule.phases.enter(VALIDATION, f"batch {number}")
            if not self._measured:
                self._run.skipped.write(iteration, data.skipped)
            sums += engine.schedule.losses(data.batches, num_sources=num_sources, see=see)
            last = data.last
        if not engine.groups.is_first_tp:
            sums.zero_()  # each tensor-parallel rank has the same
        dist.all_reduce(sums)
        return sums

    def _next_batch(self, loader: DataLoader) -> StepData | None:
        """Return the next batch; None on all ranks if any was asked to stop or cannot read its data.

        So no rank begins a batch that others do not.
        """
        data: StepData | None = None
        failure = ""
        try:
            data = loader.next_step()
        except UserError as error:
            failure = str(error)
        flags = torch.tensor([bool(failure), self._stops.requested], dtype=torch.int32, device=self._run.backend.device)
        dist.all_reduce(flags)
        failed, asked = flags.tolist()
        if asked:
            self._stops.hear()
        if not failed:
            return None if asked else data
        told: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(told, failure)
        self._run.say(f"VALIDATION DATA CANNOT BE READ: {next(filter(None, told))}. Training goes on")
        return None

    def _tell(self, found: dict[str, Value], seconds: float, share: float) -> None:
        numbers = ((name, value) for name, value in found.items() if isinstance(value, float))
        parts = [f"{name} {value:.4f}" for name, value in numbers if name.startswith("validation/")]
        if len(parts) > _TOLD:
            parts = [part for part in parts if part.count("/") == 1]
        self._run.say(f"{', '.join(parts)} ({seconds:.1f} s, {share:.1%} of the time)")
        if share > DEAR and not self._said and self._interval:
            self._said = True
            self._run.say(f"validation takes {share:.1%} of the time: {cheaper(self._interval, share)}")


def fields(sums: list[float], names: tuple[str, ...], *, of_tokens: bool = True) -> dict[str, Value]:
    """Return loss and perplexity in all, and of each data set if there are several, from the sums over all samples.

    `sums` are those of losses and of trained tokens, in all, then the former of each data set, then the latter. A data
    set without trained tokens has no loss. Losses that are not `of_tokens` have no perplexity.
    """
    found = _loss("validation", *sums[:2]) | {"validation/trained_tokens": round(sums[1])}
    if not of_tokens:
        found = {"validation/loss": found["validation/loss"], "validation/pairs": round(sums[1])} if sums[1] else {}
    apart = zip(sums[2 : 2 + len(names)], sums[2 + len(names) :], strict=False)
    for name, (loss, tokens) in zip(names, apart, strict=False):
        found |= _loss(f"validation/{name}", loss, tokens)
    return found if of_tokens else {name: value for name, value in found.items() if not name.endswith("/perplexity")}


def _loss(name: str, loss: float, tokens: float) -> dict[str, Value]:
    if not tokens:
        return {}
    mean = loss / tokens
    return {f"{name}/loss": mean, f"{name}/perplexity": math.exp(min(mean, 700.0))}
