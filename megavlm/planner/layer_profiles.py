"""Times and bytes of every layer as prefix sums, so that two entries give the sum over any chunk of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megavlm.arch.kinds import adapter_parameters, carried_bytes, hidden_bytes, kind_in, waiting_bytes
from megavlm.arch.layers import LANGUAGE_LAYER, VISION_LAYER, is_merged, kind_of, number_of
from megavlm.arch.scenario import Recompute, Scenario
from megavlm.arch.schedules import Durations, PipelineShape
from megavlm.arch.workload import attends_in_windows
from megavlm.config.derived import attends_in_window
from megavlm.config.lora_config import ROUTED_EXPERTS
from megavlm.planner.cost import recomputed, seconds_once, transfer_seconds
from megavlm.planner.hardware import Hardware
from megavlm.planner.memory import kept_bytes, model_state_bytes, transient_bytes

Array = np.ndarray
Each = Callable[[Callable[[str], Any]], list[Any]]  # measures layers by name, each kind once


@dataclass(frozen=True)
class LayerProfiles:
    """Seconds and bytes per micro-batch of the layers of a pipeline that begins at the model's layer `first`.

    Arrays are prefix sums [layers + 1], but for `transient` and `transfer`.
    """

    scenario: Scenario
    recompute: Recompute
    first: int
    forward: Array  # seconds of the device
    backward: Array
    launch: Array  # seconds of the host for a forward pass; 0 on a CPU, which launches nothing
    launch_back: Array
    weight: Array  # seconds of the device for weight gradients that may be deferred; part of the backward pass
    weight_launch: Array  # seconds of the host for deferred weight gradients
    waiting: Array  # bytes that one micro-batch keeps for deferred weight gradients
    model_state: Array  # bytes
    saved: Array  # bytes of one micro-batch on the device
    transient: Array  # [layers] bytes
    transfer: Array  # [layers + 1] seconds to send each layer's input; 0 at both ends
    stages: tuple[LayerProfiles, ...] = ()  # the same layers on each pipeline rank's own device; (): equal devices

    @property
    def count(self) -> int:
        return len(self.forward) - 1

    def sides(self, *, splits: bool = False) -> tuple[Array, Array, Array, Array]:
        """Return prefix sums of seconds: the device's forward and backward, then the host's. If it `splits`, backward
        leaves out deferred weight gradients.
        """
        backward, launch_back = self.backward - splits * self.weight, self.launch_back - splits * self.weight_launch
        return self.forward, backward, self.launch, launch_back

    def of_rank(self, rank: int) -> LayerProfiles:
        """Return the layers on the device of a pipeline rank."""
        return self.stages[rank] if self.stages else self

    def waits(self) -> Array:
        """Return [i, j]: seconds of a separate pass for the weight gradients of layers i … j−1."""
        return np.maximum(spans(self.weight), spans(self.weight_launch))

    def chunk_seconds(self, *, pp: int, splits: bool = False) -> Array:
        """Return [i, j]: seconds of both passes of a chunk of layers i … j−1; of a single stage, for all micro-batches
        but the first.
        """
        forward, backward, issue, issue_back = self.sides(splits=splits)
        if pp == 1:
            return np.maximum(spans(forward + backward), spans(issue + issue_back))
        return relays(issue, forward) + relays(backward, issue_back)

    def durations(
        self, chunks: Sequence[tuple[int, int]], transfer: Sequence[float], *, shape: PipelineShape
    ) -> Durations:
        """Return the seconds of each pass of each chunk. If weight gradients have separate passes, the first chunk's
        take no time.
        Where stages exchange tensors, the host waits for them and begins each pass together with the device. On a
        single stage it does so once a step; in later passes the host is ahead, unless launching takes longer than
        computing on the whole.
        """
        passes = [
            self.of_rank(index % shape.pp)._passes(a, b, shape, splits=shape.splits_backward and index > 0)
            for index, (a, b) in enumerate(chunks)
        ]
        forward, backward, weight = (np.stack(each) for each in zip(*passes, strict=True))
        return Durations(forward, backward, weight=weight, transfer=transfer)

    def _passes(self, a: int, b: int, shape: PipelineShape, *, splits: bool) -> tuple[Array, Array, Array]:
        """Return seconds [micro-batches] of layers a … b−1: forward, backward, and deferred weight gradients (0 unless
        the chunk `splits`).
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


