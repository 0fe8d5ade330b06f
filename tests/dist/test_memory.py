"""The memory model against tensors counted while a real step runs, on one process and on two, device and host apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from megavlm.arch.ends import vocabulary_shard
from megavlm.arch.kinds import local_parameters
from megavlm.backend import host_copies as host
from megavlm.optim import stores
from megavlm.planner.auto import predict
from megavlm.planner.hardware import PROFILES
from megavlm.planner.host_memory import HostMemory
from tests.support.covering import fast_and_slow
from tests.support.live_bytes import step_counts
from tests.support.pool import Pools
from tests.support.training import started

# Equal images and layers wide enough that what is left out (positions, statistics of norms) is small.
MODEL = (
    "--train-iters 2 --global-batch-size 8 --micro-batch-size 2 --seq-length 128 --no-tensorboard --no-save --set "
    "model.vision.num_layers=3 model.vision.hidden_size=128 model.vision.ffn_hidden_size=256 "
    "model.vision.num_attention_heads=4 model.vision.image_size=64 model.vision.patch_size=8 "
    "model.projector.pixel_shuffle=2 model.language.num_layers=4 model.language.hidden_size=192 "
    "model.language.ffn_hidden_size=512 model.language.num_attention_heads=6 model.language.num_query_groups=2 "
    "model.language.vocab_size=512 --images-per-sample 1"
)
RICH = (
    "--set model.language.tie_embeddings=true model.language.qk_norm=true model.language.add_qkv_bias=true "
    "model.vision.normalization=RMSNorm model.vision.activation=swiglu model.vision.position_embedding=rope2d "
    "model.vision.qk_norm=head model.vision.layer_scale=true model.projector.input_norm=true "
    "model.vision.pre_norm=true model.vision.class_token=true"
)

GEMMA = (
    "--seq-length 256 --set model.language.window_size=32 model.language.full_attention_layers=[3] --image-token 9 "
    "--set model.language.bidirectional_images=true model.language.post_norms=true "
    "model.language.apply_layernorm_1p=true model.language.activation=geglu "
    "--projector-kind linear --set model.projector.merge=average model.projector.input_norm=true "
    "model.projector.normalization=RMSNorm"
)

GLM4V = (
    "--set model.vision.pre_norm=true model.vision.norm_before_position=true model.vision.normalization=RMSNorm "
    "--projector-kind gated --set model.projector.merge=convolution model.projector.merge_channels=192 "
    "model.projector.merge_bias=true model.projector.bias=false model.language.mrope_section=[3,3,2] "
    "model.language.rotary_percent=0.5 model.language.rotary_interleaved=true model.language.post_norms=true "
    "model.projector.hidden_size=384"
)

QWEN3_5 = (
    "--set model.language.linear_attention_layers=[0,1,2] model.language.linear_num_key_heads=2 "
    "model.language.linear_num_value_heads=4 model.language.linear_key_head_dim=64 "
    "model.language.linear_value_head_dim=96 model.language.attention_output_gate=true model.language.qk_norm=true"
)
LATENTS = (
    "--set model.language.num_query_groups=6 model.language.kv_channels=48 model.language.kv_lora_rank=96 "
    "model.language.q_lora_rank=128 model.language.qk_pos_emb_head_dim=16 model.language.v_head_dim=40"
)
EXAONE = (
    "--set model.language.input_norms=false model.language.post_norms=true model.language.qk_norm=true "
    "model.language.window_size=32 model.language.full_attention_layers=[3] model.language.no_rope_layers=[3] "
    "model.vision.num_query_groups=2 model.vision.position_embedding=rope2d"
)
PALIGEMMA = (
    "--seq-length 256 --set model.language.window_size=32 model.language.full_attention_layers=[3] "
    "model.language.bidirectional_prefix=true model.language.post_norms=true model.language.attention_softcap=50 "
    "model.language.final_softcap=30 model.language.activation=geglu"
)
GEMMA4 = (
    "--seq-length 256 --set model.language.window_size=32 model.language.full_attention_layers=[1,3] "
    "model.language.global_kv_channels=64 model.language.global_query_groups=1 model.language.keys_as_values=true "
    "model.language.value_norm=true model.language.qk_norm=true model.language.post_norms=true "
    "model.language.layer_scalar=true model.language.activation=geglu model.language.bidirectional_windows=true "
    "--image-token 9 --set model.vision.position_embedding=axes_rope2d model.vision.qk_norm=head_and_values "
    "model.vision.post_norms=true model.vision.activation=geglu model.vision.normalization=RMSNorm "
    "--projector-kind linear --set model.projector.merge=standardized_average model.projector.input_norm=true "
    "model.projector.normalization=UnitRMSNorm"
)
ENCODER_FREE = (
    "--set model.vision.num_layers=0 model.vision.encoder_free=true model.vision.patch_size=16 "
    "model.vision.position_embedding=axes_rope2d model.vision.axis_positions=16 model.vision.pre_norm=true "
    "model.vision.norm_before_position=true"
)
COHERE = (
    "--set model.language.parallel_block=true model.language.normalization=LayerNorm model.language.logit_scale=0.3 "
    "model.language.rotary_interleaved=true model.language.no_rope_layers=[3] --projector-kind swiglu"
)
# Two thirds of the tower's layers run behind its merger.
MINICPM = "--set model.vision.merger_layer=0 model.projector.pixel_shuffle=4 model.projector.input_norm=true"
QFORMER = (
    "--set model.projector.pixel_shuffle=1 --projector-kind qformer --set "
    "model.projector.connectors.qformer.num_layers=6 model.projector.connectors.qformer.hidden_size=192 "
    "model.projector.connectors.qformer.num_attention_heads=6 model.projector.connectors.qformer.ffn_hidden_size=512 "
    "model.projector.connectors.qformer.num_queries=32"
)
AUDIO = (
    "--set model.audio.num_layers=3 model.audio.hidden_size=128 model.audio.ffn_hidden_size=256 "
    "model.audio.num_attention_heads=4 model.audio_token=9 data.sound_frames=[200]"
)
# Experts whose rows outweigh the rest; even, as other loads differ from rank to rank.
EXPERTS = (
    "--seq-length 512 --num-experts 8 --set model.experts.router_topk=8 model.experts.ffn_hidden_size=128 "
    "model.experts.dense_layers=[0] --moe-router-force-load-balancing"
)
SHARED = "--set model.experts.shared_ffn_hidden_size=256 model.experts.shared_gate=true --moe-aux-loss-coeff 1e-3"

CASES = {
    "qwen3.5": (1, QWEN3_5),
    "tp2-qwen3.5-bf16": (2, f"--tp 2 {QWEN3_5} --precision bf16"),
    "latents": (1, LATENTS),
    "tp2-latents-bf16": (2, f"--tp 2 {LATENTS} --precision bf16"),
    "exaone4.5": (1, EXAONE),
    "paligemma": (1, PALIGEMMA),
    "gemma4": (1, GEMMA4),
    "tp2-gemma4-bf16": (2, f"--tp 2 {GEMMA4} --precision bf16"),
    "tp4-exaone4.5-bf16": (4, f"--tp 4 {EXAONE} --precision bf16"),
    "encoder-free": (1, ENCODER_FREE),
    "cohere": (1, COHERE),
    "tp2-cohere-bf16": (2, f"--tp 2 {COHERE} --precision bf16"),
    "audio": (1, AUDIO),
    "audio-maps": (1, f"{AUDIO} --set model.audio.conv_channels=16 model.audio.chunk_frames=100"),
    "tp2-audio-full": (2, f"--tp 2 {AUDIO} --recompute-granularity full"),
    "pp2-vpp2-audio-bf16": (2, f"--pp 2 --vpp 2 {AUDIO} --precision bf16"),
    "minicpm-v": (1, MINICPM),
    "tp2-minicpm-v-full-bf16": (2, f"--tp 2 {MINICPM} --recompute-granularity full --precision bf16"),
    "qformer-full": (1, f"{QFORMER} --recompute-granularity full"),
    "experts-bf16": (1, f"{EXPERTS} {SHARED} --precision bf16"),
    "ep2-bf16": (2, f"--ep 2 {EXPERTS} --precision bf16"),
    "tp2-ep2": (2, f"--tp 2 --ep 2 {EXPERTS} {SHARED} --precision bf16"),
    "tp2-glm4v": (2, f"--tp 2 {GLM4V}"),
    "gemma": (1, GEMMA),
    "further": (1, "--set model.language.mtp_layers=2"),
    "pp2-vpp2-further-bf16": (2, "--pp 2 --vpp 2 --precision bf16 --set model.language.mtp_layers=1"),
    "bf16": (1, "--precision bf16"),
    "frozen-vision": (1, "--freeze vision"),
    "pp2-language-alone": (2, "--pp 2 --set model.vision.num_layers=0 --images-per-sample 0"),
    "rich": (1, RICH),
    "large-vocabulary-bf16": (1, "--set model.language.vocab_size=8192 --precision bf16"),
    "tp2": (2, "--tp 2"),
    "pp2-vpp2": (2, "--pp 2 --vpp 2"),
    "pp2-zb-h1": (2, "--pp 2 --schedule zb-h1"),
    "pp2-zb-h1-experts": (2, f"--pp 2 {EXPERTS} --schedule zb-h1"),
    "pp2-rich-tied": (2, f"--pp 2 {RICH} --precision bf16"),
    "dp2-no-zero": (2, "--data-parallel-sharding none"),
    "dp2-gradients-bf16": (2, "--precision bf16 --grad-reduce-in-bf16"),
    "dp2-zero3": (2, "--precision bf16 --data-parallel-sharding full"),
    "dp4-zero3-secondary": (4, "--precision bf16 --data-parallel-sharding full --secondary-shard-size 2"),
    "dp2-zero3-codes": (
        2,
        "--precision bf16 --data-parallel-sharding full --compress-gradients int8 --compress-weights int8",
    ),
    "tp2-muon": (2, "--tp 2 --precision bf16 --optimizer muon --ema-decay 0.9"),
    "dp2-colocated-muon": (2, "--placement colocated --optimizer muon"),
    "bf16-lion": (1, "--precision bf16 --optimizer lion --ema-decay 0.9"),
    "offload-optimizer": (1, "--precision bf16 --offload optimizer"),
    "offload-activations-full": (1, "--offload activations --recompute-granularity full --precision bf16"),
    "dp2-zero3-offload-everything": (
        2,
        "--precision bf16 --data-parallel-sharding full --offload optimizer activations parameters",
    ),
    "cp2-bf16": (2, "--cp 2 --precision bf16"),
    "cp2-full-hybrid": (4, "--cp 2 --recompute-granularity full --precision bf16 --hybrid-shard-size 2"),
    "cp2-colocated-full": (2, "--cp 2 --placement colocated --recompute-granularity full --precision bf16"),
    "pp2-colocated": (2, "--pp 2 --placement colocated"),
    "pp2-colocated-recomputed": (
        2,
        "--pp 2 --placement colocated --encoder-chunk-patches 128 --set placement.encoder_keep_chunks=1 "
        "--recompute-granularity full",
    ),
    "dp2-colocated-zero3": (2, "--placement colocated --data-parallel-sharding full --precision bf16"),
    "dp2-zero3-frozen": (
        2,
        "--precision bf16 --data-parallel-sharding full --freeze vision --recompute-granularity full",
    ),
}


@contextlib.contextmanager
def offloaded_apart(counter: Any) -> Iterator[None]:
    """Count what offloading allocates on the host as the host's: here both are one memory."""
    allocate = counter.on_host(host.empty_on_host)
    with patch.object(host, "empty_on_host", allocate), patch.object(stores, "empty_on_host", allocate):
        yield


