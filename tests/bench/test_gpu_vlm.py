"""`benchmarks/gpu_vlm.py` without a GPU: what it counts, its table, and the whole of it on toys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GIB = 2**30


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_vlm  # type: ignore[import-not-found]

    return gpu_vlm


def test_samples_fill_a_sequence_of_8192_and_layers_the_memory(benchmark: Any) -> None:
    for shape in benchmark.gpu_model.shapes(small=False):
        assert shape.seq_length == 8192
        counts = [benchmark.gpu_model.layers_that_fit(shape, memory=size * GIB) for size in (88, 110, 1000)]
        assert counts[0] < counts[1] < counts[2] == shape.model.language.num_layers
        fits, over = (
            benchmark.gpu_model.predicted_memory(shape.with_layers(counts[1] + more), precision="bf16", on_gpu=True)
            for more in (0, 1)
        )
        assert fits.total <= 110 * GIB < over.total
        with pytest.raises(SystemExit, match="one layer needs more than 1 GiB"):
            benchmark.gpu_model.layers_that_fit(shape, memory=GIB)


def test_language_flops_are_six_per_parameter_and_token_and_attention(benchmark: Any) -> None:
    """LLaVA: 4 H² + 3 H·F per layer and H·V once, 8,192 tokens; causal attention over samples of 1,024."""
    shape = benchmark.gpu_model.shapes(small=False)[0].with_layers(10)
    hidden, ffn, vocabulary = 4096, 11008, 32064
    products = 6 * 8192 * (10 * (4 * hidden**2 + 3 * hidden * ffn) + hidden * vocabulary)
    attention = 3 * 10 * 2 * hidden * 8 * 1024**2
    norms = 0
    assert benchmark.gpu_model.language_flops(shape) == pytest.approx(products + attention + norms, rel=1e-6)
    assert benchmark.gpu_model.whole_flops(shape) > benchmark.gpu_model.language_flops(shape)


def answer(seconds: float, gigabytes: float) -> dict[str, Any]:
    return {
        "step_seconds": [seconds, 1.1 * seconds, 0.9 * seconds],
        "language_seconds": [0.8 * seconds] * 3,
        "peak_bytes": gigabytes * GIB,
        "losses": [10.0, 9.0],
    }


def test_the_table_compares_with_targets(benchmark: Any) -> None:
    result = {
        "shape": "LLaVA",
        "layers": 19,
        "of": 32,
        "step_flops": 240e12,
        "language_flops": 200e12,
        "predicted_bytes": {"megavlm bf16": 84 * GIB, "megavlm fp8": 84 * GIB},
        "answers": {
            "transformers autocast": [answer(1.0, 100), answer(0.9, 100)],
            "megavlm bf16": [answer(0.4, 80), answer(0.6, 80)],
            "transformers bf16": [answer(0.8, 60)],
            "megavlm fp8": [{"error": "no FP8 here"}],
        },
    }
    found = {row.what: row for row in benchmark.rows_of(result, "NVIDIA H200", judged=True)}

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
    whole = 240 / 0.49
    assert figure("bf16, MFU of the whole step") == (f"{whole / 989:.1%}", None)
    assert "met" in benchmark.table(list(found.values()))


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
    assert len(found["results"]) == 2
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
            assert all(
                0 < part < whole for part, whole in zip(each["language_seconds"], each["step_seconds"], strict=True)
            )