def least_work(seconds: Sequence[Array], *, pp: int, splits: bool = False) -> float:
    """Return a lower bound of the seconds that all passes of a micro-batch take, summed over `pp` pipeline ranks.

    `seconds` are those of `LayerMeasures.seconds`. With `splits`, backward passes leave out deferred weight gradients.
    """
    forward, backward, issue, issue_back, weight, weight_launch = (float(each[-1]) for each in seconds)
    backward, issue_back = backward - splits * weight, issue_back - splits * weight_launch
    if pp == 1:
        return max(forward + backward, issue + issue_back)
    return max(forward, issue) + max(backward, issue_back)


def relay(ahead: Array, behind: Array) -> float:
    """Return the seconds of a pass that host and device begin together, from the prefix sums of their layers.

    A layer begins on the device when the one before it has ended and the host has issued it. So a pass ends when the
    host has issued all up to some layer and the device has run that one and all that follow: the latest such layer
    counts. Forward, `ahead` is the host and `behind` the device; backward, which begins with the last layer, the
    device's layers are the first of the list and the host's the last. Both are [layers + 1].
    """
    return float(behind[-1] - ahead[0] + (ahead[1:] - behind[:-1]).max())


def relays(ahead: Array, behind: Array) -> Array:
    """Return [i, j > i]: `relay` of layers i … j−1."""
    found, count = spans(behind), len(behind) - 1
    rising = np.tri(count, dtype=bool).T
    latest = np.maximum.accumulate(np.where(rising, ahead[None, 1:] - behind[None, :-1], -np.inf), axis=1)
    found[:-1, 1:] = behind[None, 1:] - ahead[:-1, None] + latest
    return found


def layer_profiles(
    scenario: Scenario, hardware: Hardware, *, recompute: Recompute = "none", first: int = 0
) -> LayerProfiles:
    """Return the seconds and bytes of a scenario's layers from `first` on, without a cache."""
    return LayerMeasures(hardware).profiles(scenario, recompute=recompute, first=first)


