"""Predict what guides to distributed training claim with a number: a table of docs/reports/predictions.md.

    .venv/bin/python benchmarks/claims.py [--write]

The claims are those of five guides to training vision-language models (they cite DeepSpeed's, PyTorch's and Google
Cloud's pages). They name neither sequence length nor batch: we take 8 sequences of 2,048 tokens per
GPU and step, one in a micro-batch, and LLaVA-1.5. What is measured is that of records in `benchmarks/records/`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tables import with_table

import recipes
from megavlm.arch.dims import Dims, with_dims
from megavlm.arch.kinds import model_parameters, step_flops
from megavlm.arch.layers import VISION_LAYER, kind_of, layer_names
from megavlm.arch.scenario import Recompute, Sharding, scenario_of
from megavlm.arch.schedules import PipelineShape, simulate, uniform
from megavlm.arch.workload import times, typical_workload
from megavlm.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.advice import ADVICE, predicted
from megavlm.planner.auto import predict
from megavlm.planner.candidates import Space
from megavlm.planner.collectives import Group, group_of, ring
from megavlm.planner.cost import coded_bytes, layer_seconds
from megavlm.planner.hardware import MACHINES, PROFILES, SHEETS, Hardware, Link, profile
from megavlm.planner.search import search
from megavlm.planner.step_time import StepEstimate
from megavlm.resilience.young_daly import LLAMA3_PER_GPU_HOUR, FailingJob
from megavlm.rules.defaults import resolve_model

DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "predictions.md"
RECORDS = Path(__file__).parent / "records"
GB, GBIT = 1e9, 1e9 / 8
SEEN = 0.8  # of a network's rate that NCCL reaches, as in the profiles
REDUCER = Link(32 * GBIT * SEEN, 20e-6)  # n1-highcpu-16, 32 Gbit/s
NEAR = 1.15  # times by which a prediction may differ from a claim to agree with it; from a range by 5 %
STAGES: tuple[Sharding, ...] = ("none", "optimizer", "optimizer_gradients", "full")
Claimed = Sequence[float | tuple[float, float]]  # numbers, or ranges


@dataclass(frozen=True)
class Row:
    claim: str
    claimed: str
    predicted: str
    verdict: str


def row(claim: str, claimed: Claimed, found: Sequence[float], unit: str, says: str = "", *, digits: int = 0) -> Row:
    """Return a row of the table. Its verdict is whether each prediction is near what is claimed or within its range, or
    else on which side; `says` names the cause, or what was measured.
    """

    def side(claim: float | tuple[float, float], value: float) -> int:
        low, high = (claim[0] * 0.95, claim[1] * 1.05) if isinstance(claim, tuple) else (claim / NEAR, claim * NEAR)
        return (value > high) - (value < low)

    def shown(value: float | tuple[float, float]) -> str:
        if isinstance(value, tuple):
            return "–".join(map(shown, value))
        text = f"{value:,.{digits}f}" if value >= 1 or not value else f"{value:.{max(digits, 2)}g}"
        return text.rstrip("0").rstrip(".") if "." in text else text

    sides = {side(*pair) for pair in zip(claimed, found, strict=True)}
    verdict = {0: "agrees", 1: "more", -1: "less"}[sides.pop()] if len(sides) == 1 else "partly"
    said, ours = ("; ".join(map(shown, values)) for values in (claimed, found))
    return Row(claim, f"{said} {unit}", ours, f"{verdict}: {says}" if says else verdict)


def network(gigabytes: float) -> Hardware:
    """Return nodes of eight A100 with so many GB/s between them."""
    base = PROFILES["a100"]
    return replace(base, far=replace(base.far, bandwidth=gigabytes * GB * SEEN / base.devices_per_node))


def config_of(model: ModelConfig, gpus: int) -> Config:
    """Return the run of a model that all claims are predicted for: two images of 336² or what a model cuts them to."""
    unit = model.vision.patch_size * model.projector.pixel_shuffle
    return Config(
        model=model,
        precision=PrecisionConfig("bf16"),
        train=TrainConfig(seq_length=2048, global_batch_size=8 * gpus, micro_batch_size=1),
        data=DataConfig(kind="synthetic", images_per_sample=(2,), image_sizes=(336 // unit * unit,)),
    )


def step(
    model: ModelConfig,
    gpus: int,
    sharding: Sharding,
    hardware: Hardware,
    *,
    together: int | None = None,
    tp: int = 1,
    offload: tuple[str, ...] = (),
    recompute: Recompute = "none",
) -> StepEstimate:
    """Return the estimate of a step of a data-parallel run, of which `together` ranks share state (default: all)."""
    config = config_of(model, gpus)
    parallel = replace(
        config.parallel, data_parallel_sharding=sharding, hybrid_shard_size=together, overlap_grad_reduce=True
    )
    execution = replace(config.execution, offload=offload, recompute_granularity=recompute)
    dims = Dims(tp=tp, dp=gpus // tp)
    return predict(with_dims(replace(config, parallel=parallel, execution=execution), dims), dims, hardware)


def speed(model: ModelConfig, gpus: int, sharding: Sharding, hardware: Hardware, **layout: Any) -> float:
    """Return the steps per second of a data-parallel run; a step has as much for each GPU whatever their number."""
    return 1 / step(model, gpus, sharding, hardware, **layout).seconds


def state(model: ModelConfig, gpus: int, sharding: Sharding, *, together: int | None = None) -> float:
    """Return the GB of weights, gradients and optimizer on a rank."""
    return step(model, gpus, sharding, PROFILES["a100"], together=together).memory[0].model_state / GB


def peak(model: ModelConfig, gpus: int, sharding: Sharding, *offload: str) -> float:
    """Return the GB of a rank's whole memory."""
    return step(model, gpus, sharding, PROFILES["a100"], offload=offload).peak / GB


