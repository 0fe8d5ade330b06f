"""Predict runs that others published: the rows of docs/reports/predictions.md.

    .venv/bin/python benchmarks/published_runs.py

Nothing of the planner was fitted to these runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import placement_paper

from megavlm.arch.dims import Dims, dims_of, with_dims
from megavlm.arch.kinds import step_flops
from megavlm.arch.workload import times, typical_workload
from megavlm.config.schema import (
    Config,
    DataConfig,
    ExecutionConfig,
    PrecisionConfig,
    ProjectorConfig,
    TrainConfig,
    VisionConfig,
)
from megavlm.families import published_model
from megavlm.planner.auto import predict
from megavlm.planner.hardware import PROFILES, profile
from megavlm.rules.defaults import resolve_model

MEGATRON = {"name": "gpt_7_1b", "world": 96, "batch": 576, "seq_length": 4096}  # layout and batch are not published
LLAMA = {"name": "llama3_70b", "world": 64, "batch": 128, "seq_length": 8192}
# NVIDIA's table of long sequences: tokens → GPUs, TP, CP, TFLOP/s of a GPU. Batches of 4M tokens, as its B200 table's.
LLAMA2_LONG = {
    2**14: (16, 2, 1, 660),
    2**15: (32, 2, 2, 610),
    2**16: (64, 4, 2, 574),
    2**17: (128, 4, 4, 555),
    2**18: (256, 4, 8, 549),
    2**19: (512, 8, 16, 549),
    2**20: (1024, 8, 32, 536),
}
NO_VISION = VisionConfig(num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, image_size=8)
LOONGFORGE_IMAGES = ((1, 448), (2, 896), (4, 896), (6, 1008))  # of a sample: how many, and their side; not published


@dataclass(frozen=True)
class Rates:
    tflops: float  # of one GPU
    tokens: float  # tokens/s of one GPU

    @property
    def mfu(self) -> float:
        peak = profile("h100").peak
        assert peak is not None
        return self.tflops * 1e12 / peak


def rates(
    *,
    name: str,
    world: int,
    batch: int,
    seq_length: int,
    degrees: dict[str, Any],
    micro_batch: int = 1,
    fp8: Any = "none",
) -> Rates:
    """Return the rates of a text-only step on H100s."""
    config = Config(
        model=published_model(name),
        precision=PrecisionConfig("bf16", fp8=fp8, fp8_recipe="delayed"),  # of all published runs in FP8
        train=TrainConfig(seq_length=seq_length, global_batch_size=batch, micro_batch_size=micro_batch),
        execution=ExecutionConfig(loss_chunk_tokens=seq_length * micro_batch),  # theirs have all logits in memory
        data=DataConfig(kind="synthetic", images_per_sample=(0,)),
    )
    config = replace(config, parallel=replace(config.parallel, **degrees))
    seconds = predict(config, dims_of(config, world=world), profile("h100")).seconds
    flops = step_flops(config, times(typical_workload(config), batch))
    return Rates(flops / seconds / world / 1e12, seq_length * batch / seconds / world)


def mixture_rates(name: str, dims: Dims, *, batch: int, micro_batch: int = 1, recompute: Any = "none") -> Rates:
    """Return the rates of a text-only step of a mixture of experts on H100s, all experts loaded alike."""
    model = published_model(name)
    experts = replace(model.experts, router_force_load_balancing=True)
    config = Config(
        model=resolve_model(replace(model, vision=NO_VISION, projector=ProjectorConfig("linear"), experts=experts)),
        precision=PrecisionConfig("bf16"),
        train=TrainConfig(seq_length=4096, global_batch_size=batch, micro_batch_size=micro_batch),
        execution=ExecutionConfig(recompute_granularity=recompute),
        data=DataConfig(kind="synthetic", images_per_sample=(0,)),
    )
    config = with_dims(config, dims)
    config = replace(config, parallel=replace(config.parallel, overlap_grad_reduce=True))
    seconds = predict(config, dims, profile("h100")).seconds
    flops = step_flops(config, times(typical_workload(config), batch))
    return Rates(flops / seconds / dims.world / 1e12, 4096 * batch / seconds / dims.world)


def mixture_lines() -> Iterator[str]:
    small = Dims(dp=8, ep=8)
    for recompute in ("none", "full"):
        found = [
            mixture_rates("qwen3_vl_30b_a3b", small, batch=512, micro_batch=samples, recompute=recompute).tflops
            for samples in (1, 2, 4)
        ]
        shown = ", ".join(f"{each:.0f}" for each in found)
        yield f"Qwen3-30B-A3B, EP8, micro-batch 1, 2, 4, recompute {recompute}: {shown} TFLOP/s"
    for ep in (32, 8):
        run = mixture_rates("qwen3_vl_235b_a22b", Dims(tp=2, pp=8, vpp=4, dp=16, ep=ep), batch=2048)
        yield f"Qwen3-235B-A22B, TP2 PP8 VPP4 EP{ep}: {run.tflops:.0f} TFLOP/s"


def lines() -> Iterator[str]:
    for tp in (1, 2, 4):
        for samples in (1, 2):
            found = [
                rates(
                    **MEGATRON,  # type: ignore[arg-type]
                    degrees={"tensor_model_parallel_size": tp, "overlap_grad_reduce": overlap},
                    micro_batch=samples,
                ).mfu
                for overlap in (False, True)
            ]
            yield f"Megatron-LM 7.1B, TP{tp}, micro-batch {samples}: {found[0]:.1%} MFU, overlapped {found[1]:.1%}"
    degrees = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 8,
        "virtual_pipeline_model_parallel_size": 5,
        "overlap_grad_reduce": True,
    }
    for fp8 in ("hybrid", "none"):
        run = rates(**LLAMA, degrees=degrees, fp8=fp8)  # type: ignore[arg-type]
        yield f"Llama-3-70B, FP8 {fp8}: {run.tflops:.0f} TFLOP/s, {run.tokens:,.0f} tokens/s a GPU"
    yield from long_lines()
    layout = placement_paper.Layout("qwen2_5_vl_7b", 4, 2)
    for gpu in ("h100", "a100"):
        gains = [
            placement_paper.gains(placement_paper.run_of(layout, count, side, 32), layout, PROFILES[gpu]).than_glued
            for count, side in LOONGFORGE_IMAGES
        ]
        sizes = ", ".join(
            f"{gain:.2f} × ({n} of {side}²)" for gain, (n, side) in zip(gains, LOONGFORGE_IMAGES, strict=True)
        )
        yield f"LoongForge, {gpu}: {sizes}"
    yield from mixture_lines()


def long_lines() -> Iterator[str]:
    """Yield NVIDIA's rates of Llama-2-7B in FP8 with long sequences, and the predicted ones.

    It counts whole squares for causal attention: its row of 4,096 tokens, 780 TFLOP/s and 16,934 tokens/s, says so.
    """
    model = published_model("llama2_7b").language
    for length, (world, tp, cp, theirs) in LLAMA2_LONG.items():
        degrees = {"tensor_model_parallel_size": tp, "context_parallel_size": cp, "overlap_grad_reduce": True}
        run = rates(
            name="llama2_7b", world=world, batch=2**22 // length, seq_length=length, degrees=degrees, fp8="hybrid"
        )
        flops = 6 * 6.607e9 + 12 * model.num_layers * model.hidden_size * length  # of a token
        tokens = theirs * 1e12 / flops
        yield (
            f"Llama-2-7B, {length:,} tokens, {world} GPUs, TP{tp} CP{cp}: {tokens:,.0f} tokens/s a GPU published, "
            f"{run.tokens:,.0f} predicted ({run.tokens / tokens - 1:+.0%}), {run.mfu:.0%} MFU"
        )


def main() -> None:
    for line in lines():
        print(line)


if __name__ == "__main__":
    main()
