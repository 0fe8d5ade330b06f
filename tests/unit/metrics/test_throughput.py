import pytest

from megavlm.metrics.throughput import mfu, model_tflops_per_device, peak_tflops, tokens_per_second


def test_speeds_follow_their_definitions() -> None:
    assert tokens_per_second(4096, 0.5) == 8192
    # 6 · 7e9 parameters · 4e6 tokens in 10 s on 64 devices: 1.68e17 / 640 s = 262.5 TFLOP/s
    assert model_tflops_per_device(flops=6 * 7e9 * 4e6, seconds=10.0, devices=64) == pytest.approx(262.5)


def test_mfu_is_a_share_of_the_peak_and_unknown_without_one() -> None:
    assert mfu(156.0, 312.0) == 0.5
    assert mfu(156.0, None) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA B200", 2250.0),
    ],
)
def test_known_gpus_have_their_dense_bf16_peak(name: str, peak: float) -> None:
    assert peak_tflops(name, "bf16") == peak_tflops(name, "fp16") == peak
    assert peak_tflops(name, "fp32") is None


@pytest.mark.parametrize("name", ["CPU", "", "NVIDIA GB200", "NVIDIA A10", "NVIDIA H200 MIG 1g.18gb"])
def test_other_devices_have_no_known_peak(name: str) -> None:
    assert peak_tflops(name, "bf16") is None
