"""`StepHook`: what happens around a step. `Callback`: a hook to which a run also tells what it has done.

Sinks, trackers and `--callback` are callbacks. Rank 0 alone makes and calls them, in the thread that trains: a call
that takes long makes the step longer. What they get is frozen, and says what holds for the whole run. The hooks of the
training itself (`train/hooks`) are on all ranks.
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
    """A run begins, or goes on after `iteration`."""

    run_dir: Path
    config: Config  # resolved: defaults that depend on the model, the data and the device are filled in
    iteration: int  # the last one that is done; 0 for a new run
    world: int  # number of ranks
    device: str  # its name: "CPU", "NVIDIA H100 80GB HBM3"

    @property
    def train_iters(self) -> int:
        """Return the last iteration of the run."""
        return self.config.train.train_iters


@dataclass(frozen=True)
class StepEnd:
    """A step has ended: `record` is its line of metrics.jsonl. A resumed run repeats steps after its checkpoint."""

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
    """The model was evaluated on held-out data after `iteration`: `scores` by name, such as `validation/loss`."""

    iteration: int
    scores: Mapping[str, float | None]


@dataclass(frozen=True)
class Generation:
    """What the model says to a held-out prompt, which `label` names.

    `images` are arrays [height, width, 3] of bytes: the prompt's, at most 448 pixels on a side.
    """

    prompt: str
    answer: str
    reference: str = ""
    images: Sequence[Any] = ()
    label: str = ""


@dataclass(frozen=True)
class Samples:
    """The model answered held-out prompts after `iteration`; 0: before the first step."""

    iteration: int
    generations: Sequence[Generation]


@dataclass(frozen=True)
class Saved:
    """The checkpoint of `iteration` is complete. It was written beside training: later steps may be done already."""

    iteration: int
    folder: Path
    seconds: float  # that writing it took


@dataclass(frozen=True)
class Stop:
    """The run ends after `iteration`: it has finished, was asked to stop (the same command goes on), or failed."""

    iteration: int
    state: State
    reason: str | None = None


StepT = TypeVar("StepT", bound=StepEnd, contravariant=True)


class StepHook(Generic[StepT]):
    """Does nothing around a step: a subclass overrides the methods that it needs."""

    def on_step_begin(self, iteration: int) -> None: ...

    def on_step_end(self, step: StepT) -> None: ...


class Callback(StepHook[StepEnd]):
    """Does nothing: a subclass overrides the methods that it needs. The last call is `on_stop`.

    A method may raise `megavlm.errors.Stopped("reason")`: the run then saves a checkpoint and stops, as it does when it
    is asked to. Any other exception of a user's callback ends the run in the same order, with exit status 2.
    """

    def on_start(self, start: Start) -> None: ...

    def on_validation(self, validation: Validation) -> None: ...

    def on_samples(self, samples: Samples) -> None: ...

    def on_save(self, saved: Saved) -> None: ...

    def on_stop(self, stop: Stop) -> None: ...
