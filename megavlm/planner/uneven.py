"""Micro-batches that differ: what those of a layout hold, and how long each of them takes in each layer.

A micro-batch's seconds in a layer are its FLOPs and bytes over rates, which grow in proportion to patches, tokens and
their squares: an affine function of its work. So few evaluations of the cost model, at the mean micro-batch and at each
of its quantities alone grown to the largest there is, give the seconds of all; where collectives change their way with
size, they lie on the straight line between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megavlm.arch.layers import EMBEDDING, OUTPUT
from megavlm.arch.packing import of_micro_batches, of_ranks
from megavlm.arch.scenario import Recompute, Scenario
from megavlm.arch.workload import FIELDS, Array, DataWindow, Workload, as_workload
from megavlm.planner.cost import seconds_by_mode
from megavlm.planner.hardware import Hardware

Each = Callable[[Callable[[str], Any]], list[Any]]
_VISION = ("patches", "patch_squares", "window_squares", "features")
_TEXT = ("tokens", "token_squares", "sliding_squares", "features")
# What the layers of the tower and projector, of the language model, and the output layer read. One evaluation moves a
# quantity of each: no layer reads two of them.
_READ = (_VISION, _TEXT, (*_TEXT[:3], "trained_tokens"))


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """The work of a layout's micro-batches in each step of a window, on one context-parallel rank."""

    work: Array  # [FIELDS, micro-batches, steps, replicas]
    images: Array  # [micro-batches, steps, replicas]
    heaviest: Array  # [steps]: the replica with the most FLOPs, of those that a pipeline computes

    @cached_property
    def of_heaviest(self) -> Array:
        """[FIELDS, micro-batches, steps]: the work of the heaviest replica of each step."""
        return self.work[..., np.arange(len(self.heaviest)), self.heaviest]

    @cached_property
    def mean(self) -> Workload:
        """Return the work of a micro-batch of the heaviest replicas in the mean."""
        return as_workload(self.of_heaviest.mean(axis=(1, 2)))

    @cached_property
    def largest(self) -> Workload:
        """Return the most that a micro-batch has of each quantity."""
        return as_workload(self.work.max(axis=(1, 2, 3)))

    @cached_property
    def least_share(self) -> float:
        """Return the work of the first and of the last micro-batch of a step over the mean one's: the least share of
        all quantities, at most 1.
        """
        mean = self.of_heaviest.mean(axis=(1, 2))
        ends = self.of_heaviest[:, [0, -1]].mean(axis=2).min(axis=1)
        return float(np.min(ends[mean > 0] / mean[mean > 0], initial=1.0))


def micro_batches(window: DataWindow, *, dp: int, cp: int, size: int, colocated: bool) -> MicroBatches:
    """Return the micro-batches of `size` sequences that `dp` replicas have, as the program assigns them.

    Context-parallel ranks share positions, and images by their number; the encoder of `colocated` shares them
    otherwise.
    """
    count = window.work.shape[1]
    chosen = []  # [steps][replicas][micro-batches][size]
    for flops in window.flops:
        costs = flops if window.balances else None
        chosen.append([of_micro_batches(own, size, costs) for own in of_ranks(count, dp, size, costs)])
    places = np.array(chosen)
    of_step = np.arange(window.steps)[:, None, None, None]
    packed = (window.samples[of_step, places] > 1).any(axis=3)[..., None]
    whole, apart = (window.computed(packed=each)[of_step, places].sum(axis=3) for each in (False, True))
    total, shown = np.where(packed, apart, whole), window.images[of_step, places].sum(axis=3)
    # of_context_part's arithmetic, for each micro-batch
    share = np.ones(len(FIELDS))
    share[[FIELDS.index(name) for name in FIELDS if name not in _VISION]] = 1 / cp
    total = total * share
    if not colocated and cp > 1:
        dealt = np.ceil(shown / cp) / np.maximum(shown, 1)
        for name in _VISION:
            total[..., FIELDS.index(name)] *= dealt
    load = window.flops[of_step, places].sum(axis=(2, 3))[..., colocated:].sum(axis=-1)
    return MicroBatches(total.transpose(3, 2, 0, 1), shown.transpose(2, 0, 1), load.argmax(axis=1))


