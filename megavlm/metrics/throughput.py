"""Speeds from counts and seconds, and the peaks they are compared with: pure arithmetic, no torch.

Model FLOPs utilisation (MFU) is defined in PaLM (Chowdhery et al. 2022, appendix B): the FLOPs that the model's
mathematics needs, whatever is recomputed on top, over what the devices could do in the same time.
"""

from __future__ import annotations

import re

# Dense tensor-core peaks of bf16 and fp16, which are equal, in TFLOP/s per device. NVIDIA prints them with 2:4
# sparsity, which is twice that. The first row whose words all occur in the device's name counts, so variants stand
# above their family.
_HALF_PEAKS: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"A100"}), 312.0),  # "NVIDIA A100 Tensor Core GPU" datasheet, PCIe and SXM alike
    (frozenset({"H100", "PCIE"}), 756.0),  # "NVIDIA H100 Tensor Core GPU" datasheet: 1,513 with sparsity
    (frozenset({"H100", "NVL"}), 835.0),  # same datasheet, H100 NVL: 1,671 with sparsity
    (frozenset({"H100"}), 989.0),  # same datasheet, H100 SXM: 1,979 with sparsity
    (frozenset({"H200", "NVL"}), 835.0),  # "NVIDIA H200 Tensor Core GPU" datasheet, H200 NVL: 1,671 with sparsity
    (frozenset({"H200"}), 989.0),  # same datasheet, H200 SXM: 1,979 with sparsity
    (frozenset({"B200"}), 2250.0),  # "NVIDIA Blackwell" datasheet, a GPU of HGX B200: 4.5 PFLOP/s with sparsity
)


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


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Dense peak of a device (`torch.cuda.get_device_name()`) in TFLOP/s; None where it is unknown.

    Unknown are CPUs, slices of a GPU (MIG), GPUs that are not in the table, and fp32: which units
    it runs on depends on TF32 switches of each library, so no single figure is its peak.
    """
    words = frozenset(re.findall(r"[A-Z0-9]+", device_name.upper()))
    if precision not in ("bf16", "fp16") or "MIG" in words:
        return None
    return next((peak for needed, peak in _HALF_PEAKS if needed <= words), None)
