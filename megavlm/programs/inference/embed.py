"""Write the vectors of texts and images: `megavlm embed RUN_DIR records.jsonl --out vectors`.

Each record of the file (JSON Lines, CSV, parquet, …) has `text`, `image` or `images` (`video`, `videos`), and maybe an
`id`. The folder `vectors` then has vectors.npy, [records, channels] float32 of length 1, and ids.jsonl, an id for each
row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.checkpoint.hf.embedding_files import is_in_parts, read_embedding_file
from megavlm.checkpoint.hf.hf_files import transformers_model
from megavlm.checkpoint.hf.pretrained import Pretrained
from megavlm.command_line.commands import Parser, count, reported
from megavlm.config.messages import shown
from megavlm.config.schema import Config, DataConfig, DatasetConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.records.opening import RawRecords, open_rows
from megavlm.data.records.turns import text_turn
from megavlm.data.types import Role, Sample, Turn
from megavlm.errors import UserError
from megavlm.families.shared.family import ALL_PARTS
from megavlm.files import check_folder, open_new, replace_file
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.batch import MicroBatch
from megavlm.programs.inference.assistant import DTYPES
from megavlm.programs.inference.exports import add_folder_options, device_of, model_folder
from megavlm.programs.inference.own_model import config_of, own_model
from megavlm.rules.extensions import without_extensions
from megavlm.rules.fields import Kind

Pooled = Callable[[MicroBatch, Sequence[int]], Tensor]  # a batch of texts of these lengths → [texts, H] fp32


@dataclass(frozen=True)
class Embedder:
    """A model on its device, and what makes its inputs."""

    pooled: Pooled
    source: FilesSource
    config: Config

    @classmethod
    def load(cls, folder: Path, data: DataConfig, *, device: torch.device, dtype: torch.dtype | str) -> Embedder:
        """Return the model of an export. Raises UserError for a folder that cannot be used."""
        said, in_parts = read_embedding_file(folder), is_in_parts(folder)
        config = config_of(folder, data, said, dtype)
        pooled = _megavlms(config, device) if in_parts else _transformers(folder, config, device, dtype)
        return cls(pooled, FilesSource(config), config)

    def sample(self, text: Turn) -> Sample:
        """Encode a query or a document (its role says which) and its images. Raises BadSample."""
        return self.source.embedded(text)

    @torch.inference_mode()
    def vectors(self, samples: Sequence[Sample], *, width: int | None = None) -> Tensor:
        """Return a vector of length 1 for each sample, [samples, width] fp32; `width` is by default all channels."""
        lengths = [len(sample) for sample in samples]
        spec = CollateSpec.of(self.config, self.source, seq_length=max(lengths))
        pooled = self.pooled(collate([[sample] for sample in samples], spec), lengths)
        return F.normalize(pooled[:, :width], dim=-1).cpu()


def _transformers(folder: Path, config: Config, device: torch.device, dtype: torch.dtype | str) -> Pooled:
    """Return Transformers' model of a folder, and pooling as in training."""
    family = Pretrained.of(folder, *ALL_PARTS).family
    assert family.inputs is not None
    model, inputs_of = transformers_model(folder, dtype=dtype).to(device), family.inputs

    def pooled(batch: MicroBatch, lengths: Sequence[int]) -> Tensor:
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        given = {**inputs_of(batch, config.model), "attention_mask": mask}
        inputs = {
            name: each.to(device, model.dtype if each.is_floating_point() else None) for name, each in given.items()
        }
        states = model.base_model(**inputs, use_cache=False).last_hidden_state
        assert batch.text.pool is not None
        assert batch.text.pool_weights is not None
        positions, owners = batch.text.pool.to(device)
        rows = states.flatten(0, 1)[positions].float() * batch.text.pool_weights.to(device)[:, None]
        return rows.new_zeros(len(lengths), rows.shape[1]).index_add_(0, owners, rows)

    return pooled