def encoder_works(batches: MicroBatches) -> tuple[tuple[Workload, int], tuple[Workload, int]]:
    """Return the work and the images of a micro-batch in the mean over the replica with the most patches: of each step,
    in the mean, and of the step that has the most. A colocated encoder has all images of a step at once.
    """
    patches = FIELDS.index("patches")
    work, images = batches.work.mean(axis=1), batches.images.mean(axis=0)  # [FIELDS, steps, replicas]
    steps = np.arange(work.shape[1])
    most = work[patches].argmax(axis=1)
    work, images = work[:, steps, most], images[steps, most]
    step = int(work[patches].argmax())
    return (as_workload(work.mean(axis=1)), round(images.mean())), (as_workload(work[:, step]), round(images[step]))


@dataclass(frozen=True, eq=False)
class UnevenSeconds:
    """Seconds of the device that each micro-batch takes in each layer of a pipeline."""

    scenario: Scenario  # whose work is that of the mean micro-batch
    hardware: Hardware
    batches: MicroBatches
    places: Sequence[int]  # of the layers in the model's list
    each: Each  # measures layers by name, each kind once
    modes: Sequence[Recompute]

    def of_heaviest(self, which: str, micro: slice) -> Array:
        """[layers + 1]: prefix sums of the heaviest replicas' seconds in these micro-batches, in the mean. `which` is
        `forward`, `weight` or a mode, whose backward passes are meant.
        """
        steps = np.arange(len(self.batches.heaviest))
        found: Array = self.prefixes[which][:, micro, steps, self.batches.heaviest].mean(axis=(1, 2))
        return found

    @cached_property
    def prefixes(self) -> dict[str, Array]:
        """[layers + 1, micro-batches, steps, replicas]: prefix sums of seconds: forward, of weight gradients that may
        wait, and backward for each mode.
        """
        work = np.stack([getattr(self.scenario.work, name) for name in FIELDS]).astype(float)
        spread = self.batches.work.max(axis=(1, 2, 3)) - work
        base, moved = self._evaluated(self.scenario.work), list[Any]()
        for names in zip(*_READ, strict=True):
            more = {name: getattr(self.scenario.work, name) + max(0, int(spread[FIELDS.index(name)])) for name in names}
            grown = replace(self.scenario.work, **more)
            moved.append(None if grown == self.scenario.work else self._evaluated(grown))
        first, last = self.scenario.names.index(EMBEDDING), self.scenario.names.index(OUTPUT)
        kinds = np.array([(place >= first) + (place >= last) for place in self.places])
        found = {}
        for name, seconds in base.items():
            every = np.repeat(seconds[:, None], np.prod(self.batches.work.shape[1:]), axis=1)
            for kind, read in enumerate(_READ):
                rows = kinds == kind
                for field, more in zip(read, moved, strict=True):
                    at = FIELDS.index(field)
                    if more is not None and int(spread[at]) > 0:
                        far = (self.batches.work[at].ravel() - work[at]) / int(spread[at])
                        every[rows] += (more[name] - seconds)[rows][:, None] * far
            summed = np.cumsum(np.maximum(every, 0.0), axis=0)
            found[name] = np.concatenate([np.zeros_like(summed[:1]), summed]).reshape(-1, *self.batches.work.shape[1:])
        return found

    def _evaluated(self, work: Workload) -> dict[str, Array]:
        """Return [layers] seconds of a micro-batch of so much work: forward, of weight gradients, backward by mode."""
        scenario = replace(self.scenario, work=work)
        seconds = self.each(lambda name: seconds_by_mode(name, scenario, self.hardware, self.modes))
        ahead = [of_modes[self.modes[0]] for of_modes in seconds]
        return {
            "forward": np.array([each.forward for each in ahead]),
            "weight": np.array([each.weight[0] for each in ahead]),
            **{mode: np.array([of_modes[mode].backward for of_modes in seconds]) for mode in self.modes},
        }
