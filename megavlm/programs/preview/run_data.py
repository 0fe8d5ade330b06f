"""Read what a run folder tells of a run: its options, metrics, events and device. Without torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.json_files import read_json
from megavlm.metrics.expert_loads import FILE
from megavlm.metrics.tags import tag_of
from megavlm.metrics.trackers import settings_of
from megavlm.programs.preview.account import devices_of, records_of
from megavlm.programs.preview.expert_loads import mean_loads
from megavlm.programs.preview.history import History, history_of
from megavlm.programs.preview.lines import Point
from megavlm.resilience.events import events, json_lines
from megavlm.rules.load import from_yaml_file

_LARGEST = 1e15  # larger values of a file are taken for damage
_WARM_UP = 2  # first steps, which are slower and count for no rate


@dataclass(frozen=True)
class RunData:
    """One run. `records` are the lines of metrics.jsonl, in order."""

    name: str
    records: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]  # all options by key; empty if config.yaml cannot be read
    device: str
    expert_loads: Mapping[str, Sequence[float]] = field(default_factory=dict)  # `expert_loads.mean_loads`

    @cached_property
    def history(self) -> History | None:
        """Return what the run's time went to; None if its events do not tell."""
        return history_of(self.events, self.records)

    @property
    def devices(self) -> int:
        """Return the number of ranks; 0 if it is not known."""
        return devices_of([event for event in self.events if event.get("kind") == "start"])

    @cached_property
    def axes(self) -> Mapping[str, Sequence[float]]:
        """Return where each record lies: its step, the tokens so far, and the hours of all steps so far."""
        return {
            "step": [float(record["iteration"]) for record in self.records],
            "tokens": list(accumulate(number(record.get("tokens")) or 0.0 for record in self.records)),
            "hours": [x / 3600 for x in accumulate(number(r.get("step_time_s")) or 0.0 for r in self.records)],
        }

    def points(self, name: str, *, across: str = "step") -> list[Point]:
        """Return a number of the records over one of the `axes`, where it is known."""
        values = [number(record.get(name)) for record in self.records]
        return [(x, y) for x, y in zip(self.axes[across], values, strict=True) if y is not None]

    def values(self, name: str) -> list[float]:
        """Return a number of all records that have it."""
        return [value for _, value in self.points(name)]

    def typical(self, name: str) -> float | None:
        """Return the median after the first steps."""
        found = self.values(name)
        return statistics.median(found[_WARM_UP:] or found) if found else None

    @property
    def validations(self) -> list[str]:
        """Return the names of the metrics that were measured on validation data."""
        names = {name for record in self.records for name in record}
        return sorted(name for name in names if tag_of(name).startswith("validation/") and self.values(name))


def number(value: object) -> float | None:
    """Return a value of a file as a finite number of a sane size; None for anything else."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


def read_run(folder: Path) -> RunData:
    """Read a run folder. Raises UserError if it has no metrics."""
    records = [record for record in records_of(folder) if number(record.get("iteration")) is not None]
    if not records:
        raise UserError(f"{folder} has no metrics.jsonl with steps: name the folder of a run")
    settings: Mapping[str, Any] = {}
    with suppress(UserError):  # written by a version with other options
        settings = settings_of(from_yaml_file(folder / "config.yaml"))
    environment: Mapping[str, Any] = {}
    with suppress(UserError):
        environment = read_json(folder / "environment.json")
    device, loads = str(environment.get("device", "unknown")), mean_loads(json_lines(folder / FILE))
    return RunData(folder.resolve().name, records, events(folder), settings, device, loads)


def differing(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Return the options that runs do not share, with the value of each; of a single run, those that it changed."""
    known = [run.settings for run in runs]
    base = known if len(runs) > 1 else [settings_of(Config()), *known]
    keys = [key for key in settings_of(Config()) if key not in ("run.run_dir", "logging.tracker_run_name")]
    unlike = [key for key in keys if any(each.get(key) != base[0].get(key) for each in base if each)]
    return {key: [each.get(key) for each in known] for key in unlike}
