"""Which layout guides advise for a model's size and number of GPUs, and why the planner's is faster or slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from statistics import mean

from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names
from megavlm.arch.scenario import Sharding
from megavlm.arch.schedules import scenario_shape
from megavlm.planner.candidates import Candidate, Space
from megavlm.planner.evaluator import GIB, Estimate, LayoutEvaluator
from megavlm.planner.hardware import Hardware, Link
from megavlm.planner.memory import Memory
from megavlm.planner.partition import Cuts, simulate_partition
from megavlm.planner.search import SearchResult, search_with
from megavlm.planner.step_time import cached_seconds

ERROR = 0.136  # of predicted step times, in the median of 16 configurations: docs/reports/measured.md
_SMALL = 0.01  # of the longer step: terms that differ by less are not named


@dataclass(frozen=True)
class Advice:
    """A layout that guides advise for a model of so many billion parameters on a number of GPUs."""

    billions: float
    gpus: int
    tp: int
    pp: int
    sharding: Sharding

    @property
    def space(self) -> Space:
        """Return the space to search: this layout with any micro-batch and recomputation."""
        space = Space((self.tp,), (self.pp,), (1,), ("1f1b",), sharding=(self.sharding,), cp=(1,))
        return replace(space, placement=("stages",), offload=())


# The tables of four guides to training language models with and without vision. Where they disagree, both rows stand.
ADVICE = (
    Advice(2, 4, 1, 1, "none"),
    Advice(2, 8, 1, 1, "none"),
    Advice(7, 8, 1, 1, "optimizer_gradients"),
    Advice(8, 8, 1, 1, "full"),
    Advice(13, 8, 1, 1, "full"),
    Advice(13, 8, 2, 1, "optimizer_gradients"),
    Advice(34, 32, 8, 1, "full"),
    Advice(70, 64, 8, 2, "optimizer"),
    Advice(70, 128, 8, 2, "optimizer"),
    Advice(175, 256, 8, 4, "optimizer"),
    Advice(530, 768, 8, 8, "optimizer"),  # Megatron-Turing NLG's layout
    Advice(540, 1024, 8, 8, "optimizer"),
)


@dataclass(frozen=True)
class Predicted:
    """A predicted layout in the terms in which two layouts are compared."""

    label: str
    seconds: Mapping[str, float]  # of a step, by term, as a mean of the ranks: they add up to the step
    memory: Memory  # of the fullest rank

    @property
    def step(self) -> float:
        """Return the seconds of the whole step."""
        return sum(self.seconds.values())


def advised(parameters: float, world: int) -> tuple[Advice, ...]:
    """Return the advice for the nearest size, then for the nearest number of GPUs, among layouts that divide `world`;
    more than one where guides disagree.
    """

    def far(each: Advice) -> tuple[float, float]:
        return abs(log(parameters / each.billions / 1e9)), abs(log(world / each.gpus))

    fitting = [each for each in ADVICE if world % (each.tp * each.pp) == 0]
    nearest = min(map(far, fitting))
    return tuple(each for each in fitting if far(each) == nearest)


def explanation(found: SearchResult) -> str:
    """Return three sentences on the best layout of a search, which must have `found` one, beside what guides advise; or
    one sentence on why that cannot run.
    """
    evaluator, best = found.evaluator, found.best[0]
    model, world = evaluator.config.model, best.candidate.dims.world
    parameters = sum(model_parameters(name, model) for name in layer_names(model))
    advice = advised(parameters, world)
    tried = [search_with(evaluator, world, space=each.space, top=1) for each in advice]
    running = [outcome.best[0] for outcome in tried if outcome.best]
    if not running:
        lacks = [each.reason for outcome in tried for each in outcome.rejected]
        if not lacks:  # there was no layout to try
            beyond = model.experts.num_experts and advice[0].sharding in ("optimizer_gradients", "full")
            schedule = f"--schedule {evaluator.config.parallel.schedule} is not for PP{advice[0].pp} VPP1"
            lacks = ["experts are sharded by ZeRO-1 alone" if beyond else schedule]
        return f"What guides advise for a model of this size cannot run: {lacks[0]}."
    theirs = min(running, key=lambda each: each.step.seconds)
    return " ".join(why(predicted(best, evaluator), predicted(theirs, evaluator)))


def predicted(estimate: Estimate, evaluator: LayoutEvaluator) -> Predicted:
    """Return an estimate by terms. What collectives within layers take is the difference to links that cost nothing."""
    layout, cuts, step = estimate.candidate, estimate.partition.cuts, estimate.step
    stages = [_with_free_links(each.hardware) for each in evaluator.stages]
    free = LayoutEvaluator(evaluator.config, _with_free_links(evaluator.hardware), stages=stages)
    busy, computing = _busy_seconds(evaluator, layout, cuts), _busy_seconds(free, layout, cuts)
    once = _busy_seconds(free, replace(layout, recompute="none"), cuts)
    seconds = {
        "computation": once,
        "recomputation": computing - once,
        "communication of TP, CP and EP": busy - computing,
        "idle time": step.pipeline + step.encoder - busy,
        "communication of DP": step.gradients,
        "updates": step.optimizer,
    }
    return Predicted(layout.label, seconds, max(step.memory, key=lambda each: each.total))


def _with_free_links(hardware: Hardware) -> Hardware:
    free = Link(bandwidth=1e30, latency=0.0)
    return replace(hardware, near=free, far=free)


def _busy_seconds(evaluator: LayoutEvaluator, layout: Candidate, cuts: Cuts) -> float:
    """Return the mean seconds that pipeline ranks work in a step, the colocated encoder's passes included."""
    profiles, encoder = evaluator.profiles(layout), evaluator.encoder(layout)
    timeline = simulate_partition(profiles, scenario_shape(profiles.scenario), cuts)
    return mean(timeline.busy) + cached_seconds(profiles, cuts) + (encoder.seconds if encoder else 0.0)


