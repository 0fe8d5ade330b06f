"""The CPU backend's AdamW is torch's, bit for bit, with the step counted in the parameter group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.backend.adamw import AdamW
from megavlm.optim.host import HostAdamW

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SIZES = ((5,), (33, 17), (10_003,), (0,))


@pytest.mark.parametrize("decoupled", [True, False])
def test_adamw_equals_torch(decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizers = (AdamW(ours, adam_w_mode=decoupled, **OPTIONS), reference(theirs, fused=True, **OPTIONS))
    for _ in range(10):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert optimizers[0].param_groups[0]["step"] == 10


def test_parameters_without_gradient_stay() -> None:
    trained, frozen = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    trained.grad = torch.ones(3)
    AdamW([trained, frozen], **OPTIONS).step()
    assert not torch.equal(trained, torch.ones(3))
    assert torch.equal(frozen, torch.ones(3))


def test_updates_on_the_host_are_the_same(tmp_path: Path) -> None:
    """Bit for bit, and after going on from saved state."""
    generator = torch.Generator().manual_seed(1)
    ours = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    here: AdamW = AdamW(ours, **OPTIONS)
    host: AdamW = HostAdamW.in_place_of(AdamW(theirs, **OPTIONS))
    for step in range(6):
        if step == 3:
            torch.save(host.state_dict(), tmp_path / "state.pt")
            again = HostAdamW.in_place_of(AdamW(theirs, **OPTIONS))
            again.load_state_dict(torch.load(tmp_path / "state.pt"))
            assert not any(
                moment is host.state[param][name] for param in theirs for name, moment in again.state[param].items()
            )
            host = again
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        here.step()
        host.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
