"""Where a step's time goes on one GPU: products, attention and passes of each layer, and the host that launches them.

A device runs what the host has issued, in order: an operation begins when the one before it has ended and the host has
come to it. So a tower whose layers take longer to launch than to run costs the host's time in the forward pass, and the
host is far ahead by the time the backward pass comes there. `played` goes through the layers in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megavlm.model.flops import attends_in_windows, layer_cost
from megavlm.planner.case import Case
from megavlm.planner.cost import layer_seconds, trained_parameters
from megavlm.planner.hardware import Hardware, fp8_speed, scaled
from megavlm.planner.layers import (
    EMBEDDING,
    LANGUAGE_LAYER,
    LANGUAGE_NORM,
    OUTPUT,
    PATCH_EMBED,
    PROJECTOR,
    VISION_LAYER,
    VISION_NORM,
)
from megavlm.planner.passes import Pair, Passes, moved, update_bytes

# Estimates, none measured. A product of a layer's shape reaches this share of the best square one (650 of 794 TFLOP/s).
SHAPE_SHARE = 0.82
# The same of twice the rate in FP8: 1,040 TFLOP/s. Llama-3-70B's published run was 9 % slower than twice would make it.
_FP8_SHARE = 0.8
# cuDNN's kernel looks at every tile of (sequence, head, 128 rows) up to the longest possible sequence; an empty one
# takes so long of one of the multiprocessors.
_EMPTY_TILE, _MULTIPROCESSORS, _TILE_ROWS = 0.3e-6, 132, 128
# Launches of the other layers, forward and backward, as `benchmarks/host_time.py` counts them.
_LAUNCHES: dict[str, Pair] = {PATCH_EMBED: (21, 23), PROJECTOR: (15, 14), EMBEDDING: (2, 5), LANGUAGE_NORM: (1, 2)}


@dataclass(frozen=True)
class HostTime:
    """Seconds of the host, forward and backward: for each operation that it launches, and for a layer's Python."""

    operation: Pair = (10e-6, 8e-6)  # torch's dispatcher, autograd and the driver: estimate
    layer: Pair = (900e-6, 500e-6)  # five modules of Transformer Engine of some 180 µs: estimate, 1.0 to 1.4 ms in all
    attention_call: float = 0.0  # beyond an operation's, where one layer calls attention for each window
    waits: bool = False  # whether vision layers ask the device for a number, so that the host is never ahead


@dataclass(frozen=True)
class Part:
    """A layer, or what ends a step: seconds of the device by term, forward and backward, and the host's."""

    name: str
    terms: dict[str, Pair] = field(default_factory=dict)
    host: Pair = (0.0, 0.0)

    @property
    def device(self) -> Pair:
        return sum(pair[0] for pair in self.terms.values()), sum(pair[1] for pair in self.terms.values())


@dataclass(frozen=True)
class Explained:
    """A step: its parts, when it ends, and seconds from the first language layer's start to its input's gradient."""

    parts: tuple[Part, ...]
    seconds: float
    language: float

    def waiting(self) -> float:
        """Seconds in which the device waits for the host."""
        return self.seconds - sum(sum(part.device) for part in self.parts)

    def of(self, stem: str) -> dict[str, float]:
        """Seconds of all parts whose name begins so, by term."""
        found: dict[str, float] = {}
        for part in self.parts:
            for term, pair in part.terms.items() if part.name.startswith(stem) else ():
                found[term] = found.get(term, 0.0) + sum(pair)
        return found


def explained(case: Case, hardware: Hardware, passes: Passes, host: HostTime, *, te: bool = True) -> Explained:
    """A step of one micro-batch on one GPU."""
    assert case.dims.world == 1, "collectives are not part of this"
    parts = [_part(name, case, hardware, passes, host, te=te) for name in case.names]
    return played(parts, update_bytes(trained_parameters(case, 0, len(case.names)), passes), hardware, host)


