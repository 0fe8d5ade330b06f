"""What devices and their software can run, which layers run in FP8, and the arithmetic that emulates it."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from megavlm.arch.layers import layer_names
from megavlm.command_line.parsing import parse
from megavlm.config.derived import layer_precision, sequence_multiple
from megavlm.errors import UserError
from megavlm.precision import device
from megavlm.precision.capability import Device, choose_implementation
from megavlm.precision.device import check_device, check_te_fp8
from megavlm.precision.emulated import BACKWARD, FORWARD, AmaxHistory, CurrentScaling, DelayedScaling, delayed_operands
from megavlm.precision.emulated import rounded as rounded_by

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


def test_linear_attention_on_a_gpu_is_refused_without_kernels_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = parse("--transformer-impl torch --set model.language.linear_attention_layers=[0]".split())
    check_device(hybrid)  # on a CPU
    versions: dict[str, str] = {}
    monkeypatch.setattr(device, "_version_of", lambda name: Version(versions[name]) if name in versions else None)
    monkeypatch.setattr(device, "find_spec", versions.get)
    monkeypatch.setattr(device, "device_at_hand", lambda: Device("an H100", (9, 0), None))
    for versions["fla-core"] in ("0.5.2", "0.6.0"):
        check_device(parse("--transformer-impl torch".split()))
        versions["triton"] = "3.6.0"
        with pytest.raises(
            UserError, match=r"0\.6, not 0\.5\.2: pip install 'fla-core>=0\.6'|gradients with Triton 3\.6"
        ):
            check_device(hybrid)
    for versions["triton"] in ("3.3.1", "3.7.1"):
        check_device(hybrid)
    versions |= {"triton": "3.7.0", "tilelang": "0.1.15"}
    check_device(hybrid)
    del versions["tilelang"]
    monkeypatch.setattr(device, "device_at_hand", lambda: Device("a B200", (10, 0), None))
    check_device(hybrid)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", ""),
        (FP8, "language.layers.0 language.layers.1 language.layers.2 language.layers.3"),
        (f"{FP8} --first-last-layers-bf16", "language.layers.1 language.layers.2"),
        (
            f"{FP8} --first-last-layers-bf16 --set precision.num_layers_at_start_in_bf16=0 "
            "precision.num_layers_at_end_in_bf16=3",
            "language.layers.0",
        ),
        # The tower's last layer that runs is its third.
        (f"{FP8} --first-last-layers-bf16 --fp8-parts vision --set model.vision.feature_layer=-2", "vision.layers.1"),
    ],
)
def test_only_transformer_layers_of_the_parts_run_in_fp8(argv: str, expected: str) -> None:
    config = parse(argv.split())
    names = [*layer_names(config.model), "deepstack.0"]
    assert " ".join(name for name in names if layer_precision(name, config) == "fp8") == expected


@pytest.mark.parametrize(
    ("argv", "tp", "multiple"),
    [
        ("", 1, 1),
        ("--tp 2", 2, 2),
        (FP8, 1, 1),
        (f"{FP8} --fp8-parts vision --tp 2", 2, 32),
        (f"{FP8} --fp8-parts vision --tp 2 --no-sp", 2, 16),
        (f"{FP8} --fp8-parts vision --fp8-recipe mxfp8", 1, 32),
    ],
)
def test_vision_is_padded_to_what_fp8_and_sharding_need(argv: str, tp: int, multiple: int) -> None:
    assert sequence_multiple("vision", parse(argv.split()), tp=tp) == multiple


@pytest.mark.parametrize(
    ("argv", "tp", "multiple"),
    [("--tp 2", 2, 2), (FP8, 1, 16), (f"{FP8} --tp 2", 2, 32), (f"{FP8} --fp8-parts vision --tp 2", 2, 2)],
)
def test_so_are_sequences_of_tokens(argv: str, tp: int, multiple: int) -> None:
    assert sequence_multiple("language", parse(argv.split()), tp=tp) == multiple


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return rounded_by(x, CurrentScaling(dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_numbers_that_fp8_has_stay_and_others_go_to_the_nearest(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    assert torch.equal(rounded(every, dtype), every)  # the largest is among them, so the scale is 1
    assert torch.equal(rounded(every * 0.25, dtype), every * 0.25)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    scale = torch.finfo(dtype).max / x.abs().max()
    nearest = every[(x[:, None] * scale - every).abs().argmin(1)] / scale
    ties = ((x[:, None] * scale - every).abs().topk(2, dim=1, largest=False).values.diff(dim=1) == 0).squeeze()
    assert torch.equal(rounded(x, dtype)[~ties], nearest[~ties])
    assert torch.equal(rounded(x, dtype), (x * scale).to(dtype).float() / scale)


@pytest.mark.parametrize("x", [torch.zeros(3), torch.empty(0), torch.full((2,), 1e-42), torch.full((2,), 3e38)])
def test_extremes_stay_finite(x: Tensor) -> None:
    assert torch.allclose(rounded(x, FORWARD), x, rtol=0.07, atol=1e-40)


def test_gradients_of_outputs_have_the_range_of_e5m2() -> None:
    assert BACKWARD == {"hybrid": E5M2, "e4m3": E4M3}
    x = torch.tensor([1.0, 2**-20])
    assert rounded(x, E5M2)[1] == 2**-20
    assert rounded(x, E4M3)[1] == 0


@pytest.mark.parametrize("length", [1, 3])
def test_delayed_scales_follow_the_passes_before(length: int) -> None:
    amaxes = [2.0, 8.0, 1.0, 0.5, 0.25, 4.0]
    history = AmaxHistory(2, E4M3, length, None)
    scaling = DelayedScaling(history, 1)
    expected = 1.0  # nothing is known before the first pass
    for step, amax in enumerate(amaxes):
        x = torch.tensor([amax, -amax / 3])
        assert scaling.scale(x, remember=False) == expected  # an evaluation moves nothing on
        assert scaling.scale(x, remember=True) == expected
        expected = 448 / max(amaxes[max(0, step + 1 - length) : step + 1])
    assert history.amax_history[:, 0].eq(0).all()
    assert history.scale[0] == 1  # the other tensor's
    # As Transformer Engine lays them out: room for the pass under way, then from the oldest to the newest.
    assert history.amax_history[:, 1].tolist() == [0.0, *amaxes[-length:][1:]][:length]


def test_values_beyond_the_range_become_the_largest_number() -> None:
    operands = delayed_operands("hybrid", 4, None)
    rounded_by(torch.tensor([448.0]), operands.input, remember=True)
    assert rounded_by(torch.tensor([1000.0, -1000.0]), operands.input).tolist() == [448.0, -448.0]


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan")])
def test_useless_largest_values_leave_the_scale(amax: float) -> None:
    history = AmaxHistory(1, E5M2, 1, None)
    history.append(0, torch.tensor(7.0))
    before = history.scale.clone()
    history.append(0, torch.tensor(amax))
    assert history.scale.equal(before)
    history.append(0, torch.tensor(1e-38))
    assert history.scale == torch.finfo(torch.float32).max
