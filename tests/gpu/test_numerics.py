"""The same step on a GPU and in fp32 on a CPU, with torch's layers and with Transformer Engine's."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu import model
from tests.gpu.model import BF16, require_fp8

TORCH = ("--transformer-impl", "torch")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tensor]:
    return model.reference([], tmp_path_factory.mktemp("reference"))


def test_fp32_is_the_cpus(world: Any, expected: Mapping[str, Tensor]) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    found = model.results(TORCH, world)
    assert abs(found["loss"] / expected["loss"] - 1) < 1e-5
    assert model.distance(found, expected, "logits") < 1e-4
    assert model.distance(found, expected, "gradient") < 1e-4


def test_bf16_is_near_fp32(world: Any, expected: Mapping[str, Tensor]) -> None:
    found = model.results([*TORCH, "--precision", "bf16"], world)
    assert abs(found["loss"] / expected["loss"] - 1) < 1e-3
    assert 1e-4 < model.distance(found, expected, "logits") < BF16
    assert 1e-4 < model.distance(found, expected, "gradient") < BF16


def test_transformer_engine_is_as_near_fp32_as_torch(
    world: Any, transformer_engine: Any, expected: Mapping[str, Tensor]
) -> None:
    """Fused kernels round in other places: twice torch's distance is allowed, and no more than bf16's."""
    torchs = model.results([*TORCH, "--precision", "bf16"], world)
    engines = model.results(["--transformer-impl", "te", "--precision", "bf16"], world)
    assert not torch.equal(torchs["logits 0"], engines["logits 0"]), "both sides ran the same layers"
    for kind in ("logits", "gradient"):
        ours, theirs = (model.distance(found, expected, kind) for found in (torchs, engines))
        assert theirs < min(2 * ours, BF16), f"{kind}: torch {ours:.2e}, Transformer Engine {theirs:.2e}"


def test_experts_in_fp8_are_near_bf16_in_one_step(
    world: Any, transformer_engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By Transformer Engine's grouped products. A token whose scores are close may take another expert."""
    require_fp8(world)
    mixture = "--num-experts 8 --set model.experts.ffn_hidden_size=128 model.experts.dense_layers=[0]".split()
    expected = model.reference(mixture, tmp_path_factory.mktemp("mixture"))
    fp8 = ["--transformer-impl", "te", "--precision", "bf16", "--fp8", "hybrid"]
    found = model.results([*mixture, *fp8], world)
    assert abs(found["loss"] / expected["loss"] - 1) < 0.01
    assert BF16 / 10 < model.distance(found, expected, "logits") < 0.3


def test_fp8_is_near_bf16_in_one_step(world: Any, transformer_engine: Any, expected: Mapping[str, Tensor]) -> None:
    """E4M3 rounds to 2^-4 of a value: forty roundings, all products' and so fewer than bf16's, come to 20 % at most."""
    require_fp8(world)
    found = model.results(["--transformer-impl", "te", "--precision", "bf16", "--fp8", "hybrid"], world)
    assert abs(found["loss"] / expected["loss"] - 1) < 0.01
    assert BF16 / 10 < model.distance(found, expected, "logits") < 0.2


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_transformer_engine_leaves_the_gradients_of_its_weights(transformer_engine: Any, kind: str) -> None:
    from megavlm.model.weight_gradients import WeightGradients, leave_weight_gradients

    options = {"bias": True, "params_dtype": torch.bfloat16, "device": "cuda"}
    plain: Any = getattr(transformer_engine, kind)(64, 96, **options)
    split: Any = deepcopy(plain)
    split.config = SimpleNamespace(fp8=None)
    gradients = WeightGradients()
    leave_weight_gradients(nn.ModuleList([split]), gradients)
    for micro_batch in range(2):  # weight passes lag behind
        x = torch.randn(32, 2, 64, device="cuda", dtype=torch.bfloat16)
        output = []
        for layer in (plain, split):
            given = x.clone().requires_grad_()
            with gradients.left_by(1, micro_batch):
                layer(given).square().sum().backward()
            output.append(given.grad)
        assert torch.equal(*output)
    assert split.weight.grad is None
    assert split.bias.grad is None
    for micro_batch in range(2):
        gradients.compute(1, micro_batch)
    for (name, ours), theirs in zip(split.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
