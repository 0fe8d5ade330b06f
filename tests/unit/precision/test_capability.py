"""What devices and their software can run, and the one line for what they cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.precision.capability import Device, check_fp8, choose_implementation, parsed
from megavlm.precision.device import check_device, check_te_fp8

CPU = Device("a CPU", None, None, None)
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), (2, 11, 0), (12, 9))
A100 = Device("NVIDIA A100-SXM4-80GB", (8, 0), (2, 11, 0), (12, 9))
L40S = Device("NVIDIA L40S", (8, 9), (2, 9, 0), (12, 9))
B200 = Device("NVIDIA B200", (10, 0), (2, 11, 0), (13, 0))
RTX = Device("NVIDIA GeForce RTX 5090", (12, 0), (2, 11, 0), (13, 0))


@pytest.mark.parametrize(
    ("asked", "device", "chosen"),
    [
        ("auto", CPU, "torch"),
        ("auto", H100, "te"),
        ("auto", replace(H100, te=None), "torch"),
        ("auto", replace(H100, te=(2, 8, 0)), "torch"),
        ("auto", replace(H100, te=(2, 12)), "torch"),
        ("te", replace(H100, te=(2, 20, 2), mcore=(0, 19, 2)), "te"),
        ("auto", replace(CPU, te=(2, 11, 0)), "torch"),
        ("auto", replace(H100, te_error="OSError: libcudnn.so.9"), "torch"),
        ("torch", H100, "torch"),
        ("te", A100, "te"),
    ],
)
def test_te_is_chosen_where_it_and_a_device_are(asked: str, device: Device, chosen: str) -> None:
    assert choose_implementation(asked, device) == chosen


@pytest.mark.parametrize(
    ("device", "missing"),
    [
        (CPU, "needs a CUDA device, but this is a CPU"),
        (replace(H100, te=None), "not installed: pip install"),
        (replace(H100, te=(2, 12, 1)), "2.9 to 2.11 with megatron-core 0.16.1, but 2.12.1 is installed"),
        (replace(H100, te=(2, 21), mcore=(0, 19, 2)), "2.9 to 2.20 with megatron-core 0.19.2, but 2.21 is installed"),
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


@pytest.mark.parametrize(
    ("recipe", "device"),
    [("delayed", L40S), ("tensorwise", L40S), ("blockwise", H100), ("mxfp8", B200), ("tensorwise", RTX)],
)
def test_recipes_run_where_their_capability_is(recipe: str, device: Device) -> None:
    check_fp8(recipe, device, implementation="te")


@pytest.mark.parametrize(
    ("recipe", "device", "message"),
    [
        (
            "tensorwise",
            A100,
            "capability 8.9, Ada or Hopper (L40S, H100) or newer, but NVIDIA A100-SXM4-80GB has 8.0: use --fp8 none",
        ),
        ("blockwise", L40S, "capability 9.0, Hopper (H100) or newer, but NVIDIA L40S has 8.9: use --fp8-recipe tensor"),
        (
            "blockwise",
            replace(H100, cuda=(12, 8)),
            "needs CUDA 12.9, but torch was built with 12.8: install a newer torch, or use --fp8-recipe tensorwise",
        ),
        (
            "mxfp8",
            H100,
            "capability 10.0, Blackwell (B200) or newer, but NVIDIA H100 80GB HBM3 has 9.0: use --fp8-recipe blockwise",
        ),
        ("mxfp8", RTX, "capability 10.x, but NVIDIA GeForce RTX 5090 has 12.0"),
    ],
)
def test_recipes_elsewhere_are_one_line(recipe: str, device: Device, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_fp8(recipe, device, implementation="te")
    assert message in str(caught.value)


@pytest.mark.parametrize("device", [CPU, A100])
def test_torch_layers_emulate_scales_of_whole_tensors(device: Device) -> None:
    for recipe in ("tensorwise", "delayed"):
        check_fp8(recipe, device, implementation="torch")
    for recipe in ("blockwise", "mxfp8"):
        message = f"--fp8-recipe {recipe} needs .* emulate tensorwise and delayed alone, so use --fp8-recipe tensorwise"
        with pytest.raises(UserError, match=message):
            check_fp8(recipe, device, implementation="torch")


def test_versions() -> None:
    assert parsed("2.11.0+abc123") == (2, 11, 0)
    assert parsed("12.9") == (12, 9)
    assert parsed("2.9.0.dev0") == (2, 9, 0)
    assert parsed(None) is None


FP8 = "--precision bf16 --fp8 hybrid"


def test_torch_layers_keep_no_weights_in_fp8() -> None:
    check_device(parse(FP8.split()))
    with pytest.raises(UserError, match=r"^--fp8-param-gather needs Transformer Engine: .* leave it out$"):
        check_device(parse([*FP8.split(), "--fp8-param-gather"]))


@pytest.mark.parametrize("sharding", ["optimizer_gradients", "full"])
def test_what_is_known_to_work_with_sharded_weights(sharding: str) -> None:
    for recipe in ("tensorwise", "delayed", "mxfp8"):
        check_te_fp8(parse(f"{FP8} --fp8-recipe {recipe} --data-parallel-sharding {sharding}".split()))
    check_te_fp8(parse(f"{FP8} --fp8-recipe blockwise".split()))
    with pytest.raises(UserError, match=f"--data-parallel-sharding {sharding}: use --fp8-recipe tensorwise, or"):
        check_te_fp8(parse(f"{FP8} --fp8-recipe blockwise --data-parallel-sharding {sharding}".split()))
