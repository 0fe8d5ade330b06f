"""The CPU backend's AdamW is torch's, bit for bit, with the step counted in the parameter group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megavlm.config.schema import OptimizerConfig
from megavlm.optim import stores
from megavlm.optim.elementwise import ElementwiseOptimizer
from megavlm.optim.rules import ADAMW
from megavlm.optim.stores import HostStore, StateStore

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SIZES = ((5,), (33, 17), (10_003,), (0,))


def adamw(params: list[Any]) -> ElementwiseOptimizer:
    return ElementwiseOptimizer(params, ADAMW, **OPTIONS)


def in_place_of_torchs(params: list[Any], store: StateStore) -> ElementwiseOptimizer:
    return ElementwiseOptimizer.in_place_of(torch.optim.AdamW(params, **OPTIONS), ADAMW, store, OptimizerConfig())


def in_pieces(size: int) -> HostStore:
    store = HostStore()
    store.piece = size
    return store


def test_adamw_equals_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    ours = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    optimizers = (adamw(ours), torch.optim.AdamW(theirs, fused=True, **OPTIONS))
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
    adamw([trained, frozen]).step()
    assert not torch.equal(trained, torch.ones(3))
    assert torch.equal(frozen, torch.ones(3))


@pytest.mark.parametrize("piece", [2**24, 4096, 64])
def test_updates_on_the_host_are_the_same(tmp_path: Path, piece: int) -> None:
    """Bit for bit, in pieces of any size, and after going on from saved state."""
    generator = torch.Generator().manual_seed(1)
    ours = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    here, there = adamw(ours), in_place_of_torchs(theirs, in_pieces(piece))
    for step in range(6):
        if step == 3:
            torch.save(there.state_dict(), tmp_path / "state.pt")
            again = in_place_of_torchs(theirs, in_pieces(piece))
            again.load_state_dict(torch.load(tmp_path / "state.pt"))
            assert not any(
                moment is there.state[param][name] for param in theirs for name, moment in again.state[param].items()
            )
            there = again
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        here.step()
        there.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_in_place_of_torchs_it_counts_steps_in_the_group() -> None:
    """Not beside each parameter, of which a rank may have none in a group."""
    parameter = torch.nn.Parameter(torch.ones(3))
    ours = in_place_of_torchs([{"params": [parameter]}, {"params": [], "lr": 1.0}], StateStore())
    assert ours.param_groups[0].keys() == adamw([parameter]).param_groups[0].keys()
    for _ in range(3):
        parameter.grad = torch.ones(3)
        ours.step()
    found = ours.state_dict()
    assert [group["step"] for group in found["param_groups"]] == [3, 3]
    assert "step" not in ours.state[parameter]


def test_a_piece_is_sent_before_the_one_before_it_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def noted(name: str, plain: Any) -> Any:
        return lambda *given: (events.append(name), plain(*given))[1]

    for name in ("send", "arrived", "send_back"):
        monkeypatch.setattr(stores.StatePiece, name, noted(name, getattr(stores.StatePiece, name)))
    params = [torch.nn.Parameter(torch.ones(size)) for size in (3, 100, 40, 30)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = in_place_of_torchs(params, in_pieces(70))  # 3 | 70 | 30 + 40 | 30: four pieces
    optimizer.step()
    assert events == ["send", *["send", "arrived", "send_back"] * 3, "arrived", "send_back"]