def why(ours: Predicted, theirs: Predicted) -> tuple[str, ...]:
    """Return what two layouts take, which terms make the difference, and their memory: three sentences. Return one if
    the layouts are the same.
    """
    if ours.label == theirs.label:
        return (f"The best layout is what guides advise: {ours.label}.",)
    close = abs(theirs.step - ours.step) <= ERROR * min(ours.step, theirs.step)
    equal = ", which is less than the planner's own error: the two are as good as equal" if close else ""
    sentence = (
        f"The best layout takes {ours.step:.2f} s a step, and what guides advise ({theirs.label}) "
        f"{theirs.step / ours.step:.2f} × as long, {theirs.step:.2f} s{equal}."
    )
    return sentence, terms(ours, theirs), _memory(ours.memory, theirs.memory)


def terms(ours: Predicted, theirs: Predicted) -> str:
    """Return a sentence on the terms that differ by 1 % of a step or more, largest difference first."""
    least = _SMALL * max(ours.step, theirs.step)
    gains = {name: theirs.seconds[name] - own for name, own in ours.seconds.items()}
    order = sorted((name for name in gains if abs(gains[name]) >= least), key=lambda name: -abs(gains[name]))
    sides = {
        word: [f"{name} ({ours.seconds[name]:.2f} s against {theirs.seconds[name]:.2f})" for name in order if on(name)]
        for word, on in (("less", lambda name: gains[name] > 0), ("more", lambda name: gains[name] < 0))
    }
    said = [f"{word} time for {', '.join(names)}" for word, names in sides.items() if names]
    return f"It takes {', but '.join(said)}." if said else "No term differs by 1 % of a step."


def _memory(ours: Memory, theirs: Memory) -> str:
    uses = {
        "model state": (ours.model_state, theirs.model_state),
        "activations": (ours.activations, theirs.activations),
    }
    parts = ", ".join(f"{name} {own / GIB:.1f} against {other / GIB:.1f}" for name, (own, other) in uses.items())
    return f"Its fullest rank needs {ours.total / GIB:.1f} GiB against {theirs.total / GIB:.1f}: {parts}."
