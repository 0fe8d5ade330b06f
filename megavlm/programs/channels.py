"""Measure the mean and deviation of each channel of a data set's images: `megavlm channels SOURCE --out FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megavlm.command_line.commands import Parser, count, progress, reported
from megavlm.config.schema import DatasetConfig
from megavlm.data.survey import measured_channels
from megavlm.files import write_out
from megavlm.inputs.vision_inputs import NAME, channels_json
from megavlm.program import program
from megavlm.rules.fields import record_of_word


@reported("channels")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument or the data is wrong (reported in one line)."""
    measure(_parser().parse_args(argv))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Measure the mean and standard deviation of each channel of images, for --channel-statistics."
    )
    parser.add_argument("source", metavar="SOURCE", help="File of records, or tars, as --datasets takes them.")
    parser.add_argument("--out", type=Path, default=Path(NAME), help="File to write.")
    parser.add_argument("--vision-input", default="array", help="As in training.")
    parser.add_argument(
        "--vision-in-channels",
        type=int,
        help="Number of channels of the arrays; default: the shorter end of the first image's dimensions.",
    )
    parser.add_argument("--samples", type=count, default=1000, help="Records to read, spread over all of them.")
    return parser


def measure(options: argparse.Namespace) -> None:
    """Measure and write the channel statistics of a data set. Raises UserError if none of its images can be read."""
    source = record_of_word(DatasetConfig, options.source, name="SOURCE")
    name, channels = options.vision_input, options.vision_in_channels
    found, skipped = measured_channels(source, name, channels, samples=options.samples, say=progress())
    write_out("--out", options.out, channels_json(name, found))
    print(f"{options.out}: {len(found.mean)} channels, {len(skipped)} images could not be read")
    if skipped:
        print(f"  the first: {skipped[0].detail}")
    print(
        f"train on it: {program('train')} --vision-input {name} "
        f"--set model.vision.in_channels={len(found.mean)} --channel-statistics {options.out} …"
    )
