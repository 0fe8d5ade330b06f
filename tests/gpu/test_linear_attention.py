"""The kernels of linear attention on a GPU: against the rule in fp64 on a CPU, and in a whole model's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megavlm.model.delta_rule import Sequences, causal_convolution, gated_delta_rule
from tests.gpu import model
from tests.gpu.model import BF16, require_fp8

LENGTHS = (1, 63, 64, 65, 200, 7, 128)
HYBRID = (
    "--set model.language.linear_attention_layers=[0,2] model.language.linear_num_key_heads=2 "
    "model.language.linear_num_value_heads=4 model.language.linear_key_head_dim=64 "
    "model.language.linear_value_head_dim=64 model.language.linear_conv_kernel_dim=4 "
    "model.language.attention_output_gate=true model.language.qk_norm=true model.language.apply_layernorm_1p=true "
    "model.language.rotary_percent=0.5 model.language.mtp_layers=1"
).split()


@pytest.fixture(scope="module", autouse=True)
def kernels(world: Any) -> None:
    if not world.is_cpu:
        pytest.importorskip("fla", reason="flash-linear-attention is not installed: pip install '.[linear]'")


def results(run: Callable[..., Tensor], inputs: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return the output and the gradients of all inputs, as fp64 on the CPU."""
    given = [each.to(device).requires_grad_() for each in inputs]
    out = run(*given, Sequences(tuple(accumulate(LENGTHS, initial=0)), device))
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [out, *torch.autograd.grad(out, given, direction.to(out))]


@pytest.mark.parametrize("width", [64, 128])
def test_the_rule_is_the_one_in_fp64(width: int, world: Any) -> None:
    """Of packed sequences, one of a single token, with decays from none to nearly all."""
    generator = torch.Generator().manual_seed(1)
    tokens, heads = sum(LENGTHS), 4
    wide = [torch.randn(tokens, heads, width, generator=generator).bfloat16() for _ in range(3)]
    decay, beta = torch.rand(2, tokens, heads, generator=generator)
    inputs = [*wide, -5 * decay**4, beta.bfloat16()]
    found = results(gated_delta_rule, inputs, world.device)
    expected = results(gated_delta_rule, [each.double() for each in inputs], torch.device("cpu"))
    for name, ours, exact in zip(("output", *"qkvgb"), found, expected, strict=True):
        off = float((ours.detach().cpu().double() - exact).norm() / exact.norm())
        print(f"{name}: {off:.1e}")
        assert off < BF16, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_convolution_is_the_one_in_fp64(dtype: torch.dtype, world: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(LENGTHS), 384, generator=generator).to(dtype)
    weight = torch.randn(256, 4, generator=generator).to(dtype)

    def run(x: Tensor, weight: Tensor, sequences: Sequences) -> Tensor:
        return causal_convolution(x[:, 64:320], weight, sequences)  # channels of a wider projection

    found = results(run, [x, weight], world.device)
    expected = results(run, [x.double(), weight.double()], torch.device("cpu"))
    for ours, exact in zip(found, expected, strict=True):
        assert (ours.cpu().double() - exact).norm() < (0.01 if dtype == torch.bfloat16 else 1e-5) * exact.norm()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return model.reference(HYBRID, tmp_path_factory.mktemp("fp32"))


@pytest.mark.parametrize("layers", ["torch", "te"])
def test_a_hybrid_model_is_as_near_fp32_as_on_a_cpu(
    layers: str, world: Any, expected: Mapping[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In bf16, of which the CPU keeps the rule itself in fp32: twice its distance is allowed."""
    if layers == "te":
        request.getfixturevalue("transformer_engine")
    flags = [*HYBRID, "--precision", "bf16", "--transformer-impl"]
    theirs = model.reference([*flags, "torch"], tmp_path)
    found = model.results([*flags, layers], world)
    assert abs(found["loss"] / expected["loss"] - 1) < 2e-3
    for kind in ("logits", "gradient"):
        ours, cpus = (model.distance(each, expected, kind) for each in (found, theirs))
        print(f"{kind}: {ours:.2e}, on a CPU {cpus:.2e}")
        assert ours < 2 * cpus, kind


def test_a_hybrid_model_in_fp8_is_near_fp32(world: Any, transformer_engine: Any, expected: Mapping[str, Any]) -> None:
    """The bound is that of a model without linear attention (`test_numerics.py`), and as much again."""
    require_fp8(world)
    flags = "--transformer-impl te --precision bf16 --fp8 hybrid".split()
    found = model.results([*HYBRID, *flags], world)
    print(f"logits: {model.distance(found, expected, 'logits'):.2e}")
    assert abs(found["loss"] / expected["loss"] - 1) < 0.01
    assert BF16 / 10 < model.distance(found, expected, "logits") < 0.4
