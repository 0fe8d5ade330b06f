"""Saved activations in host memory: which tensors go, and that gradients stay what they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megavlm.model.offload import SavedOnHost


def gradients(layer: nn.Module, states: Tensor) -> list[Tensor]:
    layer.zero_grad()
    states = states.clone().requires_grad_()
    layer(states).square().sum().backward()
    return [states.grad, *(param.grad.clone() for param in layer.parameters())]  # type: ignore[list-item,union-attr]


def layer() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))


def test_gradients_are_the_same() -> None:
    net, states = layer(), torch.randn(32, 64)
    expected = gradients(net, states)
    with SavedOnHost(net):
        found = gradients(net, states)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_parameters_and_small_tensors_stay() -> None:
    net, states = layer(), torch.randn(32, 64)
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        net(states.requires_grad_())
    weights = {param.data_ptr() for param in net.parameters()}
    hooks = SavedOnHost(net)
    goes = [tensor for tensor in saved if not isinstance(hooks.pack_hook(tensor), Tensor)]
    assert goes, "activations go"
    assert all(tensor.numel() >= 1024 and tensor.data_ptr() not in weights for tensor in goes)
    stays = [tensor for tensor in saved if isinstance(hooks.pack_hook(tensor), Tensor)]
    assert any(tensor.data_ptr() in weights and tensor.numel() >= 1024 for tensor in stays), "weights stay"
    assert any(tensor.numel() < 1024 and tensor.data_ptr() not in weights for tensor in stays), "statistics stay"
