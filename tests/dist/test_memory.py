"""The memory model against tensors counted while a real step runs, on one process and on two, device and host apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from megavlm.arch.ends import vocabulary_shard
from megavlm.arch.kinds import rank_parameters
from megavlm.arch.scenario import encoder_scenario, scenario_of
from megavlm.backend import host_copies as host
from megavlm.optim import stores
from megavlm.planner.auto import predict
from megavlm.planner.hardware import PROFILES
from megavlm.planner.host_memory import HostMemory
from tests.support.covering import fast_and_slow
from tests.support.data_files import write_preferences, write_tokenizer
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
TABLE = yaml.safe_load(Path(__file__).with_name("memory.yaml").read_text(encoding="utf-8"))
CASES = {name: case.format_map(TABLE["models"]).split(" | ") for name, case in TABLE["cases"].items()}


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
        there = sum(param.numel() for chunk in run.engine.model_chunks for param in chunk.parameters())
        chunks = [plan.chunks[index] for index in plan.dims.chunks_of(rank)]
        scenario = scenario_of(config, plan.dims)
        counted = sum(rank_parameters(name, scenario) for names in chunks for name in names)
        counted += sum(rank_parameters(name, encoder_scenario(scenario, plan.vision_tp)) for name in plan.encoder)
        if config.model.language.tie_embeddings:
            copies = sum("output" in names and "embedding" not in names for names in chunks)
            counted += copies * vocabulary_shard(config.model, plan.dims.tp)
    return (counts.peak, counts.host_peak), (step.memory[rank].total, host.total), there, counted


FAST = ("experts-bf16", "dp2-zero3", "rich", "pp2-colocated")


@pytest.mark.parametrize("name", fast_and_slow(FAST, CASES))
def test_predicted_peak_is_within_a_tenth(pools: Pools, name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    world, flags = CASES[name]
    if "FOLDER" in flags:
        write_preferences(tmp_path, records=40, most_images=0)
        write_tokenizer(tmp_path / "tokenizer")
        flags = flags.replace("FOLDER", str(tmp_path))
    ranks = pools(int(world)).run(measured_and_predicted, [*MODEL.split(), *flags.split()], str(tmp_path / "run"))
    for rank, (peaks, memories, there, counted) in enumerate(ranks):
        assert counted == there, f"rank {rank}: parameters"
        for place, peak, memory in zip(("device", "host"), peaks, memories, strict=True):
            assert memory == pytest.approx(peak, rel=0.1), f"{rank}, {place}: {memory / max(1, peak):.3f} of {peak}"