def mfu(model: ModelConfig, gpus: int, sharding: Sharding, *, tp: int = 1) -> float:
    """Return the percentage of the A100s' peak that a run has."""
    config, hardware = config_of(model, gpus), PROFILES["a100"]
    work = times(typical_workload(config), config.train.global_batch_size)
    assert hardware.peak is not None
    return 100 * step_flops(config, work) * speed(model, gpus, sharding, hardware, tp=tp) / gpus / hardware.peak


@cache
def language_model(parameters: float) -> ModelConfig:
    """Return LLaVA-1.5 whose language model has about this number of parameters."""
    base = published_model("llava_1_5_7b")
    layers = round((parameters - 0.57e9) / 202.4e6)  # a layer of Vicuna; the tower, embedding and output are 0.57e9
    return resolve_model(replace(base, language=replace(base.language, num_layers=layers)))


def weights(model: ModelConfig, names: Sequence[str]) -> float:
    """Return the GB of layers' weights in 16 bits."""
    return 2 * sum(model_parameters(name, model) for name in names) / GB


def record(name: str, *keys: str) -> Any:
    """Return an entry of the last record of a benchmark that has it."""
    found: Any = None
    for line in (RECORDS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        entry: Any = json.loads(line)
        for key in keys:
            entry = entry.get(key) if isinstance(entry, dict) else None
        found = entry if entry is not None else found
    return found


def memory() -> Iterator[Row]:
    small, large = published_model("llava_1_5_7b"), language_model(10e9)
    whole, each = state(small, 8, "none"), 7.06  # GB, billions of parameters
    held = step(small, 8, "none", PROFILES["a100"]).memory[0]
    yield row(
        "7B: weights; gradients; optimizer",
        (14, 14, 56),
        [part / GB for part in (held.weights, held.gradients, held.optimizer)],
        "GB",
        "gradients and master weights are fp32 here",
    )
    yield row("7B, activations of a micro-batch", ((10, 100),), [held.activations / GB], "GB", "one sequence of 2,048")
    per = [state(small, 8, kind) / each for kind in STAGES]
    yield row(
        "bytes per parameter, 8 GPUs: plain; ZeRO-1; 2; 3", (12, 5, 3, 0.19), per, "B", "0.19 is a slip", digits=1
    )
    ways: tuple[tuple[int, Sharding], ...] = (
        *((512, "optimizer"), (512, "optimizer_gradients")),
        *((8, "full"), (64, "full")),
    )
    less = [whole / state(small, *way) for way in ways]
    yield row("state less by: ZeRO-1; 2, many ranks; 3, 8 ranks; 64", (4, 8, 8, 64), less, "×", digits=1)
    yield row("10B, ZeRO-2, 8 GPUs: state", (37.5,), [state(large, 8, "optimizer_gradients")], "GB", digits=1)
    both = [whole, state(small, 8, "full")]
    yield row("7B, 8 GPUs, state: plain; ZeRO-3", (48, 15.1), both, "GB", "48 is not 16 bytes of 7B", digits=1)
    saved = 100 * (1 - state(small, 8, "optimizer_gradients") / whole)
    yield row("7B, ZeRO-2 on 8 GPUs: state less by", (40,), [saved], "%")
    over = [state(small, 8, "full"), state(small, 32, "full"), state(small, 32, "full", together=8)]
    yield row("7B, ZeRO-3: 8 GPUs; 32; each 8 of 32 (HSDP)", (10, 2.5, 10), over, "GB", "state alone", digits=1)
    found = [
        peak(small, 8, "none"),
        peak(small, 8, "optimizer_gradients"),
        peak(small, 8, "full"),
        peak(small, 8, "full", "optimizer", "parameters"),
        peak(small, 8, "full", "optimizer=nvme:/disk", "parameters"),
    ]
    claim = "7B, 8 GPUs, all memory: plain; ZeRO-2; 3; 3 and host; 3 and disk"
    yield row(claim, (100, 45, 25, 12, 8), found, "GB")
    yield row("7B, one GPU, all memory", ((30, 40),), [peak(small, 1, "none")], "GB")
    tight = [
        step(each, gpus, "optimizer_gradients", PROFILES["a100"], recompute="full").peak / GB
        for each, gpus in ((small, 8), (language_model(15e9), 32))
    ]
    claim = "ZeRO-2 fits 40 GB, recomputed: 7B, 8 GPUs; 15B, 32"
    yield row(claim, ((0, 36.8),) * 2, tight, "GB", "8 % stay free", digits=1)
    tiny = published_model("qwen3_vl_2b")
    setups = [peak(tiny, 1, "none"), peak(tiny, 4, "none"), peak(tiny, 4, "none"), peak(tiny, 4, "full")]
    claim = "2B: one GPU; 4, plain; with gradient cache; ZeRO-3"
    yield row(claim, (40, 12, 10, 5), setups, "GB", "plain data parallelism shards nothing")
    eight = published_model("qwen3_vl_8b")
    found = [0.1 * whole / each, state(eight, 8, "none"), state(eight, 8, "full")]
    yield row("plain: 100M; 8B; ZeRO-3 on 8: 8B", (2, 6, 4), found, "GB", "weights of 8B alone are 17")
    frozen = replace(tiny, freeze=("vision",))
    found = [state(frozen, 1, "none"), state(frozen, 8, "optimizer_gradients")]
    yield row("Qwen3-VL-2B, frozen tower: one GPU; ZeRO-2 on 8", (30, 8), found, "GB")
    base = language_model(2e9)
    two = resolve_model(replace(base, vision=replace(base.vision, num_layers=79)))  # a tower of a billion
    found = [state(model, 1, "none") for model in (replace(two, freeze=("vision",)), two)]
    yield row("2B with a tower of 1B: frozen; trained", (34, 48), found, "GB")
    names = layer_names(small)
    language, tower = names.index("language.layers.0"), names.index("vision.layers.12")
    bounds = (0, tower, language - 1, language + 16, len(names))
    stages = [weights(small, names[a:b]) for a, b in pairwise(bounds)]
    yield row("weights of four stages, two of them vision", (1, 1.5, 6, 6), stages, "GB", digits=1)
    seventy = recipes.read(recipes.FOLDER / "vlm_70b.yaml").config.model
    towers = [name for name in names if kind_of(name) == VISION_LAYER]
    found = [weights(seventy, layer_names(seventy)), weights(small, towers)]
    found.insert(1, found[0] / 2 * whole / each)
    yield row("70B: weights; state; weights of ViT-L/14", (140, 840, 0.43), found, "GB", digits=1)
    crops = [count * (224 // 14) ** 2 * 1024 * 2 / 1e6 for count in (1, 9)]
    textures = [count * 13 * 256**2 * 4 / 1e6 for count in (1, 32)]
    claim = "CLIP's features: 224²; nine; 13 channels of 256²; of 32 images"
    yield row(claim, (0.5, 4.7, 3.3, 106), [*crops, *textures], "MB", digits=1)


def strategies() -> Iterator[Row]:
    model, fast, slow = published_model("llava_1_5_7b"), PROFILES["a100"], network(25)
    where = "8 GPUs; 32 at 200; 25 GB/s"
    cases = ((8, fast), (32, fast), (32, slow))
    stages: tuple[tuple[str, float | tuple[float, float], Sharding], ...] = (
        ("ZeRO-2", 95, "optimizer_gradients"),
        ("ZeRO-3", (75, 80), "full"),
    )
    for name, claimed, kind in stages:
        shares = [100 * speed(model, n, kind, links) / speed(model, n, "none", links) for n, links in cases]
        yield row(f"7B, speed of {name} over plain: {where}", (claimed,) * 3, shares, "%")
    seventy = recipes.read(recipes.FOLDER / "vlm_70b.yaml").config.model
    sizes: tuple[tuple[str, ModelConfig, int, Claimed], ...] = (
        ("7B, 8", model, 8, (0.95, 0.85, 0.4)),
        ("13B, 8", language_model(13e9), 8, (0.93, 0.82, 0.45)),
        ("70B, 64", seventy, 64, (0.9, 0.5)),
    )
    for name, each, gpus, ratios in sizes:
        base = speed(each, gpus, "full", fast)
        host = speed(each, gpus, "full", fast, offload=("optimizer", "parameters")) / base
        second = [speed(each, gpus, "optimizer_gradients", fast) / base] if len(ratios) == 3 else []
        which = "ZeRO-2; 3; 3 and host" if second else "ZeRO-3; and host"
        yield row(f"{name} GPUs, speed over FSDP's: {which}", ratios, [*second, 1.0, host], "×", digits=2)
    alone = speed(model, 8, "full", fast)
    whole, hybrid = (
        [100 * speed(model, 32, "full", links, together=together) / alone for links in (fast, slow)]
        for together in (32, 8)
    )
    claim = "speed of one of 32 GPUs over one of 8, at 200; 25 GB/s: ZeRO-3; HSDP"
    yield row(claim, (75, 75, 90, 90), [*whole, *hybrid], "%")
    gains = [100 * (ours / theirs - 1) for ours, theirs in zip(hybrid, whole, strict=True)]
    yield row("HSDP over ZeRO-3, at 200; 25 GB/s", ((15, 20),) * 2, gains, "% more")
    rates = [100 * speed(model, 64, "full", network(gbit / 8)) / alone for gbit in (1000, 400, 100)]
    claim = "ZeRO-3, speed of one of 64 over one of 8, at 1,000; 400; 100 Gbit/s"
    yield row(claim, ((85, 115), (0, 85), (0, 85)), rates, "%", "1,000 is needed")
    small = language_model(2e9)
    one, plain = speed(small, 1, "none", fast), speed(small, 4, "none", fast)
    scenario = scenario_of(config_of(small, 4), Dims(dp=4), on_gpu=True)
    forward = scenario.micro_batches * sum(layer_seconds(name, scenario, fast).forward for name in scenario.names)
    cached = 1 / (1 / plain + forward)
    found = [4 * rate / one for rate in (plain, cached, speed(small, 4, "full", fast))]
    cost = 100 * record("contrastive", "4096 pairs", "first") / record("contrastive", "4096 pairs", "second")
    measured = f"measured: the cache adds {cost:.0f} %"
    yield row("2B, 4 GPUs over one: plain; gradient cache; ZeRO-3", (3.8, 3.5, 3), found, "×", measured, digits=2)


def pipelines() -> Iterator[Row]:
    """Yield the claims on idle time, on the tower's time, on MFU and on communication."""
    idle = []
    for micro_batches in (8, 1):
        shape = PipelineShape("1f1b", 4, 1, micro_batches)
        idle.append(100 * simulate(shape, uniform([1] * 4, [2] * 4, micro_batches=micro_batches)).bubble)
    lines = (RECORDS / "schedules.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [[json.loads(line)[case]["1f1b"] for line in lines] for case in ("PP4 m=4", "PP4 m=16")]
    seen = [min(each, key=lambda run: run["measured_s"])["measured"] for each in runs]
    measured = f"measured with 4; 16: {'; '.join(f'{100 * value:.0f}' for value in seen)}"
    yield row("1F1B, 4 stages, idle: 8 micro-batches; one", (9.4, 50), idle, "%", measured, digits=1)
    model, fast = published_model("llava_1_5_7b"), PROFILES["a100"]
    scenario = scenario_of(config_of(model, 1), Dims(), on_gpu=True)
    seconds = {name: layer_seconds(name, scenario, fast).forward for name in scenario.names}
    tower = sum(value for name, value in seconds.items() if kind_of(name) == VISION_LAYER)
    ratio = tower / sum(value for name, value in seconds.items() if name.startswith("language."))
    yield row("tower's forward pass over the language model's", (1.5,), [ratio], "×", digits=2)
    large = recipes.read(recipes.FOLDER / "vlm_175b.yaml")
    shares = [
        mfu(language_model(2e9), 1, "none"),
        mfu(model, 8, "optimizer_gradients"),
        mfu(language_model(13e9), 64, "optimizer", tp=8),
        100 * large.mfu,
    ]
    ranges = ((50, 60), (45, 55), (40, 50), (30, 45))
    claim = "MFU: one GPU; DP8; TP8·DP8; TP4·PP8·DP8 (H100)"
    yield row(claim, ranges, shares, "%", f"measured on one: {_measured_mfu()}")
    recipe = recipes.read(recipes.FOLDER / "vlm_70b.yaml")
    (advice,) = (each for each in ADVICE if (each.billions, each.gpus) == (70, 64))
    sent = [_communication(recipe, space) for space in (advice.space, Space(cp=(1,), offload=()))]
    claim = "70B, 64 H100, communication: TP8·PP2·DP4; the planner's"
    yield row(claim, ((0, 30),) * 2, sent, "%", "below 30 is claimed")


def _measured_mfu() -> str:
    """Return the MFU of whole bf16 steps of LLaVA-1.5-7B as docs/reports/measured.md has it."""
    rows = (RECORDS.parents[1] / "docs" / "reports" / "measured.md").read_text(encoding="utf-8")
    found = re.findall(r"\| (?:LLaVA-1.5-7B|H200), bf16: whole step, MFU \| ([\d.]+)", rows)
    return " (H100), ".join(found) + " (H200)"


def _communication(recipe: recipes.Recipe, space: Space) -> float:
    """Return the percentage of a step that the fastest layout of a space communicates."""
    found = search(recipe.config, recipe.gpus, recipe.hardware, space=space, top=1)
    best = predicted(found.best[0], found.evaluator)
    return 100 * sum(value for term, value in best.seconds.items() if term.startswith("communication")) / best.step


def _with_servers(size: float, group: Group, servers: int) -> float:
    """Return the seconds of an all-reduce of `size` bytes by `servers` that add up what nodes send, and send sums back
    meanwhile; within each node gradients are scattered before and gathered after it.
    """
    g, near, far = group.per_node, group.near, group.far
    within = (g - 1) * near.latency + size * (g - 1) / g / near.bandwidth
    worker, server = size / g / far.bandwidth, size * group.nodes / servers / REDUCER.bandwidth
    return 2 * within + far.latency + REDUCER.latency + max(worker, server)


def reduction_server() -> Iterator[Row]:
    """Yield the claims of Google Cloud, for its A2 machines (100 Gbit/s) with as much bandwidth in reducers."""
    hardware, model = profile("a2-highgpu-8g"), published_model("llava_1_5_7b")
    parts: list[float] = []
    steps: list[float] = []
    for nodes in (4, 8):
        servers = -(-nodes * 100 // 32)
        group = group_of(hardware, 8 * nodes, span=8 * nodes)
        size = 4 * 7.06e9
        before, after = ring(size, group), _with_servers(size, group, servers)
        parts.append(before / after)
        whole = step(model, 8 * nodes, "none", hardware)
        steps.append(100 * (whole.seconds / (whole.seconds - before + after) - 1))
    claim = "Reduction Server over a ring, bytes/s: 4; 8 nodes"
    yield row(claim, (2, 2), parts, "×", digits=2)
    yield row("the same, steps with nothing overlapped", ((30, 40),) * 2, steps, "% more")


def bytes_sent() -> Iterator[Row]:
    """Yield the bytes of a parameter that a rank of many sends in a step of one micro-batch."""
    plain, ours, code = 2 * 4, 2 + 2 + 4, coded_bytes("int8")
    yield row("ZeRO-3 sends, over plain", (1.5,), [ours / plain], "×", "gradients are fp32 here; 1.5 if bf16", digits=1)
    # Weights in both passes, or with a second shard (hpZ) in one; gradients.
    less = [2 / code, 4 / code, ours / (code + code)]
    sent = (record("links", "rates", "1 Gbit/s", f"ZeRO-3, {how}", "megabytes") for how in
            ("exact", "gradients and weights int8"))  # fmt: skip
    measured = f"INT8; on gloo, which sends sums twice, no hpZ: {next(sent) / next(sent):.1f}"
    claim = "ZeRO++ sends less: weights; gradients; all with hpZ"
    yield row(claim, (2, 4, 4), less, "×", measured, digits=1)


def machines() -> Iterator[Row]:
    """Yield the claims on links and prices of Google Cloud's machines."""
    highgpu, ultragpu = MACHINES["a2-highgpu-8g"], MACHINES["a2-ultragpu-8g"]
    links = [2 * SHEETS["a100"].nvlink, highgpu.network_gbit / 8]
    yield row("NVLink of an A100; network of an a2-highgpu-8g", (600, 25), links, "GB/s", "100 Gbit/s", digits=1)
    assert highgpu.on_demand
    assert highgpu.spot
    assert ultragpu.on_demand
    prices = [highgpu.on_demand, ultragpu.on_demand]
    yield row("an hour of an a2-highgpu-8g; a2-ultragpu-8g", (32.77, 55.73), prices, "$", "listed 2026-09", digits=2)
    less = 100 * (1 - highgpu.spot / highgpu.on_demand)
    yield row("a spot machine costs less by", ((60, 80),), [less], "%")
    # Two preemptions in twelve hours; saves and restarts as `megavlm plan --machine` assumes.
    job = FailingJob(8, LLAMA3_PER_GPU_HOUR + 4 / 24 / 8, stall=2.0, restart=300.0, detection=90.0)
    hours = 8 / job.goodput(job.best_interval)
    cheap, listed = hours * 7.86, hours * highgpu.spot
    yield row("8 hours of work with 4 preemptions a day", (12,), [hours], "h", digits=1)
    found = [cheap, 100 * (1 - cheap / (8 * 32.77)), 100 * (1 - listed / (8 * highgpu.on_demand))]
    claim = "the same at $7.86 an hour: cost; saved; saved at 2026-09's prices"
    yield row(claim, (94.32, 64, 64), found, "$; %; %", digits=1)


def table() -> str:
    """Return the Markdown table."""
    rows = [*memory(), *strategies(), *pipelines(), *reduction_server(), *bytes_sent(), *machines()]
    lines = ["| claim | claimed | predicted | verdict |", "|---|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {each.claim} | {each.claimed} | {each.predicted} | {each.verdict} |" for each in rows)]
    )


def documented(text: str) -> str:
    """Return the document with today's table."""
    return with_table(text, "benchmarks/claims.py", table())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="Write the table to docs/reports/predictions.md, too.")
    given, found = parser.parse_args(), table()
    print(found)
    if given.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(with_table(text, "benchmarks/claims.py", found), encoding="utf-8")


if __name__ == "__main__":
    main()
