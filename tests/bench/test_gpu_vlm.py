"""`benchmarks/gpu_vlm.py` without a GPU: what it counts, its table, and all of it on toys; other benchmarks, small."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_vlm
import pytest
import torch

ROOT = Path(__file__).parents[2]
GIB = 2**30


# (bytes of a GPU, model): the shape and the language layers that three quarters of it take. An H100 has 79.2 GiB, an
# H200 139.8, a GH200 95.
CHOICES = {
    (79.2, "LLaVA-1.5-7B"): ("LLaVA-1.5-7B", 8),
    (95.0, "Qwen2.5-VL-7B"): ("Qwen2.5-VL-7B, 2 images", 5),  # four images leave room for a layer or two
    (139.8, "Qwen2.5-VL-7B"): ("Qwen2.5-VL-7B", 6),
}


@pytest.mark.parametrize(("gpu", "model"), CHOICES)
def test_the_choice_for_a_gpu_takes_three_quarters_of_it(gpu: float, model: str) -> None:
    """Weights, gradients, masters and moments are 18 bytes a parameter; what else there is, a step's activations."""
    g, memory = gpu_vlm.gpu_model, 0.75 * gpu * GIB
    shapes = next(shapes for shapes in g.models(small=False) if shapes[0].name.startswith(model))
    found = g.fitting(shapes, memory=memory)
    name, least = CHOICES[gpu, model]
    assert found.name == name
    assert found.num_layers >= least
    fits, over = (
        g.predicted_memory(found.with_layers(found.num_layers + more), precision="bf16", on_gpu=True) for more in (0, 1)
    )
    assert fits.total <= memory < over.total
    assert fits.model_state == pytest.approx(18 * their_parameters(found), rel=0.015)
    assert 0.15 * fits.total < fits.total - fits.model_state < 0.5 * fits.total


