"""End a run on all ranks after the same step: a request to stop, too many skipped samples, data that cannot be read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megavlm.errors import BadNumbers, Stopped, UserError
from megavlm.inputs.bad_sample import Skipped, SkipSummary
from megavlm.metrics.callback import Value
from megavlm.parallel.rendezvous import of_all_ranks
from megavlm.resilience.phases import COMMUNICATION, DATA, OTHER
from megavlm.resilience.signals import StopRequest
from megavlm.train.hooks.hook import RankHook, Step
from megavlm.train.run import Run
from megavlm.train.step_result import Counts


class Stops(RankHook):
    """Tracks whether any rank was asked to stop, by the sums of each step; long operations check again."""

    def __init__(self, run: Run, stop: StopRequest) -> None:
        self._run, self._stop = run, stop
        self._known = False  # a request that all ranks know of since the sums of the last step

    @property
    def requested(self) -> bool:
        """Return whether this rank was asked to stop."""
        return self._stop.requested

    def asked(self, step: Step) -> bool:
        """Return whether all ranks know, after a step, that some rank was asked to stop."""
        return self._known or step.counts.stop > 0

    def note_request(self) -> None:
        """Note that some rank was asked to stop; all ranks must call this."""
        self._known = True

    def look(self, step: Step) -> None:
        """All-reduce the stop requests again, unless one is known already; every rank calls this."""
        if not self.asked(step):
            found = torch.tensor(int(self.requested), device=self._run.backend.device)
            dist.all_reduce(found)
            self._known = bool(found.item())

    def ends(self, step: Step) -> BaseException | None:
        """Return Stopped after a stop request, unless this was the last iteration."""
        if step.iteration == self._run.config.train.train_iters or not self.asked(step):
            return None
        own = self._stop.reason or self._run.callbacks.stop
        reasons = of_all_ranks(own)  # some rank has a reason, and perhaps not this one yet
        return Stopped(own or next(filter(None, reasons)))


# A run with at most this many skipped samples goes on, whatever their share.
_LEAST_SKIPPED = 20


class TooManySkipped(UserError):
    """More samples were skipped than `--max-bad-sample-rate` allows."""


@dataclass
class Tally:
    """Numbers of samples read and skipped, in the whole run and since its last start.

    Only the counts since the last start may end the run: the data may have been corrected before it.
    """

    read: int
    skipped: int
    read_now: int = 0
    skipped_now: int = 0
    reasons: SkipSummary = field(default_factory=SkipSummary)  # of the samples that this rank has read

    def add(self, counts: Counts, skipped: Sequence[Skipped]) -> None:
        """Add the counts of a step over all ranks, and the skipped samples of this rank."""
        self.read += int(counts.read)
        self.skipped += int(counts.skipped)
        self.read_now += int(counts.read)
        self.skipped_now += int(counts.skipped)
        self.reasons.add(skipped)


class SkippedSamples(RankHook):
    """Counts the samples read and skipped per step, and writes this rank's skipped samples to RUN_DIR/skipped. Warns of
    replicas that read different samples.
    """

    def __init__(self, run: Run, tally: Tally, *, keeps: Callable[[int], bool]) -> None:
        """`keeps` returns whether a checkpoint to resume from will exist if the run ends after an iteration."""
        self._run, self._tally, self._keeps = run, tally, keeps
        self._agreed = True  # whether all replicas have read the same samples

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Count the samples of a step, and write its skipped samples to the log."""
        self._tally.add(step.counts, step.data.skipped if self._run.engine.groups.is_reader else ())
        self._run.skipped.write(step.iteration, step.data.skipped)
        if self._agreed and not step.counts.agree(self._run.engine.groups.dims.dp):
            self._agreed = False
            self._run.say(
                f"warning: since iteration {step.iteration} model replicas read different samples, because some could "
                "not read what others read: look whether all machines see the same files, and start again"
            )
        return {}

    def ends(self, step: Step) -> BaseException | None:
        """Return an error if a larger share of the samples was skipped than the user allows."""
        tally, most = self._tally, self._run.config.data.max_bad_sample_rate
        if tally.skipped_now < _LEAST_SKIPPED or tally.skipped_now <= most * tally.read_now:
            return None
        found = of_all_ranks(tally.reasons)
        keeps = self._keeps(step.iteration)
        after = "continues, with --accept-changed-data if it changes the data" if keeps else "begins anew"
        return TooManySkipped(
            f"{tally.skipped_now} of {tally.read_now} samples were skipped, more than --max-bad-sample-rate {most}: "
            f"{SkipSummary().merged(found).message()}. {self._run.run_dir / 'skipped'} lists all; the corrected "
            f"command {after}"
        )


