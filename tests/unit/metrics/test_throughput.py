from dataclasses import replace

import pytest

from megavlm.config.schema import Config, PrecisionConfig
from megavlm.metrics.throughput import mfu, model_tflops_per_device, peak_of_run, tokens_per_second


def test_speeds_follow_their_definitions() -> None:
    assert tokens_per_second(4096, 0.5) == 8192
    # 6 · 7e9 parameters · 4e6 tokens in 10 s on 64 devices: 1.68e17 / 640 s = 262.5 TFLOP/s
    assert model_tflops_per_device(flops=6 * 7e9 * 4e6, seconds=10.0, devices=64) == pytest.approx(262.5)


def test_mfu_is_a_share_of_the_peak_and_unknown_without_one() -> None:
    assert mfu(156.0, 312.0) == 0.5
    assert mfu(156.0, None) is None


def test_a_run_is_measured_against_the_peak_of_its_precision() -> None:
    config = Config(precision=PrecisionConfig("bf16"))
    assert peak_of_run("NVIDIA H200", config) == 989
    assert peak_of_run("NVIDIA H200", replace(config, precision=PrecisionConfig("fp32"))) is None
    in_fp8 = replace(config, precision=PrecisionConfig("bf16", fp8="hybrid"))
    assert peak_of_run("NVIDIA H200", in_fp8) == 1979
