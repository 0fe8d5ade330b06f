"""The output layer's loss and activations: their numbers, and what stays for the backward pass."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from megavlm.model import cross_entropy
from megavlm.model.cross_entropy import LossOptions, linear_cross_entropy
from megavlm.model.layer_modules import ACTIVATIONS
from tests.support.live_bytes import LiveBytes

TOKENS, WIDTH, COLUMNS = 256, 8, 4096
ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
WORK = 8 * COLUMNS * 4


def _loss(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int) -> Tensor:
    entropy = cross_entropy.vocab_parallel_cross_entropy
    options = LossOptions(group=ALONE, real=COLUMNS, chunk=chunk, cross_entropy=entropy)
    return linear_cross_entropy(hidden, weight, labels, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk", [TOKENS, 32])
def test_logits_of_a_chunk_alone_are_alive(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LOSS_WORK", WORK)
    hidden, weight, labels = _inputs(dtype)
    logits = chunk * COLUMNS * dtype.itemsize
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    given, states = sum(t.nbytes for t in (hidden, weight, labels)), hidden.nbytes
    standing = LiveBytes([hidden, weight, labels])
    with standing:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = _loss(hidden, weight, labels, chunk=chunk)
        assert standing.peak < given + states + logits + WORK + 64 * TOKENS
        loss.sum().backward()
    gradients = hidden.nbytes + weight.nbytes
    assert sum(kept.values()) < given + states + logits * (chunk == TOKENS) + 32 * TOKENS
    assert standing.peak < given + gradients + logits + WORK + 64 * TOKENS


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("chunk", [TOKENS, 32])
def test_several_labels_are_a_distribution(chunk: int, softcap: float | None) -> None:
    """The weights of a token that is named twice add up."""
    hidden, weight, labels = _inputs(torch.float32)
    likeliest = torch.cat([labels[:, None], torch.randint(COLUMNS, (TOKENS, 3)), labels[:, None]], dim=1)
    shares = torch.rand(TOKENS, 5).softmax(1)
    options = LossOptions(ALONE, COLUMNS, chunk, cross_entropy=_refused, softcap=softcap)
    found = linear_cross_entropy(hidden, weight, likeliest, options, shares)
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    targets = torch.zeros_like(logits).scatter_add(1, likeliest, shares)
    expected = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(found, expected)
    arrives = torch.rand(TOKENS)
    ours, theirs = (torch.autograd.grad(loss, (hidden, weight), arrives) for loss in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def _refused(*_: Any) -> Any:
    raise AssertionError("a kernel takes one label")


def test_a_second_backward_pass_is_refused() -> None:
    """The first one wrote over what was kept."""
    loss = _loss(*_inputs(torch.float32), chunk=TOKENS).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fp16_keeps_small_probabilities() -> None:
    """All entries but the label have a probability of e^-20 = 2e-9, which fp16 has no number for."""
    hidden, weight = torch.zeros(1, WIDTH, dtype=torch.float16), torch.zeros(COLUMNS, WIDTH, dtype=torch.float16)
    hidden[0, 0], weight[0, 0], weight[1:, 1] = 1, 20, 1  # the second channel sums what is not the label
    loss = _loss(hidden.requires_grad_(), weight, torch.zeros(1, dtype=torch.int64), chunk=TOKENS)
    (loss * 4096).sum().backward()
    assert float(hidden.grad[0, 1]) == pytest.approx(4096 * (COLUMNS - 1) * math.exp(-20), rel=1e-2)


class _Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products, in units of the output layer's forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.side = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            (rows, inner), columns = args[0].shape, args[1].shape[1]
            self.counts[self.side] += rows * inner * columns
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("chunk", "trained", "reached", "products"),
    [
        (TOKENS, True, True, (2, 1)),
        (32, True, True, (2, 2)),  # logits once more
        (32, False, True, (2, 0)),
        (32, True, False, (1, 2)),
        (32, False, False, (1, 0)),
    ],
)
def test_products(chunk: int, trained: bool, reached: bool, products: tuple[int, int]) -> None:
    """The table of the planner, `Output.products`, says the same."""
    hidden, weight, labels = _inputs(torch.float32)
    counting, whole = _Products(), TOKENS * WIDTH * COLUMNS
    with counting:
        loss = _loss(hidden.requires_grad_(reached), weight.requires_grad_(trained), labels, chunk=chunk)
        counting.side = "backward"
        if loss.requires_grad:
            loss.sum().backward()
    assert (counting.counts["forward"] / whole, counting.counts["backward"] / whole) == products


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(COLUMNS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(COLUMNS, (TOKENS,), generator=generator)


FORMULAS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamped_swiglu": lambda x: (
        (x.chunk(2, -1)[1].clamp(-7, 7) + 1) * F.silu(1.702 * x.chunk(2, -1)[0].clamp(max=7)) / 1.702
    ),
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


def results(activation, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:  # type: ignore[no-untyped-def]
    """The output, the gradient of the input for a fixed gradient, and what was kept."""
    kept: list[Tensor] = []
    x = x.clone().requires_grad_()
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = activation(x)
    (gradient,) = torch.autograd.grad(output, x, torch.linspace(-1, 1, output.numel()).view_as(output).to(x.dtype))
    return output, gradient, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMULAS)
def test_numbers_are_the_formulas_and_only_the_input_is_kept(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(1)).mul_(3).to(dtype)
    output, gradient, kept = results(ACTIVATIONS[name], x)
    assert sum(tensor.numel() for tensor in kept) == x.numel()
    # bf16: both round each step to 2^-9 of it; a gradient has some five steps.
    tolerance = 1e-6 if dtype is torch.float32 else 5 * 2**-9
    for found, expected in zip((output, gradient), results(FORMULAS[name], x)[:2], strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_zeros_give_zeros_and_so_do_their_gradients_in_a_product(name: str) -> None:
    """Padding of an MLP stays zero: the second layer's columns get its outputs, zeros, as gradients, and are zeros
    themselves, so that no gradient comes back.
    """
    x = torch.zeros(2, 8, requires_grad=True)
    output = ACTIVATIONS[name](x)
    (gradient,) = torch.autograd.grad(output, x, torch.zeros_like(output))
    assert output.count_nonzero() == gradient.count_nonzero() == 0


COMPILED = """
import torch
from megavlm.model.layer_modules import ACTIVATIONS, activations
from megavlm.model.rotary import Rotary, rotation

def numbers(function, x, *rest):
    x = x.clone().requires_grad_()
    found = function(x, *rest)
    found = found if isinstance(found, tuple) else (found,)
    return *found, *torch.autograd.grad(found, x, [y.cos() for y in found])

compiled = activations(torch.compile)
for length in (5, 6, 9):  # a run compiles once for one length, and once for all others
    x, mixed, half = torch.randn(length, 2, 48), torch.randn(length, 2, 3, 48), torch.rand(length, 1, 1, 4)
    turns = rotation(torch.cat([half, half], -1), torch.float32)
    pairs = [(compiled[name], ACTIVATIONS[name], x) for name in ("swiglu", "quick_gelu")]
    pairs.append((Rotary(torch.compile).split_and_rotate, Rotary().split_and_rotate, mixed, [32, 8, 8], turns))
    for ours, theirs, *given in pairs:
        for one, other in zip(numbers(ours, *given), numbers(theirs, *given), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
print(len(torch._dynamo.utils.compile_times(repr="csv")[0]))
"""


@pytest.mark.slow  # inductor starts a compiler
def test_compiled_numbers_are_the_same() -> None:
    """In a process of its own: tests disable compilation."""
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "0"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) > 0, "nothing was compiled"
