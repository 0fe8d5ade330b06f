"""Saved activations and optimizer state in host memory, on a device whose copies run beside its computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megavlm.backend.host_copies import HostCopies
from megavlm.model.offload import Offload
from megavlm.optim.elementwise import ElementwiseOptimizer
from megavlm.optim.rules import ADAMW
from megavlm.optim.stores import HostStore

WIDTH, LAYERS, ROWS = (1024, 8, 2048) if torch.cuda.is_available() else (64, 8, 32)


def layers(device: torch.device) -> list[nn.Module]:
    torch.manual_seed(1)
    inner = 4 * WIDTH
    return [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH)).to(device)
        for _ in range(LAYERS)
    ]


def forward(stack: list[nn.Module], states: Tensor, offload: Offload | None) -> Tensor:
    if offload is not None:
        offload.begin_pass()
    for layer in stack:
        if offload is None:
            states = states + layer(states)
        else:
            with offload.layer(layer):
                states = states + layer(states)
    if offload is not None:
        offload.expect_backward(states)
    return states


def test_gradients_are_the_same_and_memory_is_less(world: Any) -> None:
    """Two micro-batches in turns, three times: copies that came too early or late would show in some gradient."""
    device = world.device
    stack = layers(device)
    batches = [torch.randn(ROWS, WIDTH, device=device) for _ in range(3)]

    def step(offload: Offload | None) -> tuple[list[Tensor], int]:
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = forward(stack, batches[0], offload)
        for batch in batches[1:]:
            after = forward(stack, batch, offload)
            before.square().mean().backward()
            before = after
        before.square().mean().backward()
        del before, after
        found = [param.grad.cpu() for layer in stack for param in layer.parameters() if param.grad is not None]
        for layer in stack:
            layer.zero_grad()
        return found, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0

    step(None)
    expected, whole = step(None)
    offload = Offload(HostCopies(device))
    for _ in range(3):
        found, less = step(offload)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    saved = (
        2 * LAYERS * ROWS * WIDTH * (1 + 1 + 4 + 4) * 4
    )  # of two micro-batches: the norm's, and both products' inputs
    assert device.type == "cpu" or less < whole - 0.6 * saved


def test_updates_on_the_host_are_those_of_a_cpu(world: Any) -> None:
    torch.manual_seed(1)
    there = [nn.Parameter(torch.randn(size, device=world.device)) for size in (1_000_003, 17, 4096)]
    here = [nn.Parameter(param.detach().cpu()) for param in there]
    store = HostStore()
    store.piece = 2**16
    optimizer = ElementwiseOptimizer(there, ADAMW, store, lr=1e-2, weight_decay=1e-2)
    reference = ElementwiseOptimizer(here, ADAMW, lr=1e-2, weight_decay=1e-2)
    for _ in range(5):
        for mine, other in zip(there, here, strict=True):
            other.grad = torch.randn(other.shape)
            mine.grad = other.grad.to(world.device)
        optimizer.step()
        reference.step()
    for mine, other in zip(there, here, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=0)
    assert all(moment.device.type == "cpu" for state in optimizer.state.values() for moment in state.values())
