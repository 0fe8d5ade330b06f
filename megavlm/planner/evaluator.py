"""`LayoutEvaluator`: check whether a layout can run, bound its step time, and estimate the step at good cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megavlm.arch.dims import Dims, dims_of
from megavlm.arch.kinds import step_flops
from megavlm.arch.scenario import Scenario, Sharding, scenario_of
from megavlm.arch.schedules import PipelineShape, peak_in_flight, scenario_shape
from megavlm.arch.workload import times, typical_images, typical_workload
from megavlm.config.schema import Config
from megavlm.planner.candidates import Candidate, Space, with_offload
from megavlm.planner.hardware import Hardware, fp8_speed
from megavlm.planner.host_memory import node_memory_error
from megavlm.planner.layer_profiles import Array, LayerMeasures, LayerProfiles, least_work
from megavlm.planner.memory import batch_bytes, batches_at_once, communicator_bytes
from megavlm.planner.partition import Partition, best_partition
from megavlm.planner.step_time import (
    EncoderEstimate,
    StepEstimate,
    colocated_encoder,
    encoder_layers,
    least_pipeline_time,
    step_of,
)
from megavlm.rules import first
from megavlm.rules.layout_rules import LAYOUT_RULES, WORLD_RULES
from megavlm.rules.precision_rules import PRECISION_RULES

GIB = 2**30
_LARGE = 1 / 8  # of a device: a whole encoder that takes less of it is not what is in the way


@dataclass(frozen=True)
class Estimate:
    """A candidate with its cuts, step time, throughput and memory."""

    candidate: Candidate
    partition: Partition
    step: StepEstimate
    tokens_per_second: float
    mfu: float | None  # None where the device's peak is unknown


@dataclass(frozen=True)
class Rejected:
    candidate: Candidate
    reason: str


class LayoutEvaluator:
    """Evaluates layouts of one configuration on one device. Results that candidates share are computed once."""

    def __init__(self, config: Config, hardware: Hardware, *, stages: Sequence[Hardware] = ()) -> None:
        """Prepare the evaluation. `stages`: devices of equal runs of pipeline stages, in pipeline order, if they differ
        from `hardware`; everything else is then computed with `hardware`.
        """
        self.config, self.hardware = config, hardware
        self.stages = tuple(LayoutEvaluator(config, each) for each in stages)
        step = times(typical_workload(config), config.train.global_batch_size)
        self.tokens = step.tokens
        self.flops = step_flops(config, step)
        self._rules = lru_cache(maxsize=None)(self._breaks_rule)
        self._measures = LayerMeasures(hardware)
        self._scenarios = lru_cache(maxsize=None)(self._make_scenario)
        # The scenario of a candidate; a colocated encoder has its own scenario (`encoder_scenario`).
        self.scenario: Callable[[Candidate], Scenario] = lru_cache(maxsize=None)(self._find_scenario)
        # Times and bytes of the layers that a candidate's pipeline holds.
        self.profiles: Callable[[Candidate], LayerProfiles] = lru_cache(maxsize=None)(self._find_profiles)
        self._encoders = lru_cache(maxsize=None)(self._make_encoder)

    @property
    def peak(self) -> float | None:
        """Return the device's peak FLOP/s by which a run counts its MFU; None if unknown, or in fp32."""
        peak, precision = self.hardware.peak, self.config.precision
        if peak is None or precision.dtype == "fp32":
            return None
        return peak * fp8_speed(self.hardware) if precision.fp8 != "none" else peak

    def infeasible_reason(self, candidate: Candidate) -> str | None:
        """Return why a candidate cannot run (a configuration rule's message or a lack of memory), or None if it can."""
        if reason := self.rule(candidate):
            return reason
        scenario, encoder, first = self.scenario(candidate), self.encoder(candidate), self._first(candidate)
        if candidate.dims.chunks > len(scenario.names) - first:
            return f"--pp {candidate.dims.pp} × --vpp {candidate.dims.vpp} makes more chunks than the model has layers"
        plain = self.scenario(_plain(candidate))
        state = float(self._measures.model_state(plain, first=first)[-1])
        if state / candidate.dims.pp + (encoder.memory.model_state if encoder else 0.0) > self.hardware.memory:
            return f"weights, gradients and optimizer alone do not fit {self.hardware.memory / GIB:.0f} GiB"
        saved = float(self._measures.saved(plain, recompute=candidate.recompute, first=first)[-1])
        # A rank that holds h micro-batches has room for (room − its standing bytes) / h of what one saves.
        shares, most_held = _held(scenario_shape(scenario))
        most = max(self.free_memories(candidate)) * shares - state / most_held
        return self._no_free_memory() if saved > most else None

    def _no_free_memory(self) -> str:
        return f"no cut leaves room for activations in {self.hardware.memory / GIB:.0f} GiB"

    def free_memory(self, candidate: Candidate) -> float:
        """Return the bytes that layers may use on a device: its memory less batches, communicators and encoder."""
        scenario, encoder = self.scenario(candidate), self.encoder(candidate)
        data = batches_at_once(scenario) * batch_bytes(scenario, with_patches=encoder is None)
        other = data + communicator_bytes(scenario) + (encoder.memory.total if encoder else 0.0)
        return self.hardware.memory - other

    def free_memories(self, candidate: Candidate) -> list[float]:
        """Return `free_memory` of each pipeline rank's device."""
        own = [stage.free_memory(candidate) for stage in self.stages] or [self.free_memory(candidate)]
        return [own[rank * len(own) // candidate.dims.pp] for rank in range(candidate.dims.pp)]

    def rule(self, candidate: Candidate) -> str | None:
        """Return the message of the first configuration rule that a candidate breaks, or None. Recomputation does not
        matter.
        """
        return self._rules(candidate if candidate.recompute == "none" else replace(candidate, recompute="none"))

    def with_offload_that_fits(self, candidate: Candidate, space: Space) -> Candidate | None:
        """Return the candidate with the first set of offloaded tensors that makes it fit, or None if none does."""
        fitting = (each for each in with_offload(candidate, space) if not self.infeasible_reason(each))
        return next(fitting, None)

    def host_memory_error(self, estimate: Estimate) -> str | None:
        """Return an error message if a node's host memory cannot hold what is offloaded, else None."""
        if not estimate.step.host:
            return None
        return node_memory_error(estimate.step.host, estimate.candidate.dims.world, self.hardware)

    def with_fitting_encoder(self, candidate: Candidate) -> tuple[Candidate, str | None]:
        """Return the candidate and None if it can run; else with its encoder split over the fewest tensor-parallel
        ranks that fit, and None; if splitting does not help, the candidate itself and the reason.
        """
        reason = self.infeasible_reason(candidate)
        if candidate.placement == "stages" or not reason or self.rule(candidate):
            return candidate, reason
        encoder = self.encoder(candidate)
        if encoder is None or encoder.memory.model_state < _LARGE * self.hardware.memory:
            return candidate, reason
        tp = candidate.dims.tp
        shared = (replace(candidate, vision_tp=n) for n in range(candidate.vision_tp + 1, tp + 1) if tp % n == 0)
        return next(((each, None) for each in shared if not self.infeasible_reason(each)), (candidate, reason))

    def bound(self, candidate: Candidate) -> float:
        """Return a lower bound of the candidate's step time in seconds, over all partitions."""
        pp, fastest = candidate.dims.pp, [stage.seconds(candidate) for stage in self.stages or (self,)]
        work = path = min(least_work(each, pp=pp) for each in fastest)
        if (shape := scenario_shape(self.scenario(candidate))).splits_backward:
            path = min(least_work(each, pp=pp, splits=True) for each in fastest)
        pipeline = least_pipeline_time(shape, work=work, path=path)
        return pipeline + self._encoder_seconds(candidate)

    def seconds(self, candidate: Candidate) -> list[Array]:
        """Return the prefix sums of a candidate's layers' seconds (`LayerMeasures.seconds`)."""
        scenario, first = self.scenario(_plain(candidate)), self._first(candidate)
        return self._measures.seconds(scenario, recompute=candidate.recompute, first=first)

    def _encoder_seconds(self, candidate: Candidate) -> float:
        encoder = self.encoder(candidate)
        return encoder.seconds if encoder else 0.0

    def estimate(
        self, candidate: Candidate, *, limit: float = float("inf"), simulations: int = 1
    ) -> Estimate | Rejected | None:
        """Return an estimate of the candidate at good cuts, or Rejected if no cut fits; None above `limit` seconds.

        With more than one of `simulations` the search for cuts takes longer, and the estimate has each rank's memory.
        """
        profiles = self.profiles(candidate)
        partition = best_partition(
            profiles,
            scenario_shape(profiles.scenario),
            caps=self.free_memories(candidate),
            limit=limit - self._encoder_seconds(candidate),
            simulations=simulations,
        )
        if isinstance(partition, float):
            return None if partition < float("inf") else Rejected(candidate, self._no_free_memory())
        encoder = self.encoder(candidate)
        step = step_of(profiles, self.hardware, partition.cuts, encoder=encoder, with_memory=simulations > 1)
        peaks = [stage.peak for stage in self.stages] or [self.peak]
        known = [peak for peak in peaks if peak is not None]
        devices = candidate.dims.world / len(peaks)  # of each kind
        mfu = self.flops / step.seconds / devices / sum(known) if len(known) == len(peaks) else None
        return Estimate(candidate, partition, step, self.tokens / step.seconds, mfu)

    def _find_profiles(self, candidate: Candidate) -> LayerProfiles:
        scenario, first, pp = self.scenario(_plain(candidate)), self._first(candidate), candidate.dims.pp
        profiles = self._measures.profiles(scenario, recompute=candidate.recompute, first=first)
        own = tuple(stage.profiles(candidate) for stage in self.stages)
        stages = tuple(own[rank * len(own) // pp] for rank in range(pp)) if own else ()
        return replace(profiles, scenario=self.scenario(candidate), stages=stages)

    def _first(self, candidate: Candidate) -> int:
        """Return the number of layers outside a candidate's pipeline: a colocated encoder's layers, else 0."""
        return encoder_layers(self._any) if candidate.placement == "colocated" else 0

    def encoder(self, candidate: Candidate) -> EncoderEstimate | None:
        """Return the time and memory of a candidate's colocated encoder, or None. Cuts and EP do not matter, nor how
        many micro-batches have the images of a step, nor ZeRO stages after 1.
        """
        if candidate.placement == "stages":
            return None
        dims = replace(candidate.dims, vpp=1, ep=1, etp=None, schedule=None)
        sharding: Sharding = "none" if candidate.sharding == "none" else "optimizer"
        return self._encoders(replace(candidate, recompute="none", dims=dims, micro_batch=1, sharding=sharding))

    def _find_scenario(self, candidate: Candidate) -> Scenario:
        dims = candidate.dims
        scenario = self._scenarios(replace(_plain(candidate), recompute="none", vision_tp=1))
        return replace(scenario, dims=replace(dims, cp_groups=scenario.dims.cp_groups))

    @cached_property
    def _any(self) -> Scenario:
        """Return the scenario of a single rank, for its list of layers: it is the same for all layouts."""
        return scenario_of(self.config, Dims(), on_gpu=self.hardware.on_gpu)

    def _make_scenario(self, candidate: Candidate) -> Scenario:
        layout = replace(candidate, placement="stages").applied(self.config)
        dims, colocated = dims_of(layout, world=candidate.dims.world), candidate.placement == "colocated"
        return scenario_of(layout, dims, on_gpu=self.hardware.on_gpu, colocated=colocated, like=self._any)

    def _make_encoder(self, candidate: Candidate) -> EncoderEstimate:
        return colocated_encoder(
            self.scenario(candidate),
            hardware=self.hardware,
            config=self.config,
            images=typical_images(self.config) * candidate.micro_batch,
            vision_tp=candidate.vision_tp,
        )

    def _breaks_rule(self, candidate: Candidate) -> str | None:
        layout = candidate.applied(self.config)
        broken = first((*LAYOUT_RULES, *PRECISION_RULES), layout) or self._mixes_stages(layout)
        return broken or first(WORLD_RULES, layout, candidate.dims.world)

    def _mixes_stages(self, layout: Config) -> str | None:
        """Return an error message if a run of stages would mix devices because PP does not divide evenly, else None."""
        pp, kinds = layout.parallel.pipeline_model_parallel_size, len(self.stages)
        if not kinds or pp % kinds == 0:
            return None
        return f"--pp {pp} does not divide into {kinds} equal runs of stages, one for each of --stage-gpus"


@lru_cache(maxsize=1024)
def _held(shape: PipelineShape) -> tuple[float, int]:
    """Return Σ 1/h over pipeline ranks, and the largest h: each chunk of a rank holds at least h micro-batches."""
    held = [max(1, min(chunks)) for chunks in peak_in_flight(shape)]
    return sum(1 / h for h in held), max(held)


def _plain(candidate: Candidate) -> Candidate:
    """Return a candidate with one chunk per rank and the default schedule, or ZB-H1. A layer takes the same time in all
    other schedules; under ZB-H1, products do not accumulate weight gradients.
    """
    dims = candidate.dims
    plain = replace(dims, vpp=1, schedule="zb-h1" if dims.order == "zb-h1" else None)
    return candidate if plain == dims else replace(candidate, dims=plain)
