"""Throughput and model FLOPs utilisation from counts and seconds; pure arithmetic, without torch.

Model FLOPs utilisation (MFU) follows PaLM (Chowdhery et al. 2022, appendix B): the FLOPs of the model's forward and
backward pass, without recomputation, divided by the peak FLOPs of the devices in the same time
(`planner/devices.toml`).
"""

from __future__ import annotations

from megavlm.config.schema import Config
from megavlm.planner.devices import peak_tflops

__all__ = ["mfu", "model_tflops_per_device", "peak_of_run", "tokens_per_second"]


def tokens_per_second(tokens: int, seconds: float) -> float:
    """Return the text and image tokens of the global batch (without padding) per second of wall time."""
    assert seconds > 0
    return tokens / seconds


def model_tflops_per_device(*, flops: float, seconds: float, devices: int) -> float:
    """Return TFLOP/s per device, from the model FLOPs of the global batch (without recomputation)."""
    assert seconds > 0
    assert devices > 0
    return flops / seconds / devices / 1e12


def mfu(tflops_per_device: float, peak: float | None) -> float | None:
    """Return the fraction of the peak, 0 to 1; None if the peak is unknown."""
    return None if peak is None else tflops_per_device / peak


def peak_of_run(device_name: str, config: Config) -> float | None:
    """Return the device's peak in TFLOP/s for the run's MFU: the FP8 peak if the run uses FP8."""
    fp8 = config.precision.fp8 != "none"
    return peak_tflops(device_name, "fp8" if fp8 else config.precision.dtype)
