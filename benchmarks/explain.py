"""Where a step's time goes on one GPU: products, attention and passes of each layer, and the host that launches them.

A device runs what the host has issued, in order: an operation begins when the one before it has ended and the host has
come to it. So a tower whose layers take longer to launch than to run costs the host's time in the forward pass, and the
host is far ahead by the time the backward pass comes there. `played` goes through the layers in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megavlm.arch.layers import LANGUAGE_LAYER, VISION_LAYER, kind_of, number_of
from megavlm.arch.scenario import Scenario
from megavlm.arch.workload import attends_in_windows
from megavlm.planner.cost import trained_parameters
from megavlm.planner.hardware import Hardware
from megavlm.planner.terms import NOW, HostTime, MemoryPasses, Pair, Update, launch_seconds, layer_terms

UPDATE = "update"
# Transformer Engine's layers at f4fb872: norms and biases of queries, keys and values inside linear layers, the rest as
# torch's.
BEFORE = MemoryPasses(
    value_copy=(2, 2),
    qkv_bias_inside=True,
    launches_language=(28, 45),
    launches_vision=(24, 42),
)
# With everything fused that this model knows of.
POSSIBLE = replace(NOW, output_weight_gradient=0, update=Update(over_tokens=0, clip=0, copy=2))
# cuDNN's kernel looks at every tile of (sequence, head, 128 rows) up to the longest possible sequence; an empty one
# takes so long of one of the multiprocessors.
_EMPTY_TILE, _MULTIPROCESSORS, _TILE_ROWS = 0.3e-6, 132, 128


@dataclass(frozen=True)
class StepPart:
    """Seconds of one layer, or of what ends a step (`UPDATE`): the device's by term and the host's, each as (forward,
    backward).
    """

    name: str
    terms: dict[str, Pair] = field(default_factory=dict)
    host: Pair = (0.0, 0.0)

    @property
    def kind(self) -> str:
        """Return the kind of layer, or `UPDATE`."""
        return self.name if self.name == UPDATE else kind_of(self.name)

    @property
    def device(self) -> Pair:
        return sum(pair[0] for pair in self.terms.values()), sum(pair[1] for pair in self.terms.values())


@dataclass(frozen=True)
class Explained:
    """A simulated step: its parts, its seconds, and the seconds of the language part, forward and backward."""

    parts: tuple[StepPart, ...]
    seconds: float
    language: float

    def waiting(self) -> float:
        """Return the seconds in which the device waits for the host."""
        return self.seconds - sum(sum(part.device) for part in self.parts)

    def of(self, kind: str) -> dict[str, float]:
        """Return the seconds of all parts of a kind, by term."""
        found: dict[str, float] = {}
        for part in self.parts:
            for term, pair in part.terms.items() if part.kind == kind else ():
                found[term] = found.get(term, 0.0) + sum(pair)
        return found


def explained(
    scenario: Scenario, hardware: Hardware, passes: MemoryPasses, host: HostTime, *, windows_batched: bool = True
) -> Explained:
    """Return the simulated step of one micro-batch on one GPU.

    Unless windows are batched, attention over them is one call, tiled for as many as the longest could be.
    """
    assert scenario.dims.world == 1, "collectives are not part of this"
    parts = [_part(name, scenario, hardware, passes, host, windows_batched) for name in scenario.names]
    trained = sum(trained_parameters(layout, 0, len(scenario.names)) for layout in scenario.layouts)
    update = trained * passes.update.total
    return played(parts, update, hardware, host)


def played(parts: Sequence[StepPart], update: float, hardware: Hardware, host: HostTime) -> Explained:
    """Simulate the forward pass, the backward pass and the update; each part starts when host and device are ready."""
    issued = ended = 0.0
    begins: dict[str, float] = {}
    ends: dict[str, float] = {}
    for part in parts:
        issued += part.host[0]
        begins[part.name] = max(ended, issued - part.host[0])
        ended = max(ended, issued) + part.device[0]
        issued = max(issued, ended) if host.waits and part.kind == VISION_LAYER else issued
    for part in reversed(parts):
        issued += part.host[1]
        ended = max(ended, issued) + part.device[1]
        ends[part.name] = ended
    first = next(part.name for part in parts if part.kind == LANGUAGE_LAYER)
    seconds = update / hardware.memory_bandwidth
    ending = StepPart(UPDATE, {"gradients and update": (seconds, 0.0)})
    return Explained((*parts, ending), ended + seconds, ends[first] - begins[first])


def _part(
    name: str, scenario: Scenario, hardware: Hardware, passes: MemoryPasses, host: HostTime, windows_batched: bool
) -> StepPart:
    terms = layer_terms(name, scenario, hardware, passes)
    if kind_of(name) == VISION_LAYER and not windows_batched:
        terms |= _empty_tiles(name, scenario)
    return StepPart(name, terms, launch_seconds(name, scenario, passes, host))


def _empty_tiles(name: str, scenario: Scenario) -> dict[str, Pair]:
    """Attention over all windows in one call: sequences and their possible length are rounded up to powers of two."""
    vision = scenario.model.vision
    if not attends_in_windows(vision, number_of(name)) or not scenario.work.window_squares:
        return {}
    sequences = scenario.work.patches**2 / scenario.work.window_squares  # as if all were alike
    grid = _power_of_two(sequences) * _power_of_two(scenario.work.patches) / _TILE_ROWS * vision.num_attention_heads
    seconds = grid * _EMPTY_TILE / _MULTIPROCESSORS
    return {"empty tiles of windows": (seconds, 2 * seconds)}


def _power_of_two(value: float) -> int:
    return 1 << (int(value) - 1).bit_length()
