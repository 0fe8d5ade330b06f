"""The program as ranks of GPU runs start it, on a device that is not there (`device.py`), over NCCL that is not there.

What it finds: tensors on the wrong device, shapes that do not fit what is sent, collectives on the host's tensors, and
places where a training step makes the host wait for the device. What it cannot: numbers, kernels, speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake.build import shim
from tests.support.data_files import sources_of, write_llava, write_text, write_tokenizer
from tests.support.flags import MODELS
from tests.support.training import SMALL

ROOT = Path(__file__).parents[2]
TINY = (
    "--set model.vision.num_layers=2 model.language.num_layers=3 --train-iters 1 --lr-warmup-iters 0 --precision "
    "bf16 --no-save"
)
PACKED = "--images-per-sample 1 --image-sizes --seq-length 96 --packing-window 16 --num-workers 0"
QWEN3 = f"{MODELS['qwen3-vl']} --set model.language.num_layers=4"
DEMO = "--recipe demo --lr-wsd-decay-iters 1"

# name → (rank, world, flags)
CASES = {
    "packed": (0, 1, "FILES"),
    "qwen3-vl, two rows": (2, 8, f"{QWEN3} --tp 2 --pp 2 --vpp 2 --global-batch-size 8 --micro-batch-size 2"),
    "colocated, saved": (1, 4, "--placement colocated --tp 2 --save"),
}
SLOW = {
    "fp16, offloaded": (1, 2, "--precision fp16 --offload activations optimizer --save"),
    "zero-3, offloaded": (1, 2, "--data-parallel-sharding full --offload activations optimizer --seq-length 64"),
    "zero-3, parameters offloaded": (
        1,
        2,
        "--data-parallel-sharding full --offload activations optimizer parameters --seq-length 64 "
        "--global-batch-size 2",  # of more micro-batches the host adds gradients, and waits for them
    ),
    "pp2, offloaded": (0, 2, "--pp 2 --offload activations --recompute-granularity full --seq-length 64"),
    "zero-3, last stage": (3, 4, "--data-parallel-sharding full --pp 2 --save"),
    "qk-clip": (1, 2, "FILES --qk-clip --optimizer muon --recompute-granularity full"),
    "zero-2": (1, 2, "--data-parallel-sharding optimizer_gradients --recompute-granularity full"),
    "hsdp": (3, 4, "--hybrid-shard-size 2"),
    "zero-3, codes": (
        1,
        4,
        "--data-parallel-sharding full --secondary-shard-size 2 --compress-gradients int8 --compress-weights fp8 "
        "--set parallel.compress_group_size=2",
    ),
    "zero-3, second shards": (1, 4, "--data-parallel-sharding full --secondary-shard-size 2"),
    "tp2-pp2-dp2": (7, 8, "--tp 2 --pp 2 --save"),
    "tp2-pp2-dp2, overlapped": (1, 8, "--tp 2 --pp 2 --overlap-grad-reduce --overlap-param-gather"),
    "pp2-vpp2, tiles": (1, 2, f"{MODELS['llava-onevision']} --pp 2 --vpp 2"),
    "qwen2.5-vl": (0, 2, f"{MODELS['qwen2.5-vl']} --tp 2 --micro-batch-size 2"),
    "qwen2.5-vl, shared keys": (
        0,
        2,
        f"{MODELS['qwen2.5-vl']} --tp 2 --set model.language.num_attention_heads=3 model.language.num_query_groups=1 "
        "model.language.kv_channels=12 model.language.ffn_hidden_size=61 model.vision.ffn_hidden_size=47",
    ),
    "smolvlm": (0, 1, f"{MODELS['smolvlm']} --recompute-granularity full"),
    "fp8, emulated": (0, 2, "--fp8 e4m3 --fp8-parts vision language --pp 2 --recompute-granularity full"),
    "lora, frozen": (1, 2, "--lora-rank 4 --freeze vision --tp 2"),
    "colocated stages": (1, 2, "--placement colocated --pp 2 --vision-tp 2"),
    "dropout": (0, 2, "--hidden-dropout 0.1 --attention-dropout 0.1 --tp 2 --recompute-granularity full"),
    "packed, tp2-pp2": (0, 4, "FILES --tp 2 --pp 2"),
    "encoded ahead": (
        1,
        4,
        "--placement colocated --pp 2 --tp 2 --freeze vision projector --encode-ahead --train-iters 2 --save",
    ),
    "cached features": (0, 2, "FILES --placement colocated --tp 2 --freeze vision projector --vision-cache CACHE"),
    "answers": (
        0,
        1,
        f"{DEMO} --precision bf16 --train-iters 1 --lr-warmup-iters 0 --set evaluation.eval_samples=1 --no-save",
    ),
}

# What a step has to ask for: its own numbers, with the gradient norm (fp16: the scale, and whether all is finite).
MAY_WAIT = (
    "chained.py prepare_grads",
    "chained.py prepare_grads > optimizer.py _unscale_main_grads_and_check_for_nan",
    "build_optimizer.py loss_scale",
    "tolist at step_result.py sum_over_ranks",
    "feature_cache.py _raw",  # pixels are hashed on the host
    "feature_cache.py put",
)

Outcomes = Callable[[dict[str, Any]], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Outcomes:
    """Runs cases, all of a kind in one process."""
    library = shim(Path(request.config.cache.mkdir("fake")))
    if library is None:
        pytest.skip("no C++ compiler: autograd cannot follow a device that torch was not built for")
    data = tmp_path_factory.mktemp("data")
    write_tokenizer(data / "tokenizer")
    write_llava(data, samples=30)
    write_text(data, lines=30)
    files = [*sources_of(data), *PACKED.split()]
    known: dict[str, dict[str, Any]] = {}

    def run(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
        if next(iter(cases)) not in known:
            asked = []
            for name, (rank, size, flags) in cases.items():
                argv = [*SMALL, *TINY.split()] if "--recipe" not in flags else []
                argv += files if "FILES" in flags else []
                argv += flags.replace("FILES", "").replace("CACHE", str(data / "cache")).split()
                asked.append({"name": name, "rank": rank, "size": size, "argv": argv})
            command = [sys.executable, "-m", "tests.fake.drive", str(library), str(tmp_path_factory.mktemp("runs"))]
            done = subprocess.run(
                command,
                input=json.dumps(asked),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                text=True,
                capture_output=True,
                timeout=900,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            found = [json.loads(line) for line in done.stdout.splitlines()]
            known.update({outcome["name"]: outcome for outcome in found})
        return known

    return run


def check(outcome: dict[str, Any]) -> None:
    assert outcome["error"] is None, f"{outcome['error']}\n{outcome['trace']}"
    assert outcome["waits"], "a step waits at least for its own numbers: nothing was watched"
    waits = {where: count for where, count in outcome["waits"].items() if not where.endswith(MAY_WAIT)}
    assert not waits, f"a step waits for the device: {waits}"
    # Twice: two micro-batches have images to cache, and some cases have two steps.
    assert max(outcome["waits"].values()) <= 2, outcome["waits"]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_of_a_gpu_run(name: str, outcomes: Outcomes) -> None:
    check(outcomes(CASES)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_ranks_of_gpu_runs(name: str, outcomes: Outcomes) -> None:
    outcome = outcomes(SLOW)[name]
    check(outcome)
    assert bool(outcome["fetched"]) == ("parameters" in name), "offloaded rows, for each pass"
