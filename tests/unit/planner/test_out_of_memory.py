"""Out of memory in one line: the peak by component, and a setting whose estimate fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megavlm.arch.dims import Dims
from megavlm.config.schema import Config
from megavlm.planner import auto
from megavlm.planner.devices import PEAKS, peak_tflops
from megavlm.planner.hardware import PROFILES
from megavlm.planner.memory import Memory
from megavlm.rules.defaults import resolve

DIMS = Dims(tp=1, pp=1, vpp=1, dp=2)
GIB = float(2**30)


def with_batch(size: int) -> Config:
    config = Config()
    return replace(config, train=replace(config.train, micro_batch_size=size))


def said(config: Config, estimate: Callable[[Config], Memory], *, capacity: float | None) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "memory_of", lambda config, dims, on_gpu: (estimate(config),))
        return auto.explain(config, DIMS, rank=3, on_gpu=True, capacity=capacity)


def by_batch(config: Config) -> Memory:
    return Memory(weights=10 * GIB, activations=config.train.micro_batch_size * 20 * GIB)


def test_the_line_names_components_and_the_first_setting_that_fits() -> None:
    assert said(with_batch(4), by_batch, capacity=55 * GIB) == (
        "out of memory on rank 3: the planner estimates a peak of 90.00 GiB of 55.00 GiB (activations 80.00 GiB, "
        "weights 10.00 GiB): use --micro-batch-size 2, with which it estimates 50.00 GiB"
    )
    for size, capacity in (4, 31 * GIB), (2, None), (2, 80 * GIB):  # the latter: an estimate that was too low
        assert "use --micro-batch-size 1, with which it estimates 30.00" in said(
            with_batch(size), by_batch, capacity=capacity
        )
    whatever = said(with_batch(1), lambda _: Memory(weights=90 * GIB), capacity=80 * GIB)
    assert whatever.endswith("no single setting fits, so use more devices, and let --plan auto choose the layout")


def test_the_numbers_are_the_planner_s() -> None:
    config = resolve(with_batch(4), vocab_size=97)
    line = auto.explain(config, DIMS, rank=0, on_gpu=False, capacity=None)
    assert f"{auto.memory_of(config, DIMS, on_gpu=False)[0].total / GIB:.2f} GiB" in line
    assert "use --" in line


@pytest.mark.parametrize(
    ("name", "half", "fp8"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, None),
        ("NVIDIA H100 80GB HBM3", 989, 1979),
        ("NVIDIA H100 PCIe", 756, 1513),
        ("NVIDIA H200", 989, 1979),
        ("NVIDIA B200", 2250, 4500),
    ],
)
def test_known_gpus_have_their_dense_peaks(name: str, half: float, fp8: float | None) -> None:
    assert peak_tflops(name, "bf16") == peak_tflops(name, "fp16") == half
    assert peak_tflops(name, "fp8") == fp8
    assert peak_tflops(name, "fp32") is None


@pytest.mark.parametrize("name", ["CPU", "", "NVIDIA GB200", "NVIDIA A10", "NVIDIA H200 MIG 1g.18gb"])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp8"])
def test_other_devices_have_no_known_peak(name: str, precision: str) -> None:
    assert peak_tflops(name, precision) is None


def test_each_precision_of_half_the_bits_is_twice_as_fast() -> None:
    """What the data sheets say of every device here, but for cutting digits: B200's TF32 is printed as 2.2 PFLOP/s."""
    for row in PEAKS:
        assert row.half == pytest.approx(2 * row.tf32, rel=0.025), row.source
        if row.fp8 is not None:
            assert row.fp8 == pytest.approx(2 * row.half, rel=0.01), row.source


def test_profiles_of_gpus_reach_less_than_their_peaks() -> None:
    for hardware in PROFILES.values():
        if hardware.on_gpu:
            assert max(hardware.forward.matmul, hardware.forward.attention) < hardware.peak
        else:
            assert hardware.peak is None
