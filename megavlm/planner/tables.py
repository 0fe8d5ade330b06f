"""Times and bytes of every layer as arrays, so that any chunk's are the difference of two prefix sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from megavlm.model.flops import attends_in_windows
from megavlm.planner.activations import hidden_bytes
from megavlm.planner.case import Case, Recompute
from megavlm.planner.cost import carried_bytes, layer_seconds, transfer_seconds
from megavlm.planner.hardware import Hardware
from megavlm.planner.layers import VISION_LAYER
from megavlm.planner.memory import kept_bytes, standing, transient_bytes

Array = np.ndarray
Each = Callable[[Callable[[str], Any]], list[Any]]


@dataclass(frozen=True)
class Mode:
    """What depends on a chunk's recomputation: per layer, except `backward` and `saved`, which are prefix sums."""

    backward: Array  # [layers + 1] seconds
    saved: Array  # [layers + 1] bytes of one micro-batch on the device
    transient: Array  # [layers] bytes


@dataclass(frozen=True)
class LayerTables:
    """The layers of a pipeline that begins at layer `first` of the model's list, for one micro-batch."""

    case: Case
    first: int
    forward: Array  # [layers + 1] prefix sums, seconds
    standing: Array  # [layers + 1] prefix sums, bytes
    transfer: Array  # [layers + 1] seconds of what enters each layer; 0 at both ends
    modes: dict[Recompute, Mode]

    @property
    def count(self) -> int:
        return len(self.forward) - 1


def layer_tables(
    case: Case, hardware: Hardware, *, modes: Sequence[Recompute] = ("none", "selective", "full"), first: int = 0
) -> LayerTables:
    """Tables of `case`'s layers from `first` on."""
    places = range(first, len(case.names))
    each = measured_once(case, places)
    carried = [carried_bytes(case, i) for i in places][1:]
    sizes = [size + more for size, more in zip(each(lambda n: hidden_bytes(n, case))[1:], carried, strict=True)]
    sends = [transfer_seconds(size, case, hardware) for size in sizes]
    return LayerTables(
        case=case,
        first=first,
        forward=_prefix(each(lambda n: layer_seconds(n, case, hardware).forward)),
        standing=_prefix(each(lambda n: standing(n, case).total)),
        transfer=np.array([0.0, *sends, 0.0]),
        modes={mode: _mode(mode, case, hardware, each) for mode in modes},
    )


def sharded(tables: LayerTables, case: Case) -> LayerTables:
    """The same layers where `case` keeps their state elsewhere (other ranks, the host): other bytes, the same times."""
    each = measured_once(case, range(tables.first, len(case.names)))
    modes = {
        mode: replace(values, transient=np.array(each(partial(transient_bytes, case=case, recompute=mode))))
        for mode, values in tables.modes.items()
    }
    return replace(tables, case=case, standing=_prefix(each(lambda n: standing(n, case).total)), modes=modes)


def measured_once(case: Case, places: Sequence[int]) -> Each:
    """A function that measures layers by name, each kind of them once, and gives the values of all of `places`."""
    kinds = [_kind(case, i) for i in places]
    examples = {kind: case.names[i] for kind, i in zip(reversed(kinds), reversed(places), strict=True)}

    def each(measure: Callable[[str], Any]) -> list[Any]:
        of_kind = {kind: measure(name) for kind, name in examples.items()}
        return [of_kind[kind] for kind in kinds]

    return each


def _mode(mode: Recompute, case: Case, hardware: Hardware, each: Each) -> Mode:
    return Mode(
        backward=_prefix(each(lambda name: layer_seconds(name, case, hardware, mode).backward)),
        saved=_prefix(each(lambda name: kept_bytes(name, case, mode))),
        transient=np.array(each(lambda name: transient_bytes(name, case, mode))),
    )


def _kind(case: Case, index: int) -> tuple[object, ...]:
    """Layers of one kind cost the same: numbers do not matter, windows and what is trained do."""
    name = case.names[index]
    stem, _, number = name.rpartition(".")
    windowed = name.startswith(VISION_LAYER) and attends_in_windows(case.model.vision, int(number))
    return (
        stem if number.isdigit() else name,
        windowed,
        case.trains(name),
        case.gradient_reaches[index],
        name in case.fp8,
    )


def _prefix(values: Sequence[float]) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])
