"""Distillation: a teacher's likeliest tokens, which `megavlm logprobs --top-k` wrote, as labels of a micro-batch.

The loss of a position is its cross entropy with (1 − α) · label + α · p, where p are the teacher's probabilities of its
K likeliest tokens, divided by their sum (`data.teacher_weight` is α). Its gradient is that of (1 − α) · (cross entropy
of the label) + α · KL(p ‖ model), which differs by the entropy of p, a constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megavlm.config.schema import Config
from megavlm.data.types import identity_of
from megavlm.errors import UserError
from megavlm.inputs.batch import MicroBatch

_INDEX = np.dtype([("record", np.int64), ("file", np.int32), ("group", np.int32), ("row", np.int32)])
_COLUMNS = ("positions", "tokens", "top_tokens", "top_logprobs")


class Teacher:
    """Scores of samples in the parquet files of a folder, found by the names of data set and record.

    The index of all rows is in memory (20 bytes each); the scores of a sample are read when it is used.
    """

    def __init__(self, folder: Path, *, weight: float, vocab_size: int) -> None:
        """Index the files. Raises UserError if the folder has no scores of `megavlm logprobs --top-k`."""
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise UserError("data.teacher has parquet files, which need pyarrow: pip install pyarrow") from error
        self._folder, self._weight, self._vocab_size = folder, weight, vocab_size
        self._files = [pq.ParquetFile(path) for path in sorted(folder.glob("part-*.parquet"))]
        if not self._files or any(name not in file.schema_arrow.names for file in self._files for name in _COLUMNS):
            raise UserError(
                f"data.teacher {folder} has no scores of likeliest tokens: write them by megavlm logprobs TEACHER DATA "
                "--top-k 16 --out DIR"
            )
        rows = [row for number, file in enumerate(self._files) for row in _rows_of(number, file)]
        self._index = np.sort(np.array(rows, dtype=_INDEX))  # of a record, in the order of its samples

    @classmethod
    def of(cls, config: Config, *, vocab_size: int) -> Teacher | None:
        """Return the teacher of a run; None without `data.teacher`."""
        data = config.data
        if data.teacher is None:
            return None
        return cls(Path(data.teacher), weight=data.teacher_weight, vocab_size=vocab_size)

    def added(self, batch: MicroBatch, names: Sequence[tuple[str, str]]) -> MicroBatch:
        """Return a micro-batch with the teacher's tokens, given the (data set, record) of each sample.

        Raises UserError for a sample without scores.
        """
        text = batch.text
        trained, tokens = text.loss_mask.flatten().numpy(), text.tokens.flatten().numpy()
        found: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
        for (first, _), length, name in zip(text.prefixes, text.lengths, names, strict=True):
            places = first + np.flatnonzero(trained[first : first + length])  # each predicts the token behind it
            if len(places):
                found.append((places, *self._scores(name, places + 1 - first, tokens[places + 1])))
        top = max((each.shape[1] for _, each, _ in found), default=1)
        likeliest = np.zeros((len(tokens), top), np.int64)
        weights = np.zeros((len(tokens), top), np.float32)
        for places, each, logprobs in found:
            shares = np.exp(logprobs)
            likeliest[places, : each.shape[1]] = each
            weights[places, : each.shape[1]] = self._weight * shares / shares.sum(1, keepdims=True)
        shape = (*text.tokens.shape, top)
        added = {"teacher_tokens": likeliest.reshape(shape), "teacher_weights": weights.reshape(shape)}
        tensors: dict[str, Any] = {name: torch.from_numpy(value) for name, value in added.items()}
        return replace(batch, text=replace(text, **tensors))

    def _scores(
        self, name: tuple[str, str], positions: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the likeliest tokens [n, K] and their log-probabilities of a sample's n trained tokens."""
        record = identity_of(*name)
        first, last = (np.searchsorted(self._index["record"], record, side=side) for side in ("left", "right"))
        for entry in self._index[first:last]:
            table = self._files[entry["file"]].read_row_group(entry["group"], columns=list(_COLUMNS))
            row = {each: table.column(each).slice(entry["row"], 1).chunk(0) for each in _COLUMNS}
            theirs = [row[each].flatten().to_numpy() for each in ("positions", "tokens")]
            if np.array_equal(theirs, [positions, tokens]):
                top, logprobs = (row[each].flatten().flatten().to_numpy() for each in _COLUMNS[2:])
                if top.max() >= self._vocab_size:
                    raise UserError(
                        f"data.teacher {self._folder} has token {top.max()}, and the model's vocabulary ends at "
                        f"{self._vocab_size}: the teacher must have the same tokenizer"
                    )
                return top.reshape(len(tokens), -1), logprobs.reshape(len(tokens), -1)
        lacks = "other tokens" if last > first else "no scores"
        raise UserError(
            f"data.teacher {self._folder} has {lacks} for {name[1]} of {name[0]}: let megavlm logprobs score the same "
            "--datasets with this run's tokenizer, --chat-template, --train-on and --seq-length"
        )


def _rows_of(number: int, file: Any) -> Iterator[tuple[int, int, int, int]]:
    """Yield the entries of a parquet file in the index."""
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, columns=["data_set", "record"])
        for row, name in enumerate(zip(*(table.column(each).to_pylist() for each in table.column_names), strict=True)):
            yield identity_of(*name), number, group, row