class LayerMeasures:
    """Cache of layer arrays of one configuration on one device. Each array is computed once for all layouts in which it
    is the same: its key holds the settings on which it depends.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._known: dict[tuple[object, ...], Any] = {}

    def profiles(self, scenario: Scenario, *, recompute: Recompute, first: int) -> LayerProfiles:
        """Return the seconds and bytes of a scenario's layers from `first` on."""
        part, dims = _part(scenario), scenario.dims
        forward, backward, launch, launch_back, weight, weight_launch = self.seconds(
            scenario, recompute=recompute, first=first
        )
        kept = (recompute, scenario.sharding, dims.dp, dims.pp > 1, scenario.offload)
        return LayerProfiles(
            scenario=scenario,
            recompute=recompute,
            first=first,
            forward=forward,
            backward=backward,
            launch=launch,
            launch_back=launch_back,
            weight=weight,
            weight_launch=weight_launch,
            waiting=self._sums("waiting", scenario, first, part, lambda n: waiting_bytes(n, scenario)),
            model_state=self.model_state(scenario, first=first),
            saved=self.saved(scenario, recompute=recompute, first=first),
            transient=self._once(
                ("transient", first, part, kept),
                lambda: np.array(self._each(scenario, first)(lambda n: transient_bytes(n, scenario, recompute))),
            ),
            transfer=self._once(
                ("transfer", first, part, dims.pp > 1, dims.dp), lambda: self._transfer(scenario, first)
            ),
        )

    def model_state(self, scenario: Scenario, *, first: int) -> Array:
        """Return the prefix sums of `LayerProfiles.model_state`."""
        dims = scenario.dims
        key = (dims.tp, dims.cp, dims.dp, dims.ep, dims.etp, scenario.sharding, scenario.offload)
        return self._sums("state", scenario, first, key, lambda n: model_state_bytes(n, scenario).total)

    def saved(self, scenario: Scenario, *, recompute: Recompute, first: int) -> Array:
        """Return the prefix sums of `LayerProfiles.saved`."""
        key = (*_part(scenario), recompute)
        return self._sums("saved", scenario, first, key, lambda n: kept_bytes(n, scenario, recompute))

    def seconds(self, scenario: Scenario, *, recompute: Recompute, first: int) -> list[Array]:
        """Return the six prefix sums of seconds, in the order of the fields of `LayerProfiles`."""
        model, hardware = scenario.model, self._hardware
        part = (*_part(scenario), scenario.shards_gradients, scenario.dims.order == "zb-h1")

        def of_layer(name: str) -> tuple[float, ...]:
            shared = kind_in(model, name).expert_parameters(model, 1) > 0  # or else no EP and ETP matter
            key = ("once", _kind(scenario, scenario.names.index(name)), *(part if shared else (None, *part[1:])))
            once = self._once(key, lambda: seconds_once(name, scenario, hardware))
            found = recomputed(name, scenario, hardware, recompute, once=once)
            return found.forward, found.backward, *found.launch, *found.weight

        def table() -> list[Array]:
            return [_prefix(column) for column in zip(*self._each(scenario, first)(of_layer), strict=True)]

        return self._once(("seconds", first, part, recompute), table)

    def _transfer(self, scenario: Scenario, first: int) -> Array:
        carried = carried_bytes(scenario)[first + 1 : -1]
        sizes = self._each(scenario, first)(lambda n: hidden_bytes(n, scenario))[1:]
        sends = [
            transfer_seconds(size + more, scenario, self._hardware) for size, more in zip(sizes, carried, strict=True)
        ]
        return np.array([0.0, *sends, 0.0])

    def _sums(
        self, what: str, scenario: Scenario, first: int, key: tuple[object, ...], measure: Callable[[str], float]
    ) -> Array:
        return self._once((what, first, key), lambda: _prefix(self._each(scenario, first)(measure)))

    def _each(self, scenario: Scenario, first: int) -> Each:
        return self._once(("each", first), lambda: measured_once(scenario, range(first, len(scenario.names))))

    def _once(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def _part(scenario: Scenario) -> tuple[object, ...]:
    """Return a cache key of a layer's pass: a rank's share of the micro-batch and of the layer."""
    dims, work = scenario.dims, tuple(vars(scenario.work).values())
    split = (dims.tp, dims.cp, dims.cp_groups, scenario.sequence_parallel)
    return (dims.ep, dims.etp), work, split, "activations" in scenario.offload


def measured_once(scenario: Scenario, places: Sequence[int]) -> Each:
    """Return a function that applies a measure to one layer of each kind and lists the values of all `places`."""
    kinds = [_kind(scenario, i) for i in places]
    examples = {kind: scenario.names[i] for kind, i in zip(reversed(kinds), reversed(places), strict=True)}

    def each(measure: Callable[[str], Any]) -> list[Any]:
        of_kind = {kind: measure(name) for kind, name in examples.items()}
        return [of_kind[kind] for kind in kinds]

    return each


def _kind(scenario: Scenario, index: int) -> tuple[object, ...]:
    """Return a key that is equal for layers of equal cost: kind, windows, merging, FP8 and gradients."""
    name = scenario.names[index]
    vision, language = scenario.model.vision, scenario.model.language
    return (
        kind_of(name),
        kind_in(scenario.model, name),
        kind_of(name) == VISION_LAYER and attends_in_windows(vision, number_of(name)),
        kind_of(name) == LANGUAGE_LAYER and attends_in_window(language, number_of(name)),
        is_merged(name, vision),
        scenario.trains(name),
        name in scenario.adapted,
        f"{name}.{ROUTED_EXPERTS}" in scenario.adapted,
        *(adapter_parameters(name, each) for each in scenario.layouts),
        scenario.gradient_reaches[index],
        name in scenario.fp8,
    )


def spans(prefix: Array) -> Array:
    """Return [i, j]: the sum over layers i … j−1, from prefix sums."""
    return prefix[None, :] - prefix[:, None]


def _prefix(values: Sequence[float]) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])
