"""Codes of fp32 numbers in one or two bytes, for links that are slower than the codes are to make.

`bf16` rounds each number. `int8` and `fp8` (e4m3) give each block of 128 numbers a scale 2ᵏ, the smallest by which the
block's largest magnitude a is within the codes' range M (127 and 448): k = ⌈log₂(a / M)⌉. A power of two costs up to
one bit (ZeRO++ takes a / M itself, Wang et al. 2023), and buys that a decoded number is exact in bf16, since it has 7
significant bits, and is coded as itself: a block's largest code lies above M / 2, so k stays. Weights that are coded,
gathered, saved, loaded and coded again have not changed.

A block with a number that is not finite decodes to NaN throughout, as the step's checks must see it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Code = Literal["bf16", "int8", "fp8"]
BLOCK = 128
_NOT_FINITE = -128  # in place of k
_LARGEST = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True)
class Coded:
    """A way to write numbers as bytes."""

    code: Code

    def size(self, numbers: int) -> int:
        """Return the bytes of so many numbers."""
        if self.code == "bf16":
            return 2 * numbers
        blocks = math.ceil(numbers / BLOCK)
        return blocks * (BLOCK + 1)

    def encode(self, rows: Tensor) -> Tensor:
        """Return [rows, bytes] uint8 of [rows, numbers]."""
        if self.code == "bf16":
            return rows.to(torch.bfloat16).contiguous().view(torch.uint8)
        blocks = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True)
        mantissa, exponent = torch.frexp(largest / _LARGEST[self.code])
        exponent = (exponent - (mantissa == 0.5).int()).clamp(-126, 127)  # ⌈log₂⌉
        scaled = torch.ldexp(blocks, -exponent)
        codes = (
            scaled.round().clamp(-127, 127).to(torch.int8) if self.code == "int8" else scaled.to(torch.float8_e4m3fn)
        )
        exponent = torch.where(largest.isfinite(), exponent, _NOT_FINITE).to(torch.int8)
        parts = codes.view(torch.uint8), exponent.view(torch.uint8)
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def decode(self, coded: Tensor, numbers: int) -> Tensor:
        """Return [rows, numbers] float32 of [rows, bytes] uint8."""
        if self.code == "bf16":
            return coded.view(torch.bfloat16).float()
        blocks = math.ceil(numbers / BLOCK)
        codes, exponent = coded.split([blocks * BLOCK, blocks], dim=1)
        kind = torch.int8 if self.code == "int8" else torch.float8_e4m3fn
        values = codes.contiguous().view(kind).float().unflatten(1, (blocks, BLOCK))
        scale = exponent.contiguous().view(torch.int8).unsqueeze(-1).int()
        found = torch.where(scale == _NOT_FINITE, math.nan, torch.ldexp(values, scale))
        return found.flatten(1)[:, :numbers]
