"""Write the vectors of texts and images: `megavlm embed RUN_DIR records.jsonl --out vectors`.

Each record of the file (JSON Lines, CSV, parquet, …) has `text`, `image` or `images` (`video`, `videos`), and an
optional `id`. The command writes vectors/vectors.npy, [records, channels] float32 with rows of length 1, and
vectors/ids.jsonl with the id of each row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from megavlm.command_line.commands import Parser, count, reported
from megavlm.config.schema import DatasetConfig
from megavlm.data.records.opening import open_rows
from megavlm.errors import UserError
from megavlm.files import check_folder, open_new, replace_file
from megavlm.inference.embedder import Embedder
from megavlm.inference.folders import model_folder
from megavlm.programs.model_options import add_folder_options, device_of, memory_reported
from megavlm.rules.extensions import without_extensions
from megavlm.rules.fields import record_of_word


@reported("embed")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument or a record is wrong (reported in one line)."""
    given = _parser().parse_args(without_extensions(argv))
    with memory_reported(given.batch_size):
        _embed(given)
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
    parser.add_argument("--width", type=int, metavar="N", help="First channels to keep; default: all.")
    parser.add_argument("--batch-size", type=count, default=8, metavar="N", help="Records together.")
    return parser


def _embed(given: argparse.Namespace) -> None:
    check_folder("--out", given.out)
    raw = open_rows(record_of_word(DatasetConfig, given.records, name="FILE"), "FILE")
    found = model_folder(given.model)
    embedder = Embedder.load(found.folder, found.data, device=device_of(given.device), dtype=given.dtype)
    if given.width is not None and not 1 <= given.width <= embedder.channels:
        raise UserError(f"--width {given.width} is not between 1 and the {embedder.channels} channels of the model")
    samples = embedder.samples(raw, "query" if given.role == "query" else "positive")
    ids, parts = [], []
    while batch := list(islice(samples, given.batch_size)):
        ids += [known for known, _ in batch]
        parts.append(embedder.vectors([sample for _, sample in batch], width=given.width).numpy())
    given.out.mkdir(parents=True, exist_ok=True)
    with open_new(given.out / "vectors.npy") as file:
        np.save(file, np.concatenate(parts))
    replace_file(given.out / "ids.jsonl", "".join(f"{json.dumps(each)}\n" for each in ids))
    print(f"{len(ids):,} vectors of {parts[0].shape[1]:,} channels: {given.out / 'vectors.npy'}")
