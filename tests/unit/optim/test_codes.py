"""Codes of numbers: their error, that they are fixed points, and numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavlm.optim.codes import BLOCK, Code, Coded

BLOCKED: tuple[Code, ...] = ("int8", "fp8")
CODES: tuple[Code, ...] = ("bf16", *BLOCKED)


def numbers(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(-20, 20, (rows, columns), generator=generator)
    return torch.ldexp(torch.randn(rows, columns, generator=generator), magnitudes)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("columns", [1, 127, 128, 300])
def test_bytes_are_those_that_are_sent(code: Code, columns: int) -> None:
    coded = Coded(code)
    sent = coded.encode(numbers(3, columns))
    assert sent.shape == (3, coded.size(columns))
    assert sent.dtype is torch.uint8
    assert coded.decode(sent, columns).shape == (3, columns)


@pytest.mark.parametrize("code", BLOCKED)
def test_the_error_is_within_the_codes_step(code: Code) -> None:
    """Half a step of 2ᵏ, which is at most a / 63.5 (int8); with three bits of mantissa a 16th of each number (fp8)."""
    exact, coded = numbers(4, 4 * BLOCK), Coded(code)
    found = coded.decode(coded.encode(exact), exact.shape[1])
    largest = exact.abs().unflatten(1, (-1, BLOCK)).amax(-1, keepdim=True).expand(4, 4, BLOCK).flatten(1)
    bound = largest / 63.5 / 2 if code == "int8" else torch.maximum(exact.abs() / 16, largest / 224 * 2**-10)
    assert ((found - exact).abs() <= bound).all()
    assert not torch.equal(found, exact)


@pytest.mark.parametrize("code", CODES)
@given(seed=st.integers(0, 2**31), columns=st.integers(1, 300))
def test_decoded_numbers_are_coded_as_themselves_and_exact_in_bf16(code: Code, seed: int, columns: int) -> None:
    coded = Coded(code)
    once = coded.decode(coded.encode(numbers(2, columns, seed)), columns)
    assert torch.equal(coded.decode(coded.encode(once), columns), once)
    assert torch.equal(once.bfloat16().float(), once)


@pytest.mark.parametrize("code", BLOCKED)
def test_edges_of_the_range(code: Code) -> None:
    coded = Coded(code)
    top = {"int8": 127.0, "fp8": 448.0}[code]
    edges = torch.tensor([[0.0, -0.0, top, -top, 1.0, top / 2, 2.0**-140, 0.0]])
    for scale in (1.0, 2.0**-60, 2.0**80):
        found = coded.decode(coded.encode(edges * scale), 8)
        assert torch.equal(found[:, :5], edges[:, :5] * scale)
    assert coded.decode(coded.encode(torch.zeros(1, 5)), 5).eq(0).all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen(code: Code, bad: float) -> None:
    exact = numbers(1, 3 * BLOCK)
    exact[0, 200] = bad
    found = Coded(code).decode(Coded(code).encode(exact), exact.shape[1])
    assert not found[0, 200].isfinite()
    assert found[0, :BLOCK].isfinite().all(), "other blocks are as they were"
    assert found[0, 2 * BLOCK :].isfinite().all()
