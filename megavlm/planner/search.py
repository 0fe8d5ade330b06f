"""Which layout is fastest: every runnable combination of degrees, judged by the same models of time and memory.

Candidates are bounded from below (no pipeline beats work / ranks) and simulated in the order of their bounds, until as
many as were asked for are faster than every bound that is left. Nothing is random: all ranks of a run that search find
the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megavlm.config.layout_rules import LAYOUT_RULES, WORLD_RULES
from megavlm.config.schema import Config
from megavlm.model.flops import step_flops
from megavlm.parallel.dims import Dims
from megavlm.planner.candidates import Candidate, Space, candidates
from megavlm.planner.case import Case, Sharding, case_of, times
from megavlm.planner.cost import held_parameters, trained_parameters
from megavlm.planner.hardware import Hardware, for_precision
from megavlm.planner.memory import batch_bytes
from megavlm.planner.orders import peak_in_flight
from megavlm.planner.partition import NoPartition, Partition, best_partition, play
from megavlm.planner.plan import typical_workload
from megavlm.planner.step import Encoder, Step, colocated_encoder, encoder_layers, least_ending, step_of
from megavlm.planner.tables import LayerTables, layer_tables, sharded
from megavlm.planner.timeline import Timeline

GIB = 2**30
_LARGE = 1 / 8  # of a device: a whole encoder that takes less of it is not what is in the way


@dataclass(frozen=True)
class Estimate:
    """A candidate with its cuts and what a step of it takes."""

    candidate: Candidate
    partition: Partition
    step: Step
    tokens_per_second: float
    mfu: float | None  # None where the device's peak is unknown


@dataclass(frozen=True)
class Rejected:
    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Outcome:
    """Fastest first. `simulated` of the runnable candidates were played through; the others' bounds are worse."""

    best: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    simulated: int
    tried: int

    def config(self, config: Config) -> Config:
        """The configuration with the best layout."""
        first = self.best[0]
        return first.candidate.applied(config, first.partition.cuts)


def search(config: Config, world: int, hardware: Hardware, *, space: Space | None = None, top: int = 10) -> Outcome:
    """The `top` fastest layouts of a configuration on `world` devices, and why others cannot run."""
    space = space or Space()
    judge = _Judge(config, for_precision(hardware, config.train.precision))
    rejected: list[Rejected] = []
    bounded: list[tuple[float, int, Candidate]] = []
    tried = 0
    asked = config.parallel.vision_tensor_model_parallel_size
    for number, wanted in enumerate(candidates(world, space, vision_tp=asked)):
        tried += 1
        candidate, reason = judge.with_fitting_encoder(wanted)
        if reason:
            rejected.append(Rejected(candidate, reason))
        else:
            bounded.append((judge.bound(candidate), number, candidate))
    found: list[Estimate] = []
    simulated = 0
    for bound, _, candidate in sorted(bounded, key=lambda each: each[:2]):
        if len(found) >= top and bound >= found[top - 1].step.seconds:
            break
        estimate = judge.estimate(candidate, limit=found[top - 1].step.seconds if len(found) >= top else float("inf"))
        simulated += 1
        if isinstance(estimate, Rejected):
            rejected.append(estimate)
            continue
        if estimate is None:
            continue
        found.append(estimate)
        found.sort(key=lambda each: each.step.seconds)
    whole = "none" in space.sharding[1:]
    for each in found[:top]:
        if whole and each.candidate.dims.dp > 1 and each.candidate.sharding == "optimizer":
            other = judge.estimate(replace(each.candidate, sharding="none"))
            if isinstance(other, Estimate):
                found.append(other)
            elif other is not None:
                rejected.append(other)
    found.sort(key=lambda each: each.step.seconds)
    best = sorted((judge.refined(each) for each in found[:top]), key=lambda each: each.step.seconds)
    return Outcome(tuple(best), tuple(rejected), simulated, tried)


def timeline_of(estimate: Estimate, config: Config, hardware: Hardware) -> Timeline:
    """The estimate's pipeline played through once more, with every pass."""
    judge = _Judge(config, for_precision(hardware, config.train.precision))
    tables, partition = judge.tables(estimate.candidate), estimate.partition
    return play(tables, tables.case.shape, partition.cuts, partition.recompute, keep_events=True)


