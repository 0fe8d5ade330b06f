"""End a run that hangs, from rendezvous on, and report slow ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from megavlm.config.option import data_kind
from megavlm.config.schema import Config
from megavlm.data.workers import ATTEMPTS
from megavlm.metrics.callback import Value
from megavlm.parallel.rendezvous import Meeting
from megavlm.resilience import events
from megavlm.resilience.hang_reports import Limits, SlowEvents, memory_by_stage, spread
from megavlm.resilience.phases import END, START, Phases, StartTimes
from megavlm.resilience.watchdog import RunMember, Watchdog
from megavlm.train.hooks.hook import RankHook, Step


class Watch(RankHook):
    """Watches the progress in `phases` until `close`. Every rank creates it right after rendezvous."""

    def __init__(
        self,
        config: Config,
        phases: Phases,
        meeting: Meeting,
        times: StartTimes,
        *,
        memory: Callable[[], int],
        energy: Callable[[], float | None],
        on_gpu: bool,
    ) -> None:
        """`memory` returns the most bytes that this rank has used so far, `energy` the joules of its GPU."""
        self.phases, self._times = phases, times
        member = RunMember(meeting.rank, meeting.world, Path(config.run.run_dir), wait_spins=on_gpu)
        self._watchdog = Watchdog(phases, member, _own_store(meeting), limits=_limits(config), memory=memory)
        self._stages = config.parallel.pipeline_model_parallel_size
        self._energy, self._steps = energy, 0
        self._spent: tuple[int, float | None] = 0, None  # steps of this process, and joules by then
        self._says = meeting.rank == 0
        self._interval = config.logging.log_interval
        self._before = self._watchdog.table
        self._slow = SlowEvents()
        self._run_dir = member.run_dir
        self._watchdog.start()

    @property
    def peak_memory(self) -> int:
        """Return the peak memory of any rank in bytes, from the latest reports; 0 on ranks that read no reports."""
        return max((report.peak_memory for report in self._watchdog.table.values()), default=0)

    def starting(self, part: str) -> None:
        """Enter a part of the start (`PARTS`)."""
        self.phases.enter(START, part)
        self._times.enter(part)

    def owns_folder(self) -> None:
        """Allow writes of a hang and of the parts of the start to the run folder, which is now locked."""
        self._watchdog.owns_folder = True
        if self._says:
            self._times.run_dir = self._run_dir

    def on_step_begin(self, iteration: int) -> None:
        """Begin a step."""
        self._times.enter("first_step")
        self.phases.begin_step(iteration)

    def measure(self, step: Step) -> dict[str, Value]:
        """Note a step; return the time split of ranks for its record: {} if nothing is new, or not on rank 0."""
        self.phases.end_step()
        self._watchdog.step_done(step.seconds)
        self._steps += 1
        self._times.first_step_done(step.iteration, waited=cast(float, step.record["data_time_s"]))
        if step.iteration % self._interval:
            return {}
        self._watchdog.energy = self._step_energy()
        if not self._says:
            return {}
        after = self._watchdog.table
        found = spread(self._before, after)
        if found is not None or not self._before or not all(report.steps for report in self._before.values()):
            self._before = after
        if found is None:
            return {}
        if self._slow.wants(found, time.monotonic()):
            _record(self._run_dir, step.iteration, found)
        if self._stages > 1:
            found["stage_memory_gib"] = memory_by_stage(after, self._stages)
        told = [report.energy for report in after.values() if report.energy is not None]
        if len(told) == len(after):
            found["energy_j"] = sum(told)
        return found

    def _step_energy(self) -> float | None:
        """Return the joules of a step of this rank's GPU, as a mean since the last call."""
        (steps, before), after = self._spent, self._energy()
        self._spent = self._steps, after
        return None if before is None or after is None else (after - before) / (self._steps - steps)

    def ending(self) -> None:
        """Enter the phase in which this rank ends."""
        self.phases.enter(END)

    def close(self) -> None:
        self._watchdog.close()


def _limits(config: Config) -> Limits:
    files = data_kind(config) == "files"
    return Limits(
        hang=config.run.hang_timeout,
        # Workers are replaced until the data themselves end the run. A process that reads by itself may take longer.
        data=ATTEMPTS**2 * config.data.worker_timeout + 60 if files else 0.0,
        collective=60 * config.parallel.distributed_timeout_minutes,
    )


def _record(run_dir: Path, iteration: int, found: Mapping[str, Any]) -> None:
    own, excess = found["slowest_rank_s"], found["slowest_rank_excess"]
    events.record(
        run_dir,
        "slow",
        iteration=iteration,
        seconds=round(own - own / (1 + excess), 3),
        reason=found["slow"],
        slow_rank=found["slowest_rank"],
        phase=found["slowest_rank_phase"],
        excess=round(excess, 3),
    )


def _own_store(meeting: Meeting) -> Any:
    """Return a connection to the run's store for one thread, with keys that no earlier run of these processes has."""
    given: Any = meeting.store  # torch's types lack some methods
    number = meeting.store.add(f"watch/runs-of-rank-{meeting.rank}", 1)
    return dist.PrefixStore(f"watch/{number}", given.clone())
