"""`StepHook`: a hook around each step. `Callback`: a hook that also receives the other events of a run.

Sinks, trackers and `--callback` are callbacks. Only rank 0 creates and calls them, in the training thread: a slow call
makes the step longer. They receive frozen events, whose values are for all ranks together. The hooks of training itself
(`train/hooks`) run on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from megavlm.config.schema import Config

Value = float | int | bool | str | None | Mapping[str, float | None]
Record = Mapping[str, Value]
State = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Start:
    """Event: a run starts, or resumes after `iteration`."""

    run_dir: Path
    config: Config  # resolved: defaults that depend on the model, the data and the device are filled in
    iteration: int  # the last finished iteration; 0 for a new run
    world: int  # number of ranks
    device: str  # name of the device: "CPU", "NVIDIA H100 80GB HBM3"

    @property
    def train_iters(self) -> int:
        """Return the last iteration of the run."""
        return self.config.train.train_iters


@dataclass(frozen=True)
class StepEnd:
    """Event: a step ended. `record` is its line of metrics.jsonl. A resumed run repeats steps after its checkpoint."""

    record: Record
    expert_loads: Mapping[int, Sequence[float]] = field(default_factory=dict)  # tokens of each expert, by layer

    @property
    def iteration(self) -> int:
        """Return the number of the step, from 1."""
        number = self.record["iteration"]
        assert isinstance(number, int)
        return number


@dataclass(frozen=True)
class Validation:
    """Event: the model was evaluated on held-out data after `iteration`, with `scores` by name (`validation/loss`)."""

    iteration: int
    scores: Mapping[str, float | None]


@dataclass(frozen=True)
class Generation:
    """The model's answer to a held-out prompt; `label` is the name of the prompt.

    `images` are the prompt's images: arrays [height, width, 3] of bytes, at most 448 pixels on a side.
    """

    prompt: str
    answer: str
    reference: str = ""
    images: Sequence[Any] = ()
    label: str = ""


@dataclass(frozen=True)
class Samples:
    """Event: the model answered held-out prompts after `iteration`; 0: before the first step."""

    iteration: int
    generations: Sequence[Generation]


@dataclass(frozen=True)
class Saved:
    """Event: the checkpoint of `iteration` is complete. It is written in the background: later steps may have ended."""

    iteration: int
    folder: Path
    seconds: float  # for writing the checkpoint


@dataclass(frozen=True)
class Stop:
    """Event: the run ends after `iteration`: finished, stopped on request (the same command resumes it), or failed."""

    iteration: int
    state: State
    reason: str | None = None


StepT = TypeVar("StepT", bound=StepEnd, contravariant=True)


class StepHook(Generic[StepT]):
    """Base class of hooks around a step. Its methods do nothing: a subclass overrides the methods that it needs."""

    def on_step_begin(self, iteration: int) -> None: ...

    def on_step_end(self, step: StepT) -> None: ...


class Callback(StepHook[StepEnd]):
    """Base class of callbacks. Its methods do nothing: a subclass overrides those that it needs. `on_stop` comes last.

    A method may raise `megavlm.errors.Stopped("reason")`: the run then saves a checkpoint and stops, as on a stop
    request. Any other exception of a user's callback ends the run in the same order, with exit status 2.
    """

    def on_start(self, start: Start) -> None: ...

    def on_validation(self, validation: Validation) -> None: ...

    def on_samples(self, samples: Samples) -> None: ...

    def on_save(self, saved: Saved) -> None: ...

    def on_stop(self, stop: Stop) -> None: ...
