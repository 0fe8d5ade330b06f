"""`Plan`: the assignment of layers to pipeline chunks, and the cuts that balance the chunks' FLOPs."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import adapter_parameters, layer_cost, layer_flops, model_parameters
from megavlm.arch.layers import encoder_names, kind_of, layer_names, number_of
from megavlm.arch.scenario import scenario_of
from megavlm.arch.workload import of_context_part, typical_images, typical_workload
from megavlm.config.derived import starts_from
from megavlm.config.lora_config import new_projector
from megavlm.config.messages import aligned
from megavlm.config.schema import Config
from megavlm.errors import UserError

_RARE = ("cp", "cp_groups", "ep", "etp", "schedule")  # degrees that `plan.json` leaves out at their defaults


@dataclass(frozen=True)
class Plan:
    """Layers of each pipeline chunk and of the colocated encoder, and the parallel degrees."""

    dims: Dims
    chunks: tuple[tuple[str, ...], ...]  # layer names of chunk 0, 1, … in pipeline order
    placement: str = "stages"
    encoder: tuple[str, ...] = ()  # colocated: the layers that every rank holds outside the pipeline …
    vision_tp: int = 1  # … whole, or sharded over so many neighbouring ranks of a replica

    def owner_of(self, layer: str) -> int:
        """Return the pipeline rank that owns a layer."""
        return self.dims.owner_of(next(i for i, names in enumerate(self.chunks) if layer in names))

    def trained_before(self, chunk: int, trained: Collection[str]) -> bool:
        """Return whether a `trained` layer runs before a chunk, so that the chunk must send gradients back."""
        return any(name in trained for name in self.before(chunk))

    def before(self, chunk: int) -> tuple[str, ...]:
        """Return the names of all layers that run before a chunk."""
        return (*self.encoder, *(name for names in self.chunks[:chunk] for name in names))

    def to_json(self) -> dict[str, Any]:
        """Return the content of `plan.json`."""
        plan: dict[str, Any] = {
            "dims": {
                name: n for name, n in asdict(self.dims).items() if name not in _RARE or n != getattr(Dims(), name)
            },
            "placement": self.placement,
            "chunks": [list(names) for names in self.chunks],
        }
        if self.encoder:
            plan["encoder"] = list(self.encoder)
        return {**plan, "vision_tp": self.vision_tp} if self.vision_tp > 1 else plan

    def dumps(self) -> str:
        """Return the text of `plan.json`."""
        return json.dumps(self.to_json(), indent=2) + "\n"


def make_plan(config: Config, dims: Dims) -> Plan:
    """Cut the list of layers into PP × VPP chunks, as `--pipeline-cuts` says or evenly by the FLOPs of a training step.

    A frozen tower has no backward pass, and takes a third of the time of a trained one.
    """
    placement = config.placement.encoder
    encoder = encoder_names(config.model) if placement == "colocated" else ()
    names = layer_names(config.model)[len(encoder) :]
    if dims.chunks > len(names):
        raise UserError(
            f"--pp {dims.pp} × --vpp {dims.vpp} needs {dims.chunks} chunks, but the model has only {len(names)} layers "
            "to cut between: lower --pp or --vpp"
        )
    cuts = config.placement.pipeline_cuts
    if cuts is None:
        images = 0 if encoder else typical_images(config)
        flops = layer_flops(config, of_context_part(typical_workload(config), dims.cp, images=images))
        cuts = even_cuts([flops[name] for name in names], dims.chunks)
    else:
        _check_cuts(cuts, count=len(names), chunks=dims.chunks)
    bounds = (0, *cuts, len(names))
    chunks = tuple(names[a:b] for a, b in pairwise(bounds))
    vision_tp = config.parallel.vision_tensor_model_parallel_size
    return Plan(dims=dims, chunks=chunks, placement=placement, encoder=encoder, vision_tp=vision_tp)


def _check_cuts(cuts: Sequence[int], *, count: int, chunks: int) -> None:
    if len(cuts) != chunks - 1:
        raise UserError(f"--pipeline-cuts has {len(cuts)} places, but {chunks} chunks (PP × VPP) need {chunks - 1}")
    if list(cuts) != sorted(set(cuts)) or (cuts and not 0 < cuts[0] <= cuts[-1] < count):
        raise UserError(
            f"--pipeline-cuts {' '.join(map(str, cuts))} must increase within 1 … {count - 1} "
            "(indices into the layer list that --dry-run prints)"
        )


def even_cuts(costs: Sequence[float], chunks: int) -> tuple[int, ...]:
    """Return the cuts into contiguous non-empty chunks that minimise the largest cost (exact dynamic programming).

    best[k][j] = min over i of max(best[k−1][i], cost of layers i…j): O(chunks · layers²), layers in the hundreds.
    A tiny cost per layer breaks ties towards equal layer counts.
    """
    weights = [cost + 1e-6 * (sum(costs) or 1.0) / len(costs) for cost in costs]
    prefix = [0.0, *accumulate(weights)]
    count = len(costs)
    best = [prefix[j] for j in range(count + 1)]
    choices: list[list[int]] = []
    for k in range(2, chunks + 1):
        row, chosen = [float("inf")] * (count + 1), [0] * (count + 1)
        for j in range(k, count + 1):
            for i in range(k - 1, j):
                worst = max(best[i], prefix[j] - prefix[i])
                if worst < row[j]:
                    row[j], chosen[j] = worst, i
        best = row
        choices.append(chosen)
    cuts: list[int] = []
    end = count
    for chosen in reversed(choices):
        end = chosen[end]
        cuts.append(end)
    return tuple(reversed(cuts))


def start_line(config: Config, *, continued: Path | None) -> str:
    """Return a line for the log: the weights that a run starts from, how many, those that are trained if these are
    fewer, and whether samples are synthetic.

    `continued` is the checkpoint that the run resumes from.
    """
    model, sources = config.model, [*starts_from(config).values()]
    count = sum(model_parameters(name, model) for name in layer_names(model))
    alone = scenario_of(config, Dims())
    trained = sum(
        model_parameters(name, model)
        if alone.trains(name)
        else sum(adapter_parameters(name, layout) for layout in alone.layouts)
        for name in layer_names(model)
    )
    fewer = f", of which {trained:,} are trained" if trained < count else ""
    if later := continued or config.checkpoint.load:
        origin = f"weights of {later}"
    elif sources:
        origin = f"weights of {' and '.join(sources)}" + ", projector of random weights" * new_projector(config)
    else:
        origin = "random weights"
    samples = "; trains on synthetic samples: --datasets names yours" if config.data.kind == "synthetic" else ""
    return f"{origin}, {count:,} parameters{fewer}{samples}"


def table(plan: Plan, config: Config) -> str:
    """Return the plan as a printable table: chunk, rank, layers with their indices, parameters, share of the FLOPs.

    A colocated encoder comes first, with "all" as its rank, or "all / N" if N ranks hold one copy together.
    """
    work = typical_workload(config)
    flops = layer_flops(config, work)
    total = sum(flops.values()) or 1.0
    rows = [("chunk", "rank", "layers", "parameters", "FLOPs")]
    start = 0
    placed = [(str(index), str(plan.dims.owner_of(index)), chunk) for index, chunk in enumerate(plan.chunks)]
    if plan.encoder:
        placed.insert(0, ("encoder", "all" if plan.vision_tp == 1 else f"all / {plan.vision_tp}", plan.encoder))
    for index, owner, chunk in placed:
        costs = [layer_cost(name, config.model, work) for name in chunk]
        share = sum(flops[name] for name in chunk) / total
        span = _summary(chunk)
        if chunk is not plan.encoder:
            span = f"[{start}-{start + len(chunk) - 1}] {span}"
            start += len(chunk)
        rows.append((index, owner, span, f"{sum(c.parameters for c in costs):,}", f"{share:.0%}"))
    degrees = {name: f"{name} {degree}" for name, degree in plan.dims.degrees.items()}
    experts = "".join(f", {degrees.pop(name)}" for name in ("EP", "ETP") if name in degrees)  # over the same processes
    order = f", schedule {plan.dims.schedule}" if plan.dims.schedule else ""
    title = f"plan: {' × '.join(degrees.values())} = {plan.dims.world} processes{experts}{order}"
    return "\n".join([title, *aligned(rows, left=(2,))])


def _summary(chunk: Sequence[str]) -> str:
    """Return the layers of a chunk as text: `vision.layers.0-3` for consecutive layers of one kind."""
    runs = [list(run) for _, run in groupby(chunk, key=kind_of)]
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{number_of(run[-1])}" for run in runs)
