"""Emulated FP8: rounding is that of torch's FP8 types, scales are those of their recipes; `tests/dist/test_fp8.py` has
the products.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megavlm.precision.emulated import BACKWARD, FORWARD, AmaxHistory, CurrentScaling, DelayedScaling, delayed_operands
from megavlm.precision.emulated import rounded as rounded_by

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
