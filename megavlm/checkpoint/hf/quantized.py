"""Read quantized weights of a Hugging Face folder as the bf16 weights that they stand for.

A quantized tensor is stored as numbers of few bits and, in a second tensor, a scale for each block of them. A weight is
the product of both in fp32, rounded to bf16. `QuantizedFolder` presents the weights under the names and shapes that
they have in the folder of the plain model, and computes the rows that are read, a piece at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavlm.checkpoint.hf.hf_files import PIECE_BYTES, STORED, HfFolder, TensorInfo
from megavlm.errors import UserError
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Shape
from megavlm.json_files import FLAG, OBJECT, TEXT, check, listed, mapped, whole

_KEY = "quantization_config"
_SIDES = listed(whole(1, 2**16), 2, 2)
_SAID = {"quant_method": TEXT, "quant_algo": TEXT, "format": TEXT, "weight_block_size": _SIDES}
_OF_WEIGHTS = {"num_bits": whole(1, 64), "symmetric": FLAG, "actorder": TEXT, "block_structure": _SIDES}
_OF_WEIGHTS |= {"group_size": whole(-1, 2**16)}
# Values of numbers of 4 bits.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_INT4 = tuple(range(-8, 8))
# Ends of the names of tensors beside quantized weights that plain models do not have.
_BESIDE = ("weight_shape", "input_scale", "output_scale", "activation_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class Scheme:
    """How files store quantized tensors.

    Args:
        name: the format's name in messages.
        scales: what the name of a tensor of scales adds to the weight's.
        types: types of the numbers, in safetensors' spelling.
        numbers: what the name of a tensor of numbers adds to the weight's.
        codes: values of the numbers of 4 bits, of which a byte has two, the lower half first; none for other numbers.
        block: rows and columns of a block; none if the number of scales decides.
        of_experts: whether a matrix is stored transposed, its rows divided into blocks: [experts, outputs, blocks,
            bytes] for [experts, inputs, outputs].
    """

    name: str
    scales: str
    types: tuple[str, ...] = ("F8_E4M3", "F8_E5M2", "I8")
    numbers: str = ""
    codes: tuple[float, ...] = ()
    block: tuple[int, ...] = ()
    of_experts: bool = False

    def decoded(self, numbers: Tensor) -> Tensor:
        """Return the values of rows of stored numbers, in fp32."""
        if not self.codes:
            return numbers.float()
        pairs, codes = numbers.view(torch.uint8), torch.tensor(self.codes, dtype=torch.float32)
        values = codes[torch.stack((pairs & 15, pairs >> 4), -1).int()].flatten(-2)
        return values.flatten(-2) if self.of_experts else values

    def shape(self, numbers: TensorInfo) -> Shape:
        """Return the shape of the values of a tensor of numbers."""
        *rows, columns = numbers.shape
        if self.codes:
            columns *= 2 * STORED[numbers.dtype].itemsize
        return (*rows[:-1], rows[-1] * columns) if self.of_experts else (*rows, columns)


_COMPRESSED: dict[tuple[Any, Any], Scheme] = {  # formats of compressed-tensors, with their bits
    ("float-quantized", 8): Scheme("FP8", "_scale"),
    ("int-quantized", 8): Scheme("INT8", "_scale"),
    ("pack-quantized", 4): Scheme("INT4", "_scale", ("I32",), "_packed", _INT4),
}


def _schemes(said: Mapping[str, Any], where: str) -> Iterator[Scheme | None]:
    """Yield the schemes that a quantization_config describes; None for one that is not known here.

    Raises UserError for values of a wrong type.
    """
    check(said, {**_SAID, "config_groups": mapped(OBJECT)}, where)
    match said.get("quant_method"), said.get("quant_algo"):
        case "fp8", _:
            yield Scheme("FP8", "_scale_inv", block=tuple(said.get("weight_block_size", (128, 128)) or ()))
        case "modelopt", "FP8":
            yield Scheme("FP8", "_scale")
        case "mxfp4", _:
            yield Scheme("MXFP4", "_scales", ("U8",), "_blocks", _E2M1, of_experts=True)
        case "compressed-tensors", _:
            for group in (said.get("config_groups") or {}).values():
                check(group, {"weights": OBJECT, "format": TEXT}, where)
                weights = group.get("weights") or {}
                check(weights, _OF_WEIGHTS, where)
                found = _COMPRESSED.get((group.get("format") or said.get("format"), weights.get("num_bits")))
                plain = weights.get("symmetric", True) and weights.get("actorder") in (None, "static", "weight")
                size = weights.get("group_size") or 0
                block = tuple(weights.get("block_structure") or ((1, size) if size > 0 else ()))
                yield replace(found, block=block) if found is not None and plain else None


def opened(path: Path, *, weights: bool = True) -> HfFolder:
    """Return an `HfFolder`, for quantized weights a `QuantizedFolder`. Arguments and errors are those of `HfFolder`.

    Raises UserError for weights that are quantized in another way than is known here.
    """
    folder = HfFolder(path, weights=weights)
    values = folder.settings.values
    sections = [values, *(each for each in values.values() if isinstance(each, Mapping))]  # Kimi-K2.5's is the text's
    said = next((each[_KEY] for each in sections if each.get(_KEY) is not None), None)
    if said is None:
        return folder
    check({_KEY: said}, {_KEY: OBJECT}, folder.settings.where)
    schemes = {*_schemes(said, f"{folder.settings.where}: {_KEY}")}
    scheme = schemes.pop() if len(schemes) == 1 else None
    if scheme is None:
        what = said.get("quant_algo") or said.get("format") or said.get("quant_method")
        raise UserError(
            f"{path} holds quantized weights that cannot be read ({what}; known are FP8, MXFP4, and symmetric INT4 and "
            "INT8 of compressed-tensors): name the folder of the model that was quantized"
        )
    return QuantizedFolder(folder, scheme)


@dataclass(frozen=True)
class _Stored:
    """Both stored tensors of a weight, the number of its blocks in each dimension, and the size of a block."""

    numbers: TensorInfo
    scales: TensorInfo
    blocks: Shape
    block: Shape


class QuantizedFolder(HfFolder):
    """Reads a folder of quantized weights as if it held them in bf16; config.json does not say that they are not."""

    def __init__(self, folder: HfFolder, scheme: Scheme) -> None:
        self.path, self.files, self.scheme, self._said = folder.path, folder.files, scheme, folder.settings
        self.remark = f"{self.path} has {scheme.name} weights: they are dequantized to bf16, and exports have bf16"
        self._stored: dict[str, _Stored] = {}

    @cached_property
    def settings(self) -> Settings:
        values = {name: _without(value) for name, value in _without(self._said.values).items()}
        return Settings(values, self._said.where)

    def plain(self, stored: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        scheme, found = self.scheme, dict[str, TensorInfo]()
        fewest = 4 if scheme.of_experts else 2  # dimensions
        held = [name for name, info in stored.items() if info.dtype in scheme.types and len(info.shape) >= fewest]
        names = {name.removesuffix(scheme.numbers) for name in held if name.endswith(scheme.numbers)}
        names = {name for name in names if name + scheme.scales in stored}
        for name, info in stored.items():
            weight = name.removesuffix(scheme.numbers)
            if weight in names and name == weight + scheme.numbers:
                shape = scheme.shape(info)
                self._stored[weight] = self._fitted(weight, info, stored[weight + scheme.scales], shape)
                if scheme.of_experts:
                    shape = (*shape[:-2], shape[-1], shape[-2])
                found[weight] = TensorInfo(info.file, shape, "BF16", info.offset)
            elif name.removesuffix(scheme.scales) not in names and not name.endswith(_BESIDE):
                found[name] = info
        return found

    def _fitted(self, name: str, numbers: TensorInfo, scales: TensorInfo, shape: Shape) -> _Stored:
        """Return the tensors of a quantized one of this shape. Raises UserError if its scales are of another."""
        blocks = (1,) * len(shape) if math.prod(scales.shape) == 1 else scales.shape
        blocks = (*blocks, *(1,) * (len(shape) - len(blocks)))
        block = tuple(max(1, size // max(1, count)) for size, count in zip(shape, blocks, strict=False))
        if math.prod(blocks) > 1 and self.scheme.block:
            block = (*block[:-2], *self.scheme.block)
        if blocks != tuple(-(-size // each) for size, each in zip(shape, block, strict=True)):
            raise UserError(
                f"{self.path}: {name} is {list(shape)}, which {list(scales.shape)} scales do not divide into blocks of "
                f"{list(block)}: complete the download"
            )
        return _Stored(numbers, scales, blocks, block)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._stored:
            return super().rows(name, start, stop)
        shape = self.tensors[name].shape
        out = torch.empty((stop - start, *shape[1:]), dtype=torch.bfloat16)
        step = max(1, PIECE_BYTES // (4 * max(1, math.prod(shape[1:]))))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            values = self._values(self._stored[name], first, last)
            out[first - start : last - start] = values.mT if self.scheme.of_experts else values
        return out

    def _values(self, stored: _Stored, start: int, stop: int) -> Tensor:
        """Return the products of numbers and scales in rows [start, stop), in fp32."""
        values = self.scheme.decoded(self.stored_rows(stored.numbers, start, stop))
        height, before = stored.block[0], start // stored.block[0]
        scales = self.stored_rows(stored.scales, before, -(-stop // height))
        if scales.dtype == torch.uint8:  # exponents of two
            scales = scales.view(torch.float8_e8m0fnu)
        scales = scales.float().reshape(-1, *stored.blocks[1:])
        for dim, (count, each) in enumerate(zip(stored.blocks, stored.block, strict=True)):
            if count > 1:
                skipped = start - before * height if dim == 0 else 0
                scales = scales.repeat_interleave(each, dim).narrow(dim, skipped, values.shape[dim])
        return values.mul_(scales)


def _without(value: Any) -> Any:
    """Return a section of config.json without what it says of quantized weights, other values as they are."""
    return {name: each for name, each in value.items() if name != _KEY} if isinstance(value, Mapping) else value
