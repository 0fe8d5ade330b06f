"""Watch a run's steps: end it if it hangs, and say which rank is slow."""

from __future__ import annotations

import torch.distributed as dist

from megavlm.metrics.sinks import Value
from megavlm.resilience.phases import Phases
from megavlm.resilience.slow import Spread, spread
from megavlm.resilience.watchdog import Member, Watchdog
from megavlm.train.build import Run


class Watch:
    """Watches the steps that the training loop reports to it. Every rank makes one, and closes it at the end."""

    def __init__(self, run: Run) -> None:
        self.phases: Phases = run.engine.schedule.phases
        member = Member(rank=dist.get_rank(), world=dist.get_world_size(), run_dir=run.run_dir)
        self._watchdog = Watchdog(self.phases, member, _own_store(), timeout=run.config.run.hang_timeout)
        self._says = run.progress is not None
        self._interval = run.config.logging.log_interval
        self._before = self._watchdog.table
        self._watchdog.start()

    def begin_step(self, iteration: int) -> None:
        self.phases.begin_step(iteration)

    def end_step(self, iteration: int, seconds: float) -> dict[str, Value]:
        """Note a step; return what the record says of the ranks: nothing if there is no news, or not on rank 0."""
        self.phases.end_step()
        self._watchdog.step_done(seconds)
        if not self._says or iteration % self._interval:
            return {}
        after = self._watchdog.table
        found = spread(self._before, after)
        if found is not None or not self._before or not all(report.steps for report in self._before.values()):
            self._before = after
        return {} if found is None else _fields(found)

    def close(self) -> None:
        self._watchdog.close()


def _fields(found: Spread) -> dict[str, Value]:
    fields: dict[str, Value] = {
        "phase_seconds": dict(found.seconds),
        "slowest_rank": found.slowest,
        "slowest_rank_s": found.own,
        "slowest_rank_excess": found.excess,
        "slowest_rank_phase": found.phase,
    }
    if found.notable:
        fields["slow"] = found.words
    return fields


def _own_store() -> dist.Store:
    """Return a connection to the run's store for one thread, with keys that no earlier run of these processes has."""
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"watch/runs-of-rank-{dist.get_rank()}", 1)
    return dist.PrefixStore(f"watch/{number}", store.clone())  # type: ignore[attr-defined]