class DataAhead(RankHook):
    """Shares counts, stop requests and failures of the next data or of a save over ranks at the end of a step."""

    def __init__(self, run: Run, stop: StopRequest, *, bad_save: Callable[[], BadNumbers | None]) -> None:
        """`bad_save` returns BadNumbers on a rank with a report of a save whose state is not finite, else None."""
        self._run, self._stop, self._bad_save = run, stop, bad_save
        self._needed = False  # whether there is a next step
        self._late = False  # whether the data of the next step were not ready in time
        self._failure: BaseException | None = None
        self.waited = 0.0  # seconds for the next step's data

    def on_step_begin(self, iteration: int) -> None:
        """Reset the state for the data of the next step."""
        self._needed = iteration < self._run.config.train.train_iters
        self._failure, self.waited = None, 0.0

    def counters(self, counts: Counts) -> Sequence[float]:
        """Return the counters of a step with these counts, and share the next step's data if they are ready.

        The device is still computing meanwhile. Ranks of a replica wait for one another here.
        """
        loader = self._run.data_loader
        late = self._late = self._needed and not loader.is_ahead()
        if self._needed:
            self._failure = None if late else self._data_failure()
            loader.share_ahead(ready=not late and self._failure is None)
        self._failure = self._bad_save() or self._run.callbacks.failure or self._failure
        stop = self._stop.requested or self._run.callbacks.stop is not None
        return replace(counts, stop=stop, failed=self._failure is not None, late=late).values()

    def settled(self, counts: Counts) -> Counts:
        """Wait until the next data of all ranks are ready or failed, and return the sums; every rank calls it.

        `counts` are the sums of the step. No rank waits for data if the run is about to end.
        """
        if not counts.late or counts.stop or counts.failed:
            return counts
        phases, before = self._run.engine.schedule.phases, time.perf_counter()
        phases.enter(DATA, "next step")
        if self._late:  # else the loader may be at data after the next, which it has shared
            self._failure = self._data_failure()
        self.waited = time.perf_counter() - before
        phases.enter(COMMUNICATION, "failures of the next data")
        sums = torch.tensor([self._failure is not None, self._stop.requested], dtype=torch.int32)
        sums = sums.to(self._run.backend.device)
        dist.all_reduce(sums)
        failed, stop = sums.tolist()
        phases.enter(OTHER)
        return replace(counts, failed=failed, stop=stop)

    def error(self, counts: Counts) -> BaseException | None:
        """Return the error that must end the run, on all ranks; `counts` are the sums from `settled`.

        The error is BadNumbers on all ranks if it is BadNumbers on any.
        """
        if not counts.failed:
            return None
        bad = isinstance(self._failure, BadNumbers)
        failures = of_all_ranks(None if self._failure is None else (bad, str(self._failure)))
        errors = [each for each in failures if each is not None]
        for is_bad, text in errors:
            if is_bad:
                return BadNumbers(text)
        return self._failure or UserError(errors[0][1])

    def ends(self, step: Step) -> BaseException | None:
        """Return the error of a step, unless this was the last iteration."""
        return step.error if self._needed else None

    def _data_failure(self) -> BaseException | None:
        return self._run.data_loader.failure_ahead(unless=lambda: self._stop.requested)
