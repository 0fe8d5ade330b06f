"""What an optimizer keeps of each layer, and what Muon's orthogonalisation takes (`optim/muon.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from megavlm.arch.kinds import kind_in
from megavlm.arch.matrices import HiddenWeight, orthogonalization_flops
from megavlm.arch.scenario import Scenario
from megavlm.planner.collectives import all_to_all, group_of
from megavlm.planner.hardware import Hardware

ROUND = 2**24  # elements of matrices that a rank has at a time, unless one is larger
_COPIES = 4  # of them: arrived, assembled, together, and in the steps (measured, `tests/dist/test_memory.py`)


def kept_numbers(name: str, layout: Scenario, count: float) -> float:
    """Return how many numbers an optimizer keeps of `count` trained parameters of a layer that a rank holds, beside
    their fp32 weights: moments and averages. `layout` is one of `Scenario.layouts`.
    """
    moments = count * (1 if layout.optimizer == "lion" else 2)
    if layout.optimizer == "muon":
        moments -= sum(weight.size for weight in _weights(name, layout)) / layout.dims.tp
    return moments + count * layout.averages


def orthogonalization_seconds(names: Sequence[str], scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds that the ranks of a stage with these layers take for its matrices, of which each has its
    share, and for their two exchanges; 0 without Muon.
    """
    shapes = _shapes(names, scenario)
    if not shapes:
        return 0.0
    ranks = scenario.dims.tp * scenario.dims.dp_cp
    flops = [orthogonalization_flops(*shape, scenario.muon_steps) for shape in shapes]
    size = scenario.muon_bytes * sum(rows * columns for rows, columns in shapes) / ranks
    travel = 2 * all_to_all(size, group_of(hardware, ranks, span=ranks))
    return max(sum(flops) / ranks, *flops) / hardware.forward.matmul + travel


def orthogonalization_bytes(names: Sequence[str], scenario: Scenario) -> float:
    """Return the bytes that a rank needs while it updates matrices, beside what it keeps; 0 without Muon."""
    sizes = [rows * columns for rows, columns in _shapes(names, scenario)]
    if not sizes:
        return 0.0
    ranks = scenario.dims.tp * scenario.dims.dp_cp
    return _COPIES * scenario.muon_bytes * max(*sizes, min(ROUND, sum(sizes) / ranks))


def _shapes(names: Sequence[str], scenario: Scenario) -> list[tuple[int, int]]:
    if scenario.optimizer != "muon":
        return []
    trained = (name for name in names if scenario.trains(name))
    weights = (kind_in(scenario.model, name).hidden_weights(scenario.model).values() for name in trained)
    return [shape for held in weights for weight in held for shape in weight.shapes()]


def _weights(name: str, layout: Scenario) -> list[HiddenWeight]:
    weights = kind_in(layout.model, name).hidden_weights(layout.model).values()
    return [weight for weight in weights if bool(weight.experts) == layout.experts_alone]