def _megavlms(config: Config, device: torch.device) -> Pooled:
    """Return megavlm's model of the folders that a configuration names. Raises UserError as `own_model` does."""
    chunk, on = own_model(config, device)

    def pooled(batch: MicroBatch, lengths: Sequence[int]) -> Tensor:
        output: Tensor = chunk(batch.to(on))
        width = config.model.language.hidden_size
        return output[: len(lengths) * width].unflatten(0, (-1, width))  # scalars of the loss are behind

    return pooled


@reported("embed")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument or a record is wrong (reported in one line)."""
    try:
        given = _parser().parse_args(without_extensions(argv))
        _embed(given)
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory at --batch-size {given.batch_size}: give a smaller one") from None
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Write the vectors of texts and images.", allow_abbrev=False)
    add_folder_options(parser)
    parser.add_argument(
        "records", metavar="FILE", help="Records of text, images and maybe an id, as FILE[,image_root=DIR][,columns=…]."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="Folder of vectors.npy and ids.jsonl.")
    parser.add_argument(
        "--as", dest="role", choices=("query", "document"), default="document", help="Instruction; default: document's."
    )
    parser.add_argument("--image-root", metavar="DIR", help="Folder of images; default: the file's.")
    parser.add_argument("--width", type=int, metavar="N", help="First channels to keep; default: all.")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="Records together.")
    return parser


def _embed(given: argparse.Namespace) -> None:
    check_folder("--out", given.out)
    records = _records(given)
    found = model_folder(given.model, say=lambda text: print(text, file=sys.stderr, flush=True))
    embedder = Embedder.load(found.folder, found.data, device=device_of(given.device), dtype=DTYPES[given.dtype])
    channels = embedder.config.model.language.hidden_size
    if given.width is not None and not 1 <= given.width <= channels:
        raise UserError(f"--width {given.width} is not between 1 and the {channels} channels of the model")
    ids: list[Any] = []
    parts: list[np.ndarray[Any, Any]] = []
    batch: list[Sample] = []

    def flush() -> None:
        if batch:
            parts.append(embedder.vectors(batch, width=given.width).numpy())
            batch.clear()

    role: Role = "query" if given.role == "query" else "positive"
    for known, sample in _samples(records, embedder, role):
        ids.append(known)
        batch.append(sample)
        if len(batch) == given.batch_size:
            flush()
    flush()
    given.out.mkdir(parents=True, exist_ok=True)
    with open_new(given.out / "vectors.npy") as file:
        np.save(file, np.concatenate(parts))
    replace_file(given.out / "ids.jsonl", "".join(f"{json.dumps(each)}\n" for each in ids))
    print(f"{len(ids):,} vectors of {parts[0].shape[1]:,} channels: {given.out / 'vectors.npy'}")


def _records(given: argparse.Namespace) -> RawRecords:
    (source,) = Kind(DatasetConfig, many=True).from_words([given.records], name="FILE")
    return open_rows(replace(source, image_root=given.image_root or source.image_root), "FILE")


def _samples(raw: RawRecords, embedder: Embedder, role: Role) -> Iterator[tuple[Any, Sample]]:
    """Yield the id and the tokens of each record; raises UserError that names a wrong one."""
    for number in range(len(raw.records)):
        try:
            record = raw.records.read(number)
            if not isinstance(record, dict):
                raise BadSample(Reason.NOT_A_RECORD, f"a record is an object with fields, not {shown(record)}")
            turn = text_turn(record, raw.find, raw.find_video)
            yield record.get("id", number + 1), embedder.sample(replace(turn, role=role))
        except (BadSample, RecursionError) as error:
            told = error.detail if isinstance(error, BadSample) else "it is nested too deeply"
            if isinstance(error, BadSample) and error.reason in (Reason.MISSING, Reason.OUTSIDE):
                told += ": name the folder that its images and videos are in, as FILE,image_root=DIR"
            raise UserError(f"{raw.records.label(number)}: {told}") from error
