"""Checksums of weights, and who is in the minority."""

from __future__ import annotations

import pytest
import torch

from megavlm.train.hooks.device_checks import checksum, minority


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    values = torch.randn(33, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = torch.int32 if dtype is torch.float32 else torch.int16
    for bit in range(torch.iinfo(whole).bits - 1):
        other = values.clone()
        other.view(whole)[7, 3] ^= 1 << bit
        assert checksum(other) != checksum(values), bit


def test_the_minority_differs() -> None:
    assert minority([5, 5, 5]) == []
    assert minority([5, 6, 5]) == [1]
    assert minority([5, 6]) == [0, 1]
    assert minority([1, 2, 3, 1]) == [0, 1, 2, 3]
