from __future__ import annotations

import pytest

from megavlm.planner.devices import PEAKS, peak_tflops
from megavlm.planner.hardware import PROFILES


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
