"""Times and bytes of every layer as arrays, so that any chunk's are the difference of two prefix sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megavlm.arch.kinds import carried_bytes, hidden_bytes, kind_in, waiting_bytes
from megavlm.arch.layers import VISION_LAYER, is_merged, kind_of, number_of
from megavlm.arch.scenario import Recompute, Scenario
from megavlm.arch.schedules import Durations, PipelineShape
from megavlm.arch.workload import attends_in_windows
from megavlm.planner.cost import layer_seconds, transfer_seconds
from megavlm.planner.hardware import Hardware
from megavlm.planner.memory import kept_bytes, model_state_bytes, transient_bytes

Array = np.ndarray
Each = Callable[[Callable[[str], Any]], list[Any]]  # measures layers by name, each kind once


@dataclass(frozen=True)
class LayerProfiles:
    """The layers of a pipeline that begins at layer `first` of the model's list, for one micro-batch.

    Arrays are prefix sums [layers + 1], but for `transient` and `transfer`.
    """

    scenario: Scenario
    recompute: Recompute
    first: int
    forward: Array  # seconds of the device
    backward: Array
    launch: Array  # seconds of the host for a forward pass; 0 on a CPU, which launches nothing
    launch_back: Array
    weight: Array  # of the backward pass, what weight gradients take that may wait: seconds of the device
    weight_launch: Array  # the same of the host
    waiting: Array  # bytes that one micro-batch keeps for them
    model_state: Array  # bytes
    saved: Array  # bytes of one micro-batch on the device
    transient: Array  # [layers] bytes
    transfer: Array  # [layers + 1] seconds of what enters each layer; 0 at both ends
    stages: tuple[LayerProfiles, ...] = ()  # the same layers on each pipeline rank's own device; (): all have this one

    @property
    def count(self) -> int:
        return len(self.forward) - 1

    def sides(self, *, splits: bool = False) -> tuple[Array, Array, Array, Array]:
        """Prefix sums of seconds: the device's forward and backward, then the host's; backward without weight gradients
        that wait if it `splits`.
        """
        backward, launch_back = self.backward - splits * self.weight, self.launch_back - splits * self.weight_launch
        return self.forward, backward, self.launch, launch_back

    def of_rank(self, rank: int) -> LayerProfiles:
        """Return the layers on the device of a pipeline rank."""
        return self.stages[rank] if self.stages else self

    def waits(self) -> Array:
        """[i, j]: seconds of the weight gradients of layers i … j−1 in a pass of their own."""
        return np.maximum(spans(self.weight), spans(self.weight_launch))

    def least_work(self, *, pp: int, splits: bool = False) -> float:
        """Seconds that a micro-batch's passes take at least, added up over `pp` pipeline ranks; without those of weight
        gradients that wait if backward passes are split.
        """
        forward, backward, issue, issue_back = (float(side[-1]) for side in self.sides(splits=splits))
        if pp == 1:
            return max(forward + backward, issue + issue_back)
        return max(forward, issue) + max(backward, issue_back)

    def chunk_seconds(self, *, pp: int, splits: bool = False) -> Array:
        """[i, j]: seconds of both passes of a chunk of layers i … j−1; of a single stage, of all but the first."""
        forward, backward, issue, issue_back = self.sides(splits=splits)
        if pp == 1:
            return np.maximum(spans(forward + backward), spans(issue + issue_back))
        return relays(issue, forward) + relays(backward, issue_back)

    def durations(
        self, chunks: Sequence[tuple[int, int]], transfer: Sequence[float], *, shape: PipelineShape
    ) -> Durations:
        """Seconds of each pass of each chunk. Where gradients of weights have passes of their own, those of the first
        chunk are empty.

        Where stages exchange something the host waits for it, and begins each pass with the device. On a single stage
        it does so once a step; later passes find it ahead, unless launching takes longer than computing on the whole.
        """
        passes = [
            self.of_rank(index % shape.pp)._passes(a, b, shape, splits=shape.splits_backward and index > 0)
            for index, (a, b) in enumerate(chunks)
        ]
        forward, backward, weight = (np.stack(each) for each in zip(*passes, strict=True))
        return Durations(forward, backward, weight=weight, transfer=transfer)

    def _passes(self, a: int, b: int, shape: PipelineShape, *, splits: bool) -> tuple[Array, Array, Array]:
        """[micro-batches]: seconds of layers a … b−1: forward, backward, and of weight gradients that wait
        if the chunk `splits`.
        """
        forward, backward, issue, issue_back = (side[a : b + 1] for side in self.sides(splits=splits))
        ahead, back, waits = np.zeros((3, shape.micro_batches))
        ahead[:], back[:] = relay(issue, forward), relay(backward, issue_back)
        if shape.pp == 1:
            ahead[1:] = forward[-1] - forward[0]
            host = issue[-1] - issue[0] + issue_back[-1] - issue_back[0]
            back = np.maximum(backward[-1] - backward[0], host - ahead)
        if splits:
            waits[:] = max(self.weight[b] - self.weight[a], self.weight_launch[b] - self.weight_launch[a])
        return ahead, back, waits


def relay(ahead: Array, behind: Array) -> float:
    """Return the seconds of passes that host and device begin together, from the prefix sums of their layers.

    A layer begins on the device when the one before it has ended and the host has issued it. So a pass ends when the
    host has issued all up to some layer and the device has run that one and all that follow: the latest such layer
    counts. Forward, `ahead` is the host and `behind` the device; backward, which begins with the last layer, the
    device's layers are the first of the list and the host's the last. Both are [layers + 1].
    """
    return float(behind[-1] - ahead[0] + (ahead[1:] - behind[:-1]).max())


def relays(ahead: Array, behind: Array) -> Array:
    """[i, j > i]: `relay` of layers i … j−1."""
    found, count = spans(behind), len(behind) - 1
    rising = np.tri(count, dtype=bool).T
    latest = np.maximum.accumulate(np.where(rising, ahead[None, 1:] - behind[None, :-1], -np.inf), axis=1)
    found[:-1, 1:] = behind[None, 1:] - ahead[:-1, None] + latest
    return found


def layer_profiles(
    scenario: Scenario, hardware: Hardware, *, recompute: Recompute = "none", first: int = 0
) -> LayerProfiles:
    """Return the tables of a scenario's layers from `first` on."""
    each = measured_once(scenario, range(first, len(scenario.names)))
    carried = carried_bytes(scenario)[first + 1 : -1]
    sizes = [size + more for size, more in zip(each(lambda n: hidden_bytes(n, scenario))[1:], carried, strict=True)]
    sends = [transfer_seconds(size, scenario, hardware) for size in sizes]
    seconds = each(lambda n: layer_seconds(n, scenario, hardware, recompute))
    return LayerProfiles(
        scenario=scenario,
        recompute=recompute,
        first=first,
        forward=_prefix([s.forward for s in seconds]),
        backward=_prefix([s.backward for s in seconds]),
        launch=_prefix([s.launch[0] for s in seconds]),
        launch_back=_prefix([s.launch[1] for s in seconds]),
        weight=_prefix([s.weight[0] for s in seconds]),
        weight_launch=_prefix([s.weight[1] for s in seconds]),
        waiting=_prefix(each(lambda n: waiting_bytes(n, scenario))),
        model_state=_prefix(each(lambda n: model_state_bytes(n, scenario).total)),
        saved=_prefix(each(lambda n: kept_bytes(n, scenario, recompute))),
        transient=np.array(each(lambda n: transient_bytes(n, scenario, recompute))),
        transfer=np.array([0.0, *sends, 0.0]),
    )


def measured_once(scenario: Scenario, places: Sequence[int]) -> Each:
    """Return a function that measures layers by name, each kind once, and gives the values of all of `places`."""
    kinds = [_kind(scenario, i) for i in places]
    examples = {kind: scenario.names[i] for kind, i in zip(reversed(kinds), reversed(places), strict=True)}

    def each(measure: Callable[[str], Any]) -> list[Any]:
        of_kind = {kind: measure(name) for kind, name in examples.items()}
        return [of_kind[kind] for kind in kinds]

    return each


def _kind(scenario: Scenario, index: int) -> tuple[object, ...]:
    """Layers of one kind cost the same: numbers do not matter; windows, merging, attention and what is trained do."""
    name = scenario.names[index]
    vision = scenario.model.vision
    return (
        kind_of(name),
        kind_in(scenario.model, name),
        kind_of(name) == VISION_LAYER and attends_in_windows(vision, number_of(name)),
        is_merged(name, vision),
        scenario.trains(name),
        scenario.gradient_reaches[index],
        name in scenario.fp8,
    )


def spans(prefix: Array) -> Array:
    """[i, j]: the sum of layers i … j−1."""
    return prefix[None, :] - prefix[:, None]


def _prefix(values: Sequence[float]) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])
