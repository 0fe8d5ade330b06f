"""What devices and their software can run, and the one line for what they cannot."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.precision import device
from megavlm.precision.capability import Device, choose_implementation
from megavlm.precision.device import check_device, check_te_fp8

FP8 = "--precision bf16 --fp8 hybrid"
CPU = Device("a CPU", None, None)
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), Version("2.11.0"))


@pytest.mark.parametrize(
    ("asked", "device", "chosen"),
    [
        ("auto", CPU, "torch"),
        ("auto", H100, "te"),
        ("auto", replace(H100, te=None), "torch"),
        ("auto", replace(H100, te=Version("2.8.0")), "torch"),
        ("auto", replace(H100, te=Version("2.12")), "torch"),
        ("te", replace(H100, te=Version("2.20.2"), mcore=Version("0.19.2")), "te"),
        ("auto", replace(CPU, te=Version("2.11.0")), "torch"),
        ("auto", replace(H100, te_error="OSError: libcudnn.so.9"), "torch"),
        ("torch", H100, "torch"),
        ("te", replace(H100, capability=(8, 0)), "te"),
    ],
)
def test_te_is_chosen_where_it_and_a_device_are(asked: str, device: Device, chosen: str) -> None:
    assert choose_implementation(asked, device) == chosen


@pytest.mark.parametrize(
    ("device", "missing"),
    [
        (CPU, "needs a CUDA device, but this is a CPU"),
        (replace(H100, te=None), "not installed: pip install"),
        (replace(H100, te=Version("2.12.1")), "2.9 to 2.11 with megatron-core 0.16.1, but 2.12.1 is installed"),
        (
            replace(H100, te=Version("2.21"), mcore=Version("0.19.2")),
            "2.9 to 2.20 with megatron-core 0.19.2, but 2.21 is installed",
        ),
        (
            replace(H100, te_error="OSError: libcudnn.so.9"),
            "cannot be loaded here (OSError: libcudnn.so.9): pip install",
        ),
    ],
)
def test_te_that_cannot_be_had_is_one_line(device: Device, missing: str) -> None:
    with pytest.raises(UserError, match=r"^--transformer-impl te needs .*--transformer-impl torch$") as caught:
        choose_implementation("te", device)
    assert missing in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def fp8_of_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine, as it answers on an L40S."""
    said: dict[str, Any] = dict.fromkeys(
        ("is_mxfp8_available", "is_fp8_block_scaling_available"), lambda: (False, "Device is too old.")
    )
    module: Any = ModuleType("transformer_engine.pytorch.fp8")
    module.FP8GlobalStateManager = SimpleNamespace(is_fp8_available=lambda: (True, ""), **said)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_transformer_engine_says_which_recipes_run(fp8_of_ada: None) -> None:
    for recipe in ("tensorwise", "delayed"):
        check_te_fp8(parse(f"{FP8} --fp8-recipe {recipe}".split()))
    for recipe in ("blockwise", "mxfp8"):
        message = rf"--fp8-recipe {recipe} cannot run on a CPU \(Device is too old.\): use --fp8-recipe tensorwise, or"
        with pytest.raises(UserError, match=message):
            check_te_fp8(parse(f"{FP8} --fp8-recipe {recipe}".split()))


def test_torch_layers_emulate_scales_of_whole_tensors() -> None:
    for recipe in ("tensorwise", "delayed"):
        check_device(parse(f"{FP8} --fp8-recipe {recipe}".split()))
    for recipe in ("blockwise", "mxfp8"):
        message = f"--fp8-recipe {recipe} needs .* emulate tensorwise and delayed alone, so use --fp8-recipe tensorwise"
        with pytest.raises(UserError, match=message):
            check_device(parse(f"{FP8} --fp8-recipe {recipe}".split()))


def test_torch_layers_keep_no_weights_in_fp8() -> None:
    check_device(parse(FP8.split()))
    with pytest.raises(UserError, match=r"^--fp8-param-gather needs Transformer Engine: .* leave it out$"):
        check_device(parse([*FP8.split(), "--fp8-param-gather"]))


def test_linear_attention_on_a_gpu_is_refused_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = parse("--transformer-impl torch --set model.language.linear_attention_layers=[0]".split())
    check_device(hybrid)  # on a CPU
    monkeypatch.setattr(device, "device_at_hand", lambda: Device("an H100", (9, 0), None))
    with pytest.raises(UserError, match=r"needs fla and causal_conv1d: pip install 'megavlm\[linear\]'"):
        check_device(hybrid)
    check_device(parse("--transformer-impl torch".split()))


@pytest.mark.parametrize("sharding", ["optimizer_gradients", "full"])
def test_what_is_known_to_work_with_sharded_weights(fp8_of_ada: None, sharding: str) -> None:
    manager: Any = sys.modules["transformer_engine.pytorch.fp8"]
    manager.FP8GlobalStateManager.is_fp8_block_scaling_available = lambda: (True, "")
    check_te_fp8(parse(f"{FP8} --fp8-recipe tensorwise --data-parallel-sharding {sharding}".split()))
    check_te_fp8(parse(f"{FP8} --fp8-recipe blockwise".split()))
    with pytest.raises(UserError, match=f"--data-parallel-sharding {sharding}: use --fp8-recipe tensorwise, or"):
        check_te_fp8(parse(f"{FP8} --fp8-recipe blockwise --data-parallel-sharding {sharding}".split()))
