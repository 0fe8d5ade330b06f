"""Convert a data set to WebDataset tars: `megavlm prepare SOURCE[,image_root=DIR] OUT_DIR`.

A tar needs one read per sample. A folder of images needs a look-up and a read per image, slow on network file systems.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megavlm.command_line.commands import Parser, count, progress, reported
from megavlm.config.schema import DatasetConfig
from megavlm.data.records.writing import prepare
from megavlm.program import program
from megavlm.rules.fields import record_of_word


@reported("prepare")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument or the data is wrong (reported in one line)."""
    _prepare(_parser().parse_args(argv))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Write records and their images as WebDataset tars.")
    parser.add_argument(
        "source", metavar="SOURCE", help="File of records, or folder of files of one kind, as --datasets takes them."
    )
    parser.add_argument(
        "out", metavar="OUT_DIR", type=Path, help="New folder; the same command resumes an interrupted run."
    )
    parser.add_argument("--vision-input", default="rgb", help="As in training; default: rgb, which leaves arrays out.")
    parser.add_argument(
        "--vision-in-channels", type=int, help="Leave arrays of other numbers of channels out; default: none."
    )
    parser.add_argument("--shard-mib", type=count, default=256, help="Maximum size of a tar in MiB.")
    parser.add_argument(
        "--shuffle", type=int, metavar="SEED", help="Shuffle records with this seed; default: keep SOURCE's order."
    )
    return parser


def _prepare(options: argparse.Namespace) -> None:
    found = prepare(
        record_of_word(DatasetConfig, options.source, name="SOURCE"),
        options.out,
        shard_mib=options.shard_mib,
        shuffle=options.shuffle,
        vision_input=options.vision_input,
        channels=options.vision_in_channels,
        say=progress(),
    )
    print(*found.report(options.out), f"train on it: {program('train')} --datasets {options.out} …", sep="\n")