class _Judge:
    """The models of one configuration on one device, with what candidates share computed once."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        self.config, self.hardware = config, hardware
        sample = typical_workload(config)
        batch = config.train.global_batch_size
        self.tokens = sample.tokens * batch
        self.flops = step_flops(config, times(sample, batch))
        self.images = round(sum(config.data.images_per_sample) / max(1, len(config.data.images_per_sample)))
        self._rules = lru_cache(maxsize=None)(self._breaks_rule)
        self._tables = lru_cache(maxsize=None)(self._make_tables)
        self._parameters = lru_cache(maxsize=None)(self._count_parameters)
        self._encoders = lru_cache(maxsize=None)(self._make_encoder)

    def complaint(self, candidate: Candidate) -> str | None:
        """Why a candidate cannot run, in the words of the configuration's own rules, or for lack of memory."""
        if reason := self._rule(candidate):
            return reason
        tables, encoder = self.tables(candidate), self.encoder(candidate)
        if candidate.dims.chunks > tables.count:
            return f"--pp {candidate.dims.pp} × --vpp {candidate.dims.vpp} makes more chunks than the model has layers"
        own, room = float(tables.standing[-1]) / candidate.dims.pp, self.room(candidate)
        if own + (encoder.memory.standing if encoder else 0.0) > self.hardware.memory:
            return f"weights, gradients and optimizer alone do not fit {self.hardware.memory / GIB:.0f} GiB"
        # A rank that holds h micro-batches has room for (room − its standing bytes) / h of what one saves.
        held = [max(1, min(chunks)) for chunks in peak_in_flight(tables.case.shape)]
        most = room * sum(1 / h for h in held) - float(tables.standing[-1]) / max(held)
        return self._no_room() if tables.modes[candidate.recompute].saved[-1] > most else None

    def _no_room(self) -> str:
        return f"no cut leaves room for activations in {self.hardware.memory / GIB:.0f} GiB"

    def room(self, candidate: Candidate) -> float:
        """Bytes of a device that are left for its part of the pipeline."""
        case, encoder = self.tables(candidate).case, self.encoder(candidate)
        data = case.micro_batches * batch_bytes(case, with_patches=encoder is None)
        return self.hardware.memory - data - (encoder.memory.total if encoder else 0.0)

    def _rule(self, candidate: Candidate) -> str | None:
        return self._rules(
            candidate.dims, candidate.micro_batch, candidate.placement, candidate.sharding, candidate.vision_tp
        )

    def with_fitting_encoder(self, candidate: Candidate) -> tuple[Candidate, str | None]:
        """The candidate, or where it lacks memory for whole encoders, the same with each shared by as few ranks of a
        tensor-parallel group as there is room for. Itself again where sharing does not help, and then its complaint.
        """
        reason = self.complaint(candidate)
        if candidate.placement == "stages" or not reason or self._rule(candidate):
            return candidate, reason
        encoder = self.encoder(candidate)
        if encoder is None or encoder.memory.standing < _LARGE * self.hardware.memory:
            return candidate, reason
        tp = candidate.dims.tp
        shared = (replace(candidate, vision_tp=n) for n in range(candidate.vision_tp + 1, tp + 1) if tp % n == 0)
        return next(((each, None) for each in shared if not self.complaint(each)), (candidate, reason))

    def bound(self, candidate: Candidate) -> float:
        """Seconds that no partition of the candidate can beat.

        With one chunk per rank, rank r of p ends no sooner than load₀ + … + load_(r−1) + m·load_r. The largest of these
        is least where all are equal, at B: load_r = B/m·(1 − 1/m)^r, which add up to the work W of a micro-batch. So
        B = W / (1 − (1 − 1/m)^p). With more chunks only the ranks' own work is certain.
        """
        tables = self.tables(candidate)
        work = float(tables.forward[-1] + tables.modes[candidate.recompute].backward[-1])
        m, pp = tables.case.micro_batches, candidate.dims.pp
        share = 1 - (1 - 1 / m) ** pp if candidate.dims.vpp == 1 else pp / m
        pipeline = work * max(1.0, 1 / share)
        return pipeline + self.around(candidate, pipeline=pipeline)

    def around(self, candidate: Candidate, *, pipeline: float) -> float:
        """Seconds of a step before and after a pipeline of at least `pipeline` seconds, at least."""
        tables, encoder = self.tables(candidate), self.encoder(candidate)
        trained, held = self._parameters(candidate.dims.tp, tables.first)
        ending = least_ending(tables.case, self.hardware, trained=trained, held=held, pipeline=pipeline)
        return ending + (encoder.seconds if encoder else 0.0)

    def estimate(
        self, candidate: Candidate, *, limit: float = float("inf"), simulations: int = 1, with_memory: bool = False
    ) -> Estimate | Rejected | None:
        """A step of the candidate at good cuts; None where it takes longer than `limit` seconds."""
        tables, encoder = self.tables(candidate), self.encoder(candidate)
        case, room = tables.case, self.room(candidate)
        own = replace(tables, modes={candidate.recompute: tables.modes[candidate.recompute]})
        nodes = 4 * case.dims.chunks + 50 if simulations == 1 else 5_000
        left = limit - self.around(candidate, pipeline=limit)
        partition = best_partition(own, case.shape, cap=room, limit=left, simulations=simulations, nodes=nodes)
        if isinstance(partition, NoPartition):
            if partition.bound < float("inf"):
                return None
            return Rejected(candidate, self._no_room())
        step = step_of(
            own, self.hardware, partition.cuts, partition.recompute, encoder=encoder, with_memory=with_memory
        )
        peak, world = self.hardware.peak, candidate.dims.world
        mfu = None if peak is None else self.flops / step.seconds / world / peak
        return Estimate(candidate, partition, step, self.tokens / step.seconds, mfu)

    def refined(self, estimate: Estimate) -> Estimate:
        """The same candidate at better cuts, with its memory in parts."""
        better = self.estimate(estimate.candidate, simulations=20, with_memory=True)
        assert isinstance(better, Estimate)
        return better

    def tables(self, candidate: Candidate) -> LayerTables:
        return self._tables(candidate.dims, candidate.micro_batch, candidate.placement, candidate.sharding)

    def encoder(self, candidate: Candidate) -> Encoder | None:
        if candidate.placement == "stages":
            return None
        # In however many chunks the language model is.
        return self._encoders(
            replace(candidate.dims, vpp=1), candidate.micro_batch, candidate.sharding, candidate.vision_tp
        )

    def _count_parameters(self, tp: int, first: int) -> tuple[float, float]:
        """Trained and all numbers that a tensor-parallel rank holds of the layers from `first` on."""
        case = self.case(Dims(tp, 1, 1, 1), 1, "none")
        end = len(case.names)
        return trained_parameters(case, first, end), held_parameters(case, first, end)

    def case(self, dims: Dims, micro_batch: int, sharding: Sharding) -> Case:
        layout = Candidate(dims, micro_batch, "none", "stages", sharding).applied(self.config)
        return case_of(layout, dims, on_gpu=self.hardware.on_gpu)

    def _make_tables(
        self, dims: Dims, micro_batch: int, placement: Literal["stages", "colocated"], sharding: Sharding
    ) -> LayerTables:
        if dims.vpp > 1:  # layers take what they take, in however many chunks
            tables = self._tables(replace(dims, vpp=1), micro_batch, placement, sharding)
            return replace(tables, case=replace(tables.case, dims=dims))
        case = self.case(dims, micro_batch, sharding)
        if sharding != "optimizer":  # layers take as long whoever keeps their state
            return sharded(self._tables(dims, micro_batch, placement, "optimizer"), case)
        return layer_tables(case, self.hardware, first=encoder_layers(case) if placement == "colocated" else 0)

    def _make_encoder(self, dims: Dims, micro_batch: int, sharding: Sharding, vision_tp: int) -> Encoder:
        return colocated_encoder(
            self.case(dims, micro_batch, sharding),
            self.hardware,
            images=self.images * micro_batch,
            chunk_patches=self.config.parallel.encoder_chunk_patches,
            kept=self.config.parallel.encoder_keep_chunks,
            vision_tp=vision_tp,
        )

    def _breaks_rule(
        self,
        dims: Dims,
        micro_batch: int,
        placement: Literal["stages", "colocated"],
        sharding: Sharding,
        vision_tp: int,
    ) -> str | None:
        layout = Candidate(dims, micro_batch, "none", placement, sharding, vision_tp).applied(self.config)
        complaints = (rule(layout) for rule in LAYOUT_RULES)
        of_world = (rule(layout, dims.world) for rule in WORLD_RULES)
        return next((text for text in (*complaints, *of_world) if text), None)
