"""Convert a data set to WebDataset tars: `megavlm prepare SOURCE OUT_DIR [--image-root DIR]`.

A sample of a tar is one read; a folder of images needs a read, and a look-up, for each, slow on network file systems.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from megavlm.command_line.commands import Parser, count, reported
from megavlm.config.messages import several
from megavlm.config.schema import DatasetConfig
from megavlm.data.arrays import array_size
from megavlm.data.decode import MAX_PIXELS, size_of
from megavlm.data.records import is_tars, open_records
from megavlm.data.records.shapes import SHAPES
from megavlm.data.records.writing import SKIPPED, Notes, write_shards
from megavlm.errors import UserError
from megavlm.files import check_folder
from megavlm.inputs.vision_inputs import RGB, vision_input_of
from megavlm.program import program
from megavlm.rules.fields import Kind


@reported("prepare")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument or the data is wrong (reported in one line)."""
    prepare(_parser().parse_args(argv))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Write records and their images as WebDataset tars.")
    parser.add_argument(
        "source", metavar="SOURCE", help="File of records, or folder of files of one kind, as --datasets has it."
    )
    parser.add_argument(
        "out", metavar="OUT_DIR", type=Path, help="New folder; the same command resumes an interrupted run."
    )
    parser.add_argument("--image-root", help="Folder that image paths are relative to; default: SOURCE's.")
    parser.add_argument(
        "--kind",
        choices=["auto", *(kind for kind in SHAPES if kind != "pairs")],
        help="Format of a record of SOURCE; default: auto, which detects it.",
    )
    parser.add_argument(
        "--vision-input", default=RGB.name, help="As in training; default: rgb, which leaves arrays out."
    )
    parser.add_argument(
        "--vision-in-channels", type=int, help="Leave arrays of other numbers of channels out; default: none."
    )
    parser.add_argument("--shard-mib", type=count, default=256, help="Maximum size of a tar in MiB.")
    parser.add_argument(
        "--shuffle", type=int, metavar="SEED", help="Shuffle records with this seed; default: keep SOURCE's order."
    )
    return parser


def prepare(options: argparse.Namespace) -> None:
    source = _source(options)
    if is_tars(source):
        raise UserError(f"{source.path} contains tars, which training reads directly: use --datasets {source.path}")
    check_folder("OUT_DIR", options.out)
    records = open_records(source, pairs=False)
    count = len(records)
    order = np.arange(count) if options.shuffle is None else np.random.default_rng(options.shuffle).permutation(count)
    recipe = {
        "source": str(Path(source.path).resolve()),
        "kind": source.kind,
        "image_root": source.image_root,
        "records": count,
        "shard_mib": options.shard_mib,
        "shuffle": options.shuffle,
    }
    if source.columns:
        recipe["columns"] = dict(source.columns)
    look: Callable[[bytes], object] = size_of
    if vision_input_of(options.vision_input, options.vision_in_channels or 0).array_channels is not None:
        recipe |= {"vision_input": options.vision_input, "vision_in_channels": options.vision_in_channels}
        look = partial(array_size, channels=options.vision_in_channels, max_pixels=MAX_PIXELS)
    notes = write_shards(
        records,
        options.out,
        recipe=recipe,
        order=order,
        shard_bytes=options.shard_mib * 2**20,
        look=look,
        progress=_progress(count),
    )
    print(
        f"{options.out}: {several(notes.samples, 'sample')} in {several(notes.shards, 'tar')}, "
        f"{several(sum(notes.skipped.values()), 'record')} skipped"
    )
    for reason, number in sorted(notes.skipped.items(), key=lambda item: -item[1]):
        print(f"  {number} {reason}")
    if notes.skipped:
        print(f"  {options.out / SKIPPED} lists them")
    print(f"train on it: {program('train')} --datasets {options.out} …")


def _source(options: argparse.Namespace) -> DatasetConfig:
    """Return SOURCE, which may have keys as --datasets has, with the options of this command."""
    (found,) = Kind(DatasetConfig, many=True).from_words([options.source], name="SOURCE")
    given = {"kind": options.kind, "image_root": options.image_root}
    return replace(found, **{name: value for name, value in given.items() if value is not None})


def _progress(total: int) -> Callable[[int, Notes], None]:
    """Return a callback that prints progress to stderr at most every two seconds."""
    last = time.monotonic()

    def show(done: int, notes: Notes) -> None:
        nonlocal last
        if time.monotonic() - last > 2:
            last = time.monotonic()
            print(f"{done} of {total} records, {notes.shards} tars", file=sys.stderr)

    return show
