"""Weight gradients that layers add to their sums themselves: stand-ins do to `main_grad`, its marks and the flag of a
step's first micro-batch what Transformer Engine's linear layers do. Two replicas, several micro-batches each, have the
curve of one process without any of it.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.covering import fast_and_slow, slow
from tests.support.flags import MODELS
from tests.support.pool import Pools
from tests.support.training import LEAN, assert_same_curve, metrics, train

BIASES = "--set model.vision.qk_norm=head model.language.add_qkv_bias=true model.language.tie_embeddings=true"
LORA = "--lora-rank 4 --lora-targets language --freeze projector"
PASSES = "--placement colocated --encoder-chunk-patches 40"  # several a step; all but the last are recomputed
CASES = {  # model, layout and whether gradients are added in place
    "recomputed": (BIASES, "--recompute-granularity full --overlap-grad-reduce", True),
    "passes": (BIASES, PASSES, True),
    "lora": (LORA, PASSES, True),  # of the vision tower alone
    "frozen": (MODELS["frozen-vision"], "", True),
    "unfused": (BIASES, "--no-gradient-accumulation-fusion", False),
    "zero2": (BIASES, "--data-parallel-sharding optimizer_gradients", False),
    "offloaded": (BIASES, "--offload activations --overlap-grad-reduce", False),
}
FAST = ("recomputed", "passes", "offloaded")


def train_with_te(argv: list[str], run_dir: str) -> dict[str, int]:
    """How often weight gradients were added in place, and how often they overwrote what was there."""
    from tests.support import stand_ins

    added = stand_ins._AddsToMainGrad.added
    added.clear()
    with stand_ins.transformer_engine():
        train(argv, run_dir)
    return dict(added)


@pytest.mark.parametrize("name", fast_and_slow(FAST, CASES))
def test_no_gradient_is_lost_or_counted_twice(pools: Pools, alone: Any, tmp_path: Path, name: str) -> None:
    model, layout, fused = CASES[name]
    argv = [*LEAN, "--no-save", "--train-iters", "4", "--global-batch-size", "8", *model.split()]
    ranks = pools(2).run(train_with_te, [*argv, *layout.split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), alone(argv))
    for added in ranks:
        assert added.keys() == ({"added"} if fused else set())


def train_in_fp8(argv: list[str], run_dir: str) -> dict[str, int]:
    """With layers that megatron-core tells of first micro-batches; FP8 itself is left out."""
    from megavlm.model import te
    from megavlm.train import build

    with patch.object(te, "_fp8_region", lambda layer_config: nullcontext()), patch.object(build, "check_device"):
        return train_with_te(argv, run_dir)


def test_fp8_layers_overwrite_once_a_step(pools: Pools, tmp_path: Path) -> None:
    """Steps of four micro-batches, of which the first stage's are forward before the first goes backward."""
    argv = [*LEAN, "--no-save", *"--train-iters 4 --precision bf16 --fp8 hybrid --pp 2".split()]
    apart = pools(2).run(train_in_fp8, [*argv, "--no-gradient-accumulation-fusion"], str(tmp_path / "apart"))
    assert apart == [{}, {}]
    first, last = pools(2).run(train_in_fp8, argv, str(tmp_path / "fused"))
    assert_same_curve(metrics(tmp_path / "fused"), metrics(tmp_path / "apart"))
    layers = (first["overwritten"] + last["overwritten"]) / (4 * 4)  # steps, linear layers of each
    assert layers == 3  # the language model's
    assert first["added"] + last["added"] == 4 * 4 * (3 * 3 + 1 * 4)


def train_with_apex(argv: list[str], run_dir: str) -> int:
    """As `train`, where megatron-core found NVIDIA Apex's extension. Returns how often its kernel was called."""
    from types import ModuleType

    from megatron.core.tensor_parallel import layers

    calls = []

    class Extension(ModuleType):
        @staticmethod
        def wgrad_gemm_accum_fp32(inputs, grad_output, main_grad) -> None:
            """Inputs [T, in], gradients [T, out] of one type, main_grad [out, in] in fp32, which it adds to."""
            assert inputs.dim() == grad_output.dim() == 2
            assert inputs.dtype == grad_output.dtype
            main_grad.addmm_(grad_output.t().float(), inputs.float())
            calls.append(main_grad)

    apex = Extension("fused_weight_gradient_mlp_cuda")
    with (
        patch.object(layers, apex.__name__, apex, create=True),
        patch.object(layers, "_grad_accum_fusion_available", True),
    ):
        train(argv, run_dir)
    return len(calls)


@pytest.mark.parametrize(
    ("flags", "blocks"),  # of the vocabulary, in each backward pass
    [
        ("--overlap-grad-reduce --set execution.loss_chunk_tokens=1", range(4, 8)),
        slow("--set model.language.tie_embeddings=true", range(1)),
        slow("--data-parallel-sharding full", range(1)),
    ],
)
def test_apex_adds_up_the_gradient_of_the_output_layer(pools: Pools, tmp_path: Path, flags: str, blocks: range) -> None:
    argv = [*LEAN, *"--no-save --train-iters 4 --global-batch-size 8".split(), *flags.split()]
    pools(1).run(train, [*argv, "--no-gradient-accumulation-fusion"], str(tmp_path / "one"))
    for calls in pools(2).run(train_with_apex, argv, str(tmp_path / "two")):
        assert blocks[0] <= calls / (4 * 4) <= blocks[-1]  # steps, micro-batches of a rank
    assert_same_curve(metrics(tmp_path / "two"), metrics(tmp_path / "one"))