def played(parts: Sequence[Part], update: float, hardware: Hardware, host: HostTime) -> Explained:
    """Forward pass, backward pass and the update of so many bytes, each part when host and device come to it."""
    issued = ended = 0.0
    begins: dict[str, float] = {}
    ends: dict[str, float] = {}
    for part in parts:
        issued += part.host[0]
        begins[part.name] = max(ended, issued - part.host[0])
        ended = max(ended, issued) + part.device[0]
        issued = max(issued, ended) if host.waits and part.name.startswith(VISION_LAYER) else issued
    for part in reversed(parts):
        issued += part.host[1]
        ended = max(ended, issued) + part.device[1]
        ends[part.name] = ended
    first = next(part.name for part in parts if part.name.startswith(LANGUAGE_LAYER))
    seconds = update / hardware.memory_bandwidth
    ending = Part("update", {"gradients and update": (seconds, 0.0)})
    return Explained((*parts, ending), ended + seconds, ends[first] - begins[first])


def _part(name: str, case: Case, hardware: Hardware, passes: Passes, host: HostTime, *, te: bool) -> Part:
    if name == VISION_NORM and not (case.model.vision.post_norm and case.model.vision.feature_layer == -1):
        return Part(name)
    numbered = name.startswith((VISION_LAYER, LANGUAGE_LAYER))
    if not (numbered or name in (OUTPUT, LANGUAGE_NORM)):
        seconds = layer_seconds(name, case, device_alone(hardware))
        return Part(name, {"other": (seconds.forward, seconds.backward)}, _host(_LAUNCHES.get(name, (2, 2)), host))
    launches = passes.launches_language if name.startswith(LANGUAGE_LAYER) else passes.launches_vision
    if name == OUTPUT:
        launches = passes.launches_output
    elif name == LANGUAGE_NORM:
        launches = _LAUNCHES[name]
    python = host.layer if numbered else (0.0, 0.0)
    terms = work_terms(name, case, hardware)
    if name.startswith(VISION_LAYER) and te and not passes.windows_batched:
        terms |= _empty_tiles(name, case)
    moves = moved(name, case, passes, te=te).terms
    rates = hardware.forward.bandwidth, hardware.backward.bandwidth
    terms |= {term: (pair[0] / rates[0], pair[1] / rates[1]) for term, pair in moves.items()}
    base = _host(launches, host)
    return Part(name, terms, (base[0] + python[0], base[1] + python[1]))


def work_terms(name: str, case: Case, hardware: Hardware) -> dict[str, Pair]:
    """Seconds of a layer's products and of its attention."""
    if name in case.fp8:
        hardware = scaled(hardware, products=max(1.0, fp8_speed(hardware) * _FP8_SHARE))
    cost = layer_cost(name, case.model, case.work)
    products = (cost.forward_flops - cost.attention_flops) / (hardware.forward.matmul * SHAPE_SHARE)
    grads = case.trains(name) + case.gradient_reaches[case.names.index(name)]
    attention = (
        cost.attention_flops / hardware.forward.attention,
        2 * cost.attention_flops / hardware.backward.attention,
    )
    return {"products": (products, grads * products)} | ({"attention": attention} if cost.attention_flops else {})


def device_alone(hardware: Hardware) -> Hardware:
    """The same where calls cost nothing: here they are the host's."""
    return replace(
        hardware,
        forward=replace(hardware.forward, overhead=0.0),
        backward=replace(hardware.backward, overhead=0.0),
    )


def _host(launches: Pair, host: HostTime) -> Pair:
    return launches[0] * host.operation[0], launches[1] * host.operation[1]


def _empty_tiles(name: str, case: Case) -> dict[str, Pair]:
    """Attention over all windows in one call: sequences and their possible length are rounded up to powers of two."""
    vision = case.model.vision
    if not attends_in_windows(vision, int(name.removeprefix(VISION_LAYER))) or not case.work.window_squares:
        return {}
    sequences = case.work.patches**2 / case.work.window_squares  # as if all were alike
    grid = _power_of_two(sequences) * _power_of_two(case.work.patches) / _TILE_ROWS * vision.num_attention_heads
    seconds = grid * _EMPTY_TILE / _MULTIPROCESSORS
    return {"empty tiles of windows": (seconds, 2 * seconds)}


def _power_of_two(value: float) -> int:
    return 1 << (int(value) - 1).bit_length()