def measured_and_predicted(argv: list[str], run_dir: str) -> tuple[tuple[int, int], tuple[float, float], int, int]:
    """(measured peaks of device and host, predicted memory of both, parameters there are, and counted) of this rank."""
    with started(argv, run_dir) as run:
        counts = step_counts(run.engine, run.data_loader.next_step().batches, offloaded_apart)
        config, plan, rank = run.config, run.plan, run.engine.groups.coords.pp
        step = predict(config, plan.dims, PROFILES["cpu"])
        host = step.host[rank] if step.host else HostMemory()
        # Of parameters that ranks share all rows.
        there = sum(p.numel() for chunk in run.engine.model_chunks for p in chunk.parameters())
        chunks = [plan.chunks[index] for index in plan.dims.chunks_of(rank)]
        ranks = plan.dims.ep * plan.dims.expert_tp
        counted = sum(local_parameters(name, config.model, plan.dims.tp, ranks) for names in chunks for name in names)
        counted += sum(local_parameters(name, config.model, plan.vision_tp) for name in plan.encoder)
        if config.model.language.tie_embeddings:
            copies = sum("output" in names and "embedding" not in names for names in chunks)
            counted += copies * vocabulary_shard(config.model, plan.dims.tp)
    return (counts.peak, counts.host_peak), (step.memory[rank].total, host.total), there, counted


FAST = ("experts-bf16", "dp2-zero3", "rich", "pp2-colocated")


@pytest.mark.parametrize("name", fast_and_slow(FAST, CASES))
def test_predicted_peak_is_within_a_tenth(pools: Pools, name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    world, flags = CASES[name]
    ranks = pools(world).run(measured_and_predicted, [*MODEL.split(), *flags.split()], str(tmp_path / "run"))
    for rank, (peaks, memories, there, counted) in enumerate(ranks):
        assert counted == there, f"rank {rank}: parameters"
        for place, peak, memory in zip(("device", "host"), peaks, memories, strict=True):
            assert memory == pytest.approx(peak, rel=0.1), f"{rank}, {place}: {memory / max(1, peak):.3f} of {peak}"
