"""Search for the fastest layouts among all combinations of degrees that can run, by models of time and memory.

Each candidate's step time is bounded from below (no pipeline beats work / ranks). Candidates are simulated in the order
of their bounds, until the `top` fastest are faster than every remaining bound. Nothing is random: all ranks of a run
find the same layout.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megavlm.arch.workload import typical_workload
from megavlm.config.derived import has_vision
from megavlm.config.derived import offloaded as kinds_offloaded
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.candidates import Candidate, Space, candidates, fixed
from megavlm.planner.evaluator import Estimate, LayoutEvaluator, Rejected
from megavlm.planner.hardware import Hardware, for_precision
from megavlm.rules.check import idle, without_idle


@dataclass(frozen=True)
class SearchResult:
    """Result of a layout search: `best` layouts, fastest first, and `rejected` ones. Of the candidates that can run,
    `simulated` were simulated; the bounds of the others are worse.
    """

    best: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    simulated: int
    tried: int
    evaluator: LayoutEvaluator  # with the device that was assumed

    def config(self, config: Config) -> Config:
        """Return the configuration with the best layout; options that have no effect in it are at their defaults."""
        first = self.best[0]
        found = first.candidate.applied(config, first.partition.cuts)
        return without_idle(found, {option.path for option, _ in idle(config)})


def check_images(config: Config) -> None:
    """Raise UserError where a typical synthetic sample needs more tokens than a sequence has."""
    if config.data.kind == "synthetic" and (needed := typical_workload(config).features + 2) > config.train.seq_length:
        raise UserError(
            f"a sample of these images needs {needed:,} tokens, more than --seq-length {config.train.seq_length:,}: "
            f"set --seq-length to at least {needed}, or give fewer or smaller --images"
        )


def search(
    config: Config,
    world: int,
    hardware: Hardware,
    *,
    space: Space | None = None,
    typed: Collection[tuple[str, ...]] = (),
    top: int = 10,
    stages: Sequence[Hardware] = (),
) -> SearchResult:
    """Return the `top` fastest layouts of a configuration on `world` devices, and why others cannot run. Raises
    UserError if the space has no layout, or if a row has no room for its images.

    `typed`: options that keep their values, by their paths.
    `stages`: the devices of equal runs of pipeline stages, if they differ; `hardware` then counts for everything but
    the pipeline's passes and memory.
    """
    check_images(config)
    precision = config.precision.dtype
    own = [for_precision(each, precision) for each in stages]
    evaluator = LayoutEvaluator(config, for_precision(hardware, precision), stages=own)
    found = search_with(evaluator, world, space=fixed(space or Space(), config, typed), top=top)
    if not found.tried:
        raise UserError(
            f"{world} processes have no layout of the given degrees and schedule: leave --tp, --cp, --pp, --vpp, --ep "
            "or --schedule to the planner, or change the number of processes"
        )
    return found


def search_with(evaluator: LayoutEvaluator, world: int, *, space: Space, top: int) -> SearchResult:
    """Return the `top` fastest layouts of a space, by an evaluator, and why others cannot run."""
    config = evaluator.config
    if not has_vision(config.model) and "stages" in space.placement:
        space = replace(space, placement=("stages",))
    elif "colocated" in space.placement and (config.placement.vision_cache or config.placement.encode_ahead):
        space = replace(space, placement=("colocated",))  # what these options ask for
    if config.parallel.schedule is not None:
        space = replace(space, schedule=(config.parallel.schedule,))
    rejected: list[Rejected] = []
    queue: list[tuple[float, int, Candidate, str | None]] = []  # least seconds, number, candidate, what it lacks
    tried = 0
    vision_tp = config.parallel.vision_tensor_model_parallel_size
    offloads = evaluator.hardware.on_gpu and bool(space.offload)
    length, offload, experts = config.train.seq_length, kinds_offloaded(config), config.model.experts.num_experts
    every = candidates(world, space, length=length, vision_tp=vision_tp, offload=offload, experts=experts)
    for wanted in every:
        tried += 1
        candidate, reason = evaluator.with_fitting_encoder(wanted)
        if reason and (evaluator.rule(candidate) or not offloads):
            rejected.append(Rejected(candidate, reason))
        else:  # what lacks memory may run with `--offload`, and no faster than without
            queue.append((evaluator.bound(candidate), tried, candidate, reason))
    heapq.heapify(queue)
    found: list[Estimate] = []
    simulated = 0
    while queue:
        bound, number, candidate, reason = heapq.heappop(queue)
        limit = found[top - 1].step.seconds if len(found) >= top else float("inf")
        if bound >= limit:
            rejected += [Rejected(each, lacks) for _, _, each, lacks in [(0, 0, candidate, reason), *queue] if lacks]
            break
        if reason is None:
            estimate = evaluator.estimate(candidate, limit=limit)
            simulated += 1
            if isinstance(estimate, Rejected):
                reason = estimate.reason
            elif estimate is not None:
                reason = evaluator.host_memory_error(estimate)
                found = found if reason else sorted([*found, estimate], key=lambda each: each.step.seconds)
            if reason is None:
                continue
        other = evaluator.with_offload_that_fits(candidate, space) if offloads else None
        if other is None:
            rejected.append(Rejected(candidate, reason))
        else:
            heapq.heappush(queue, (evaluator.bound(other), number, other, None))
    refined = (evaluator.estimate(each.candidate, simulations=20) for each in found[:top])
    best = sorted((each for each in refined if isinstance(each, Estimate)), key=lambda each: each.step.seconds)
    return SearchResult(tuple(best), tuple(rejected), simulated, tried, evaluator)
