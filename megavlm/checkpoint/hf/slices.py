"""Convert between slices of megavlm weights and rows of Hugging Face tensors.

A family's table (`families/shared/table.py`) says which rows of which tensors a weight consists of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from megavlm.checkpoint.hf.hf_files import TensorInfo
from megavlm.families.shared.table import (
    ChannelsLast,
    Interleaved,
    RowPair,
    Rule,
    Shape,
    Stack,
    Transpose,
    TransposeEach,
    row_pairs,
)


class RowReader(Protocol):
    """Interface to read rows of Hugging Face tensors: an `HfFolder`, or a `SharedFolder` that several ranks read."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, rows: slice, /) -> Tensor: ...


def reads_of(folder: RowReader, rule: Rule, real: Shape, index: tuple[slice, ...]) -> Iterator[tuple[str, slice]]:
    """Yield (Hugging Face name, row range) for each read that `slice_of` makes, in the order of reading."""
    if isinstance(rule, Stack):
        for each in rule.rules[index[0]]:
            yield from reads_of(folder, each, real[1:], index[1:])
        return
    for pair in row_pairs(rule.hf_rows(real), index[0].start, index[0].stop):
        yield pair.hf_name, _rows_of(folder, rule, pair, real)


def slice_of(folder: RowReader, rule: Rule, real: Shape, index: tuple[slice, ...]) -> Tensor:
    """Return the slice `index` of a megavlm weight of shape `real`, read from the Hugging Face tensors in `folder`.

    The slice has the tensors' type or, if they have several, one that represents the values of all.
    """
    if isinstance(rule, Stack):
        return _joined([slice_of(folder, each, real[1:], index[1:]) for each in rule.rules[index[0]]])
    rows, rest = index[0], tuple(slice(s.start, min(s.stop, n)) for s, n in zip(index[1:], real[1:], strict=True))
    shape = [s.stop - s.start for s in index]
    parts = [
        (pair.rows, _rows(folder, rule, pair, real)[(slice(None), *rest)])
        for pair in row_pairs(rule.hf_rows(real), rows.start, rows.stop)
    ]
    if len(parts) == 1 and list(parts[0][1].shape) == shape:
        return parts[0][1]
    device = parts[0][1].device if parts else None
    out = torch.zeros(shape, dtype=widest(part.dtype for _, part in parts), device=device)
    for own, part in parts:
        out[(own, *(slice(size) for size in part.shape[1:]))] = part
    return out


def _joined(parts: Sequence[Tensor]) -> Tensor:
    dtype = widest(part.dtype for part in parts)
    return torch.stack([part.to(dtype) for part in parts])


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the type that represents the values of all of `dtypes`; fp32 if there are none."""
    return reduce(torch.promote_types, dtypes) if (dtypes := [*dtypes]) else torch.float32


def _reversed(x: Tensor) -> Tensor:
    """Return a view of x with the order of all dimensions but the first reversed."""
    return x.permute(0, *range(x.ndim - 1, 0, -1))


def _rows_of(folder: RowReader, rule: Rule, pair: RowPair, real: Shape) -> slice:
    """Return the rows of a file's tensor to read for a pair: all rows if the tensor is transposed or nested."""
    shape = folder.tensors[pair.hf_name].shape
    nested = len(shape) > len(real) and shape[0] == 1 and not isinstance(rule, TransposeEach)  # [1, N, H] for [N, H]
    return slice(None) if isinstance(rule, Transpose) or nested else pair.hf_rows


def _rows(folder: RowReader, rule: Rule, pair: RowPair, real: Shape) -> Tensor:
    """Return a pair's rows of the Hugging Face tensor, reshaped to the trailing dimensions of megavlm's weight."""
    rows = _rows_of(folder, rule, pair, real)
    values = folder.read(pair.hf_name, rows)
    if isinstance(rule, Transpose):
        values = values.unflatten(0, (-1, rule.columns)) if rule.columns else values
        return values.transpose(0, 1).reshape(real)[pair.hf_rows]
    if isinstance(rule, TransposeEach):
        return values.mT.contiguous()
    if isinstance(rule, Interleaved):
        return _reversed(values.unflatten(-1, (-1, 2))).flatten(1, 2)
    if isinstance(rule, ChannelsLast):
        return values.unflatten(1, (-1, rule.channels, rule.each)).transpose(1, 2).flatten(1)
    values = values.reshape(-1, *real[1:])
    return values[pair.hf_rows] if rows == slice(None) else values


def widened(weight: Tensor, own: int, wanted: int, *, repeat: bool) -> Tensor:
    """Return a patch embedding [H, own·D] for images of more channels, [H, wanted·D].

    New channels have zero weights: the numbers are those of the first `own` channels. With `repeat`, channel c has
    channel (c mod own)'s weights times own / wanted, which keeps the sum over equal channels.
    """
    channels = weight.unflatten(1, (own, -1))
    if repeat:
        return (channels[:, torch.arange(wanted) % own] * (own / wanted)).flatten(1)
    return torch.cat([channels, channels.new_zeros(len(weight), wanted - own, channels.shape[2])], dim=1).flatten(1)


def pieces_of(rule: Rule, values: Tensor, start: int, shape: Shape) -> Iterator[tuple[str, slice, Tensor]]:
    """Yield (Hugging Face name, its rows, view of `values`) for `values`, the rows of a weight from row `start` on.

    `shape` is the shape of the whole megavlm weight.
    """
    if isinstance(rule, Stack):
        for number, each in enumerate(values, start):
            yield from pieces_of(rule.rules[number], each, 0, shape[1:])
        return
    for pair in row_pairs(rule.hf_rows(shape), start, start + len(values)):
        rows = values[pair.rows]
        if isinstance(rule, ChannelsLast):
            rows = rows.unflatten(1, (rule.channels, -1, rule.each)).transpose(1, 2).flatten(1)
        if isinstance(rule, Transpose):
            rows = (rows.unflatten(0, (rule.columns, -1)) if rule.columns else rows).transpose(0, 1)
        if isinstance(rule, Interleaved):
            rows = _reversed(rows.unflatten(1, (2, -1)))
        yield pair.hf_name, pair.hf_rows, rows.mT if isinstance(rule, TransposeEach) else rows
