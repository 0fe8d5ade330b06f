"""Codes of numbers: what they say, how long they are, and what a step that is not taken leaves of gradients in them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule

from megavlm.errors import UserError
from megavlm.optim.codes import BLOCK, Code, Coded
from megavlm.optim.slow_links import (
    CodedReduction,
    CodedUnitReduction,
    coded_reductions,
    forget_errors,
    refuse_torch_without_hooks,
)
from megavlm.train.outputs import hints
from tests.support.flags import resolved

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
    assert sent.shape == (3, 2 * columns if code == "bf16" else math.ceil(columns / BLOCK) * (BLOCK + 1))
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


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen(code: Code, bad: float) -> None:
    exact = numbers(1, 3 * BLOCK)
    exact[0, 200] = bad
    found = Coded(code).decode(Coded(code).encode(exact), exact.shape[1])
    assert not found[0, 200].isfinite()
    assert found[0, :BLOCK].isfinite().all(), "other blocks are as they were"
    assert found[0, 2 * BLOCK :].isfinite().all()


def test_residuals_of_all_buckets_are_dropped() -> None:
    groups = [SimpleNamespace(start_grad_sync=None) for _ in range(3)]
    for group in groups[:2]:
        group.start_grad_sync = CodedReduction(group, Coded("int8"), None)
        group.start_grad_sync.errors[0] = torch.ones(3)
    unit = CodedUnitReduction(Coded("int8"), None)  # of ZeRO-2 and 3
    unit.errors[0] = torch.ones(3)
    chunks = [
        SimpleNamespace(bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:]),
        SimpleNamespace(coded_reductions=[unit]),
        SimpleNamespace(),
    ]
    assert len(list(coded_reductions(chunks))) == 3
    forget_errors(chunks)
    assert not any(each.errors for each in coded_reductions(chunks))


@pytest.mark.parametrize("option", ["--compress-gradients int8", "--compress-weights fp8"])
def test_a_torch_without_hooks_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    config = resolved(f"--data-parallel-sharding full --precision bf16 {option}".split())
    refuse_torch_without_hooks(config)
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(UserError, match=rf"^{option} with .* full needs a newer torch than .*sharding optimizer$"):
        refuse_torch_without_hooks(config)


def test_a_run_says_that_a_resume_is_another_run() -> None:
    for flags, said in (("int8", True), ("none", False)):
        config = resolved(f"--compress-gradients {flags} --transformer-impl torch".split())
        assert ("no checkpoint has the residual" in "".join(hints(config, None, None))) == said
