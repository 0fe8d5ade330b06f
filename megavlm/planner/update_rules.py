"""What an update rule keeps of each layer, and what its updates of whole matrices take (`optim/matrices.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from megavlm.arch.kinds import kind_in
from megavlm.arch.matrices import ROUND, HiddenWeight
from megavlm.arch.scenario import Scenario
from megavlm.planner.collectives import all_to_all, group_of
from megavlm.planner.hardware import Hardware

_COPIES = 4  # of them: arrived, assembled, together, and in the update (measured, `tests/dist/test_memory.py`)


def state_numbers(scenario: Scenario) -> int:
    """Return how many numbers the rule keeps of a parameter that is updated element by element."""
    return len(scenario.optimizer.rule.elementwise.state)


def kept_numbers(name: str, layout: Scenario, count: float) -> float:
    """Return how many numbers an optimizer keeps of `count` trained parameters of a layer that a rank holds, beside
    their fp32 weights: state and averages. `layout` is one of `Scenario.layouts`.
    """
    options = layout.optimizer
    state = count * state_numbers(layout)
    if options.rule.matrix_cost is not None:
        fewer = state_numbers(layout) - len(options.rule.state)
        state -= fewer * sum(weight.size for weight in _weights(name, layout)) / layout.dims.tp
    return state + count * (options.ema_decay > 0)


def matrix_seconds(names: Sequence[str], scenario: Scenario, hardware: Hardware) -> float:
    """Return the seconds that the ranks of a stage with these layers take for its matrices, of which each has its
    share, and for their two exchanges; 0 with an elementwise rule.
    """
    cost, options, shapes = scenario.optimizer.rule.matrix_cost, scenario.optimizer, _shapes(names, scenario)
    if cost is None or not shapes:
        return 0.0
    ranks = scenario.dims.tp * scenario.dims.dp_cp
    flops = [cost.flops(options, *shape) for shape in shapes]
    size = cost.number_bytes(options) * sum(rows * columns for rows, columns in shapes) / ranks
    travel = 2 * all_to_all(size, group_of(hardware, ranks, span=ranks))
    return max(sum(flops) / ranks, *flops) / hardware.forward.matmul + travel


def matrix_bytes(names: Sequence[str], scenario: Scenario) -> float:
    """Return the bytes that a rank needs while it updates matrices, beside its state; 0 with an elementwise rule."""
    cost, shapes = scenario.optimizer.rule.matrix_cost, _shapes(names, scenario)
    if cost is None or not shapes:
        return 0.0
    sizes = [rows * columns for rows, columns in shapes]
    ranks = scenario.dims.tp * scenario.dims.dp_cp
    return _COPIES * cost.number_bytes(scenario.optimizer) * max(*sizes, min(ROUND, sum(sizes) / ranks))


def _shapes(names: Sequence[str], scenario: Scenario) -> list[tuple[int, int]]:
    if scenario.optimizer.rule.matrix_cost is None:
        return []
    trained = (name for name in names if scenario.trains(name))
    weights = (kind_in(scenario.model, name).hidden_weights(scenario.model).values() for name in trained)
    return [shape for held in weights for weight in held for shape in weight.shapes()]


def _weights(name: str, layout: Scenario) -> list[HiddenWeight]:
    weights = kind_in(layout.model, name).hidden_weights(layout.model).values()
    return [weight for weight in weights if bool(weight.experts) == layout.experts_alone]
