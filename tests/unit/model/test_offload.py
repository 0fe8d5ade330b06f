"""Saved activations in host memory: which tensors go, when they come back, and that gradients stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megavlm.backend.host_copies import HostCopies
from megavlm.model.offload import Offload
from tests.support.host_copies import LateCopies

WIDTH, ROWS = 64, 32


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, WIDTH))


@pytest.fixture
def blocks() -> list[nn.Module]:
    torch.manual_seed(1)
    return [block() for _ in range(5)]


def run(blocks: list[nn.Module], states: Tensor, offload: Offload | None, call: Callable[..., Tensor] | None = None):
    """One pass through all blocks; `call(block, states)` runs one."""
    call = call or (lambda each, x: each(x))
    if offload is not None:
        offload.begin_pass()
    for each in blocks:
        if offload is None:
            states = call(each, states)
        else:
            with offload.layer(each):
                states = call(each, states)
    if offload is not None:
        offload.expect_backward(states)
    return states.square().sum()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True) for _ in range(count)]


def gradients(blocks: list[nn.Module]) -> list[Tensor]:
    found = [param.grad.clone() for each in blocks for param in each.parameters() if param.grad is not None]
    for each in blocks:
        each.zero_grad()
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


# Forward (F) and backward (B) of micro-batches: alone, 1F1B's warm-up and turns, and in the order they came.
ORDERS = ["F0 B0", "F0 F1 B0 F2 B1 B2", "F0 F1 F2 B0 B1 B2", "F0 F1 B1 B0"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_are_the_same_in_any_order_of_passes(blocks, order: str, recomputes: bool) -> None:
    def recomputed(each: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(each, x, use_reentrant=True)

    def play(offload: Offload | None) -> list[Tensor]:
        losses: dict[str, Tensor] = {}
        states = batches(3)
        for step in order.split():
            if step[0] == "F":
                losses[step[1]] = run(blocks, states[int(step[1])], offload, recomputed if recomputes else None)
            else:
                losses.pop(step[1]).backward()
        return [*gradients(blocks), *(state.grad for state in states if state.grad is not None)]

    late = LateCopies()
    expected = play(None)
    assert_same(play(Offload(late)), expected)
    assert_same(play(Offload(HostCopies(torch.device("cpu")))), expected)
    assert late.events.count("fetch") > 0


def test_copies_run_one_layer_behind_and_one_ahead(blocks) -> None:
    late = LateCopies()
    loss = run(blocks, batches(1)[0], Offload(late))
    # The first layer's memory is let go when the second's copies are queued, and so on; the last one's is still here.
    assert late.events == ["send", *["send", "sent"] * 4]
    late.events.clear()
    loss.backward()
    # The last layer, still here, asks for the one before; where that one is needed (one wait for each of its tensors),
    # it asks for the one before it.
    starts = [event for before, event in pairwise(["", *late.events]) if event != before]
    assert starts == ["fetch", "arrived", "fetch", "arrived", "fetch", "arrived", "fetch", "arrived"]
    assert late.events[:3] == ["fetch", "arrived", "fetch"], "before anything else of the layer is computed"


def test_two_layers_are_on_the_device_at_most(blocks) -> None:
    late = LateCopies()
    loss = run(blocks, batches(1)[0], Offload(late))
    one = (ROWS * WIDTH + 3 * ROWS * 128) * 4  # inputs of both products, of GELU and of the norm
    assert one < late.peak <= 2 * one
    assert late.bytes_here == one, "the last layer's"
    late.peak = 0
    loss.backward()
    assert one < late.peak <= 2 * one
    assert late.bytes_here == 0


def test_parameters_small_tensors_and_what_layers_share_stay() -> None:
    net, states, angles = block(), batches(1)[0], torch.randn(ROWS, 128, requires_grad=True)
    late = LateCopies()
    offload = Offload(late)
    offload.begin_pass()
    with offload.layer(net, (angles, None)):
        result = (net[1](net[0](states)) * angles).sum()
    result.backward()
    assert sorted(late.sizes) == [ROWS * WIDTH, ROWS * 128, ROWS * 128]


def test_one_storage_is_moved_once_and_views_stay_views(blocks) -> None:
    """Queries, keys and values out of one tensor; a slice of a large one moves alone."""

    def attend(mixed: Tensor) -> Tensor:
        query, key, value = mixed.view(ROWS, 3, 4, 16).transpose(0, 2).unbind(1)
        return (query.sigmoid() * key * value * key).sum()

    def part(large: Tensor) -> Tensor:
        return (large[:, 3:5].sigmoid() * large[:, 7:9] * large.T[20:22].T).sum()

    def rows(large: Tensor) -> Tensor:
        return (large[3:5] * large[7:9]).sum()

    for compute, count, size in ((attend, ROWS, 192), (part, 8 * ROWS, 256), (rows, 8 * ROWS, 256)):
        states = torch.randn(count, size, requires_grad=True)
        compute(states.tanh()).backward()
        expected, states.grad = states.grad, None
        late = LateCopies()
        offload = Offload(late, smallest=16)
        offload.begin_pass()
        held = states.tanh()
        with offload.layer(nn.Identity()):
            first = compute(held)
        with offload.layer(nn.Identity()):  # the first layer's are let go
            second = compute(held)
        if compute is attend:
            assert sum(late.sizes) <= 2 * (held.numel() + 3 * ROWS * 64), "the mixed tensor once, products of its parts"
        else:
            assert sum(late.sizes) < held.numel(), "not the large tensor"
        (first + second).backward()
        torch.testing.assert_close(states.grad, 2 * expected)


def test_the_last_layer_is_fetched_while_what_follows_it_runs(blocks) -> None:
    late = LateCopies()
    offload = Offload(late)
    offload.begin_pass()
    (states,) = batches(1)
    for each in blocks:
        with offload.layer(each):
            states = each(states)
    head = nn.Linear(WIDTH, 8)
    output = head(states)
    states.register_hook(lambda gradient: late.events.append("head done"))
    offload.expect_backward(output)
    run(blocks, batches(1)[0], offload)
    late.events.clear()
    output.sum().backward()
    assert late.events[:3] == ["fetch", "head done", "arrived"]


def test_an_exception_leaves_nothing_behind(blocks) -> None:
    """In forward and in backward passes; what follows is right, and what was on its way is waited for."""
    late = LateCopies()
    offload = Offload(late)
    states = batches(2)
    run(blocks, states[0], None).backward()
    expected = gradients(blocks)

    def fails(each: nn.Module, x: Tensor) -> Tensor:
        if each is blocks[3]:
            raise RuntimeError("in forward")
        return each(x)

    with pytest.raises(RuntimeError, match="in forward"):
        run(blocks, states[1], offload, fails)

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("in backward")

    loss = run(blocks, states[1], offload, lambda each, x: Bad.apply(each(x)) if each is blocks[2] else each(x))
    with pytest.raises(RuntimeError, match="in backward"):
        loss.backward()
    del loss
    assert len(late.back) == late.done["back"], "memory of a copy that nobody asked for is not reused before it ends"
    gradients(blocks)
    run(blocks, states[0], offload).backward()
    assert_same(gradients(blocks), expected)


def test_a_layer_that_saves_nothing_is_passed_over(blocks) -> None:
    late = LateCopies()
    offload = Offload(late)
    blocks.insert(3, nn.Identity())
    run(blocks, batches(1)[0], offload).backward()
    found = gradients(blocks)
    run(blocks, batches(1)[0], None).backward()
    assert_same(found, gradients(blocks))
    assert late.events.count("send") == 5