def their_parameters(shape: Any) -> int:
    """Of the same model in Transformers; LLaVA's has a vision layer that never runs."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(shape.theirs(shape))
    return sum(param.numel() for param in model.parameters())


def test_a_model_for_which_there_is_no_room_is_a_line_of_the_table() -> None:
    class NoWorkers:
        def machine(self, program: str) -> dict[str, Any]:
            return {"device": "small", "memory": 16 * GIB}

    options = argparse.Namespace(small=False, layers=None, memory_share=0.75)
    for shapes in gpu_vlm.gpu_model.models(small=False):
        assert gpu_vlm.gpu_model.fitting(shapes, memory=12 * GIB) is None
        (result,) = gpu_vlm.measure(shapes, gpu_vlm.chosen(**NONE), NoWorkers(), options=options, deadline=0.0)
        (row,) = gpu_vlm.rows_of(result, "small", judged=True)
        assert row.figure == "not measured: one language layer needs more than 12 GiB"


NONE = {"precision": "bf16", "ablate": False, "their_compile": False}


def sides_of() -> Any:
    return gpu_vlm.chosen(precision="bf16", ablate=True, their_compile=False)


def test_every_set_of_flags_is_one_that_a_run_takes() -> None:
    shape = gpu_vlm.gpu_model.models(small=False)[0][0].with_layers(2)
    configs = [gpu_vlm.gpu_model.run_config(shape, precision=s.precision, flags=s.flags) for s in sides_of()]
    assert all(one != configs[0] for one in configs[1:])
    assert configs[0].model == shape.model


def test_language_flops_are_six_per_parameter_and_token_and_attention() -> None:
    """LLaVA: 4 H² + 3 H·F per layer, 8,192 tokens; H·V for those of 446 of text in each sample of 1,024 alone; causal
    attention over samples.
    """
    shape = gpu_vlm.gpu_model.models(small=False)[0][0].with_layers(10)
    hidden, ffn, vocabulary = 4096, 11008, 32064
    products = 6 * (8192 * 10 * (4 * hidden**2 + 3 * hidden * ffn) + 8 * (1024 - 576 - 2) * hidden * vocabulary)
    attention = 3 * 10 * 2 * hidden * 8 * 1024**2
    norms = 0
    assert gpu_vlm.gpu_model.language_flops(shape) == pytest.approx(products + attention + norms, rel=1e-6)
    assert gpu_vlm.gpu_model.whole_flops(shape) > gpu_vlm.gpu_model.language_flops(shape)


def answer(seconds: float, gigabytes: float) -> dict[str, Any]:
    return {
        "step_seconds": [seconds, 1.1 * seconds, 0.9 * seconds],
        "language_seconds": [0.8 * seconds] * 3,
        "peak_bytes": gigabytes * GIB,
        "losses": [10.0, 9.0],
        "layers": "sdpa",
        "attention": ["flash"],
        "tokens": 9000,
        "positions": 10000,
        "data_seconds": [0.1 * seconds] * 3,
    }


def test_the_table_compares_with_targets() -> None:
    result = {
        "shape": "LLaVA",
        "layers": 19,
        "of": 32,
        "step_flops": 240e12,
        "language_flops": 200e12,
        "ablation": [],
        "predicted_bytes": {"megavlm bf16": 84 * GIB, "megavlm fp8": 84 * GIB},
        "answers": {
            "transformers autocast": [answer(1.0, 100), answer(0.9, 100)],
            "megavlm bf16": [answer(0.4, 80), answer(0.6, 80)],
            "transformers bf16": [answer(0.8, 60)],
            "megavlm fp8": [{"error": "no FP8 here"}],
            "megavlm bf16 of JPEG files": [answer(1.0, 80)],
        },
    }
    found = {row.what: row for row in gpu_vlm.rows_of(result, "NVIDIA H200", judged=True)}

    def figure(what: str) -> tuple[str, bool | None]:
        row = found[f"LLaVA: megavlm {what}"]
        return row.figure, row.met

    assert figure("bf16, times as fast as transformers autocast") == ("2.00 ×", True)  # 2.5 and 1.5
    assert figure("bf16, times as fast as transformers bf16") == ("2.00 ×", None)
    # the median of all steps is 0.49 s, of language parts 0.4 s
    assert figure("bf16, language part") == ("500 TFLOP/s", True)
    assert figure("bf16, peak memory over that of transformers autocast") == ("0.80", True)
    assert figure("bf16, peak memory over that of transformers bf16") == ("1.33", None)
    assert figure("bf16, predicted peak memory") == ("+5.0%", True)
    assert figure("fp8") == ("not measured: no FP8 here", None)
    assert figure("bf16 of JPEG files, useful tokens") == ("3,000 of 3,333 positions a second", None)
    assert figure("bf16 of JPEG files, waits for data") == ("10.0% of a step", None)
    assert figure("bf16 of JPEG files, positions over those of megavlm bf16") == ("0.50", None)
    assert figure("bf16, attention") == ("sdpa, flash", None)
    whole = 240 / 0.49
    assert figure("bf16, MFU of the whole step") == (f"{whole / 989:.1%}", None)
    assert "met" in gpu_vlm.table(list(found.values()))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_sides_compute_the_same_on_toys(precision: str, tmp_path: Path) -> None:
    """The loss of three steps from the same weights on the same samples, AdamW included; in bf16, that all run."""
    command = [sys.executable, "benchmarks/gpu_vlm.py", "--device", "cpu", "--small", "--rounds", "1", "--steps", "2"]
    command += ["--warm-up", "1", "--precision", precision, "--out", str(tmp_path / "out.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["results"]) == 3
    for result in found["results"]:
        answers = {name: each[0] for name, each in result["answers"].items()}
        ran = {name: each for name, each in answers.items() if "error" not in each}
        assert answers.keys() - ran.keys() <= {"megavlm fp8"}, answers
        if precision == "fp32":
            ours, theirs = (ran[f"{name} fp32"]["losses"] for name in ("megavlm", "transformers"))
            assert len(ours) == 3
            assert ours == pytest.approx(theirs, rel=1e-5)
            assert abs(ours[0] - ours[2]) > 1e-3 * ours[0]
            predicted, peak = result["predicted_bytes"]["megavlm fp32"], ran["megavlm fp32"]["peak_bytes"]
            assert predicted == pytest.approx(peak, rel=0.25)  # toys are mostly what the model leaves out
        for each in ran.values():
            assert len(each["language_seconds"]) == len(each["step_seconds"])
            assert min(each["language_seconds"]) > 0


RUNS = [
    "cpu_step.py --quick",
    "uploads.py --quick --store file://{folder}",
    "loss_memory.py --quick",
    "video.py --quick",
    "context.py --quick",
    "experts.py --quick",
    "schedules.py --quick",
    "optimizers.py --quick",
    "contrastive.py --quick",
    "placement.py --dry --rounds 1 --steps 1 --only frozen",
    "placement.py --dry --rounds 1 --steps 1 --only 112",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_a_benchmark_runs_to_its_end(command: str, tmp_path: Path) -> None:
    script, *flags = command.format(folder=tmp_path).split()
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *flags], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
