"""Speeds from counts and seconds, and the peaks they are compared with: pure arithmetic, no torch.

Model FLOPs utilisation (MFU) is defined in PaLM (Chowdhery et al. 2022, appendix B): the FLOPs that the model's
mathematics needs, whatever is recomputed on top, over what the devices could do in the same time
(`planner/peaks.py`).
"""

from __future__ import annotations

from megavlm.config.schema import Config
from megavlm.planner.peaks import peak_tflops

__all__ = ["mfu", "model_tflops_per_device", "peak_of_run", "tokens_per_second"]


def tokens_per_second(tokens: int, seconds: float) -> float:
    """Tokens of the global batch (real ones: text and images, no padding) over the step's wall time."""
    assert seconds > 0
    return tokens / seconds


def model_tflops_per_device(*, flops: float, seconds: float, devices: int) -> float:
    """TFLOP/s per device, from the FLOPs that the model's mathematics needs for the global batch."""
    assert seconds > 0
    assert devices > 0
    return flops / seconds / devices / 1e12


def mfu(tflops_per_device: float, peak: float | None) -> float | None:
    """Share of the peak, 0 to 1; None where the peak is unknown."""
    return None if peak is None else tflops_per_device / peak


def peak_of_run(device_name: str, config: Config) -> float | None:
    """The peak that a run's MFU is a share of, TFLOP/s: FP8's where any of its products are in FP8."""
    fp8 = config.train.fp8 != "none"
    return peak_tflops(device_name, "fp8" if fp8 else config.train.precision)
