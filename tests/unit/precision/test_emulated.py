"""Emulated FP8: rounding is that of torch's FP8 types; `tests/dist/test_fp8.py` has the products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megavlm.precision.emulated import BACKWARD, FORWARD, rounded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


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
