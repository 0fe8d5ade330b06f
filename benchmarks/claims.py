"""Predict what guides to distributed training claim of sharding strategies: a table of docs/reports/predictions.md.

    .venv/bin/python benchmarks/claims.py [--write]

The claims are those of five guides to training vision-language models (they cite DeepSpeed's, PyTorch's and Google
Cloud's pages). They name neither sequence length nor batch: we take 8 sequences of 2,048 tokens per
GPU and step, one in a micro-batch, and LLaVA-1.5. Nothing here is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tables import with_table

from megavlm.arch.dims import Dims, with_dims
from megavlm.arch.scenario import Sharding
from megavlm.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.auto import predict
from megavlm.planner.collectives import Group, group_of, ring
from megavlm.planner.hardware import PROFILES, Hardware, Link, profile
from megavlm.planner.step_time import StepEstimate
from megavlm.rules.defaults import resolve_model

DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "predictions.md"
GIB, GB = 2**30, 1e9
SEEN = 0.8  # of a network's rate that NCCL reaches, as in the profiles
REDUCER = Link(32e9 / 8 * SEEN, 20e-6)  # n1-highcpu-16, 32 Gbit/s


@dataclass(frozen=True)
class Row:
    claim: str
    claimed: str
    predicted: str


def network(gigabytes: float) -> Hardware:
    """Return nodes of eight A100 with so many GB/s between them."""
    base = PROFILES["a100"]
    return replace(base, far=replace(base.far, bandwidth=gigabytes * GB * SEEN / base.devices_per_node))


def step(
    model: ModelConfig, gpus: int, sharding: Sharding, hardware: Hardware, *, together: int | None = None
) -> StepEstimate:
    """Return the estimate of a step of a data-parallel run, of which `together` ranks share state (default: all)."""
    config = Config(
        model=model,
        precision=PrecisionConfig("bf16"),
        train=TrainConfig(seq_length=2048, global_batch_size=8 * gpus, micro_batch_size=1),
        data=DataConfig(kind="synthetic", images_per_sample=(2,), image_sizes=(336,)),
    )
    parallel = replace(
        config.parallel, data_parallel_sharding=sharding, hybrid_shard_size=together, overlap_grad_reduce=True
    )
    dims = Dims(dp=gpus)
    return predict(with_dims(replace(config, parallel=parallel), dims), dims, hardware)


def speed(
    model: ModelConfig, gpus: int, sharding: Sharding, hardware: Hardware, *, together: int | None = None
) -> float:
    """Return the steps per second of a data-parallel run; a step has as much for each GPU whatever their number."""
    return 1 / step(model, gpus, sharding, hardware, together=together).seconds


def state(model: ModelConfig, gpus: int, sharding: Sharding, *, together: int | None = None) -> float:
    """Return the GB of weights, gradients and optimizer on a rank."""
    return step(model, gpus, sharding, PROFILES["a100"], together=together).memory[0].model_state / GB


def language_model(parameters: float) -> ModelConfig:
    """Return LLaVA-1.5 whose language model has about this number of parameters."""
    base = published_model("llava_1_5_7b")
    layers = round((parameters - 0.57e9) / 202.4e6)  # a layer of Vicuna; the tower, embedding and output are 0.57e9
    return resolve_model(replace(base, language=replace(base.language, num_layers=layers)))


def memory() -> Iterator[Row]:
    small, large = published_model("llava_1_5_7b"), language_model(10e9)
    whole = state(small, 8, "none")
    stages: tuple[tuple[str, str, Sharding], ...] = (
        ("ZeRO-1", "4 ×", "optimizer"),
        ("ZeRO-2", "8 ×", "optimizer_gradients"),
    )
    for name, claimed, kind in stages:
        yield Row(f"{name}, state of many ranks: less by", claimed, f"{whole / state(small, 512, kind):.1f} ×")
    share = whole / state(small, 8, "full"), whole / state(small, 64, "full")
    yield Row("ZeRO-3: less by the number of ranks", "8 ×, 64 ×", f"{share[0]:.1f} ×, {share[1]:.1f} ×")
    yield Row("10B, ZeRO-2, 8 GPUs: state", "37.5 GB", f"{state(large, 8, 'optimizer_gradients'):.1f} GB")
    yield Row("7B, ZeRO-3, 8 GPUs: state", "15.1 GB", f"{state(small, 8, 'full'):.1f} GB")
    yield Row("7B, plain data parallelism: state", "48 GB", f"{whole:.0f} GB")
    saved = 1 - state(small, 8, "optimizer_gradients") / whole
    yield Row("7B, ZeRO-2 on 8 GPUs: state less by", "40 %", _percent(saved))


def strategies() -> Iterator[Row]:
    model, fast, slow = published_model("llava_1_5_7b"), PROFILES["a100"], network(25)
    stages: tuple[tuple[str, int, Sharding], ...] = (("ZeRO-2", 95, "optimizer_gradients"), ("ZeRO-3", 78, "full"))
    for name, claimed, kind in stages:
        cases = ((8, fast), (32, fast), (32, slow))
        shares = [speed(model, n, kind, links) / speed(model, n, "none", links) for n, links in cases]
        where = "8 GPUs; 32 at 200 GB/s; 32 at 25 GB/s"
        claim = f"7B, speed of {name} as a share of plain data parallelism: {where}"
        yield Row(claim, f"{claimed} %", "; ".join(map(_percent, shares)))
    alone = speed(model, 8, "full", fast)
    whole, hybrid = (
        [speed(model, 32, "full", links, together=together) / alone for links in (fast, slow)] for together in (32, 8)
    )
    claim = "of 32 GPUs, speed of a GPU as a share of one in 8: 200 GB/s; 25 GB/s"
    yield Row(f"7B, ZeRO-3 over all {claim}", "75 %", "; ".join(map(_percent, whole)))
    yield Row(f"7B, ZeRO-3 over each 8 (HSDP) {claim}", "90 %", "; ".join(map(_percent, hybrid)))
    gains = (f"+{_percent(ours / theirs - 1)}" for ours, theirs in zip(hybrid, whole, strict=True))
    yield Row("7B, 32 GPUs, HSDP over ZeRO-3: 200 GB/s; 25 GB/s", "+15 – 20 %", "; ".join(gains))
    small = language_model(2e9)
    alone = speed(small, 1, "none", fast)
    for name, claimed_gain, kind in (("plain", "3.8 ×", "none"), ("ZeRO-3", "3 ×", "full")):
        found = 4 * speed(small, 4, kind, fast) / alone
        yield Row(f"2B, {name}, 4 GPUs against one", claimed_gain, f"{found:.2f} ×")


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
    parts: list[str] = []
    steps: list[str] = []
    for nodes in (4, 8):
        servers = -(-nodes * 100 // 32)
        group = group_of(hardware, 8 * nodes, span=8 * nodes)
        size = 4 * 7.06e9
        before, after = ring(size, group), _with_servers(size, group, servers)
        parts.append(f"{before / after:.2f} × ({nodes} nodes)")
        whole = step(model, 8 * nodes, "none", hardware)
        steps.append(f"+{_percent(whole.seconds / (whole.seconds - before + after) - 1)}")
    yield Row("Reduction Server, all-reduce of 7B gradients: bytes/s against a ring", "2 ×", ", ".join(parts))
    yield Row("the same, speed of a step with nothing overlapped: 4 and 8 nodes", "+30 – 40 %", ", ".join(steps))


def bytes_sent() -> Iterator[Row]:
    """Yield the bytes of a parameter that a rank of many sends in a step of one micro-batch."""
    plain, ours = 2 * 4, 2 + 2 + 4
    yield Row(
        "ZeRO-3 sends, as a multiple of plain data parallelism",
        "1.5 ×",
        f"{ours / plain:.1f} × (gradients are fp32 here; {(2 + 2 + 2) / (2 * 2):.1f} × if they were bf16)",
    )


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def table() -> str:
    """Return the Markdown table."""
    rows = [*memory(), *strategies(), *reduction_server(), *bytes_sent()]
    lines = ["| claim | claimed | predicted |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {row.claim} | {row.claimed} | {row.predicted} |" for row in rows)])


def documented(text: str) -> str:
    """Return the document with today's table."""
    return with_table(text, "benchmarks/claims.py", table())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="Write the table to docs/reports/predictions.md, too.")
    print(table())
    if parser.parse_args().write:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
