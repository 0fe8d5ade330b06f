"""Measure the mean and deviation of each channel of a data set's images: `megavlm channels SOURCE --out FILE`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megavlm.command_line.commands import Parser, count, reported
from megavlm.config.schema import DatasetConfig
from megavlm.data.arrays import read_array
from megavlm.data.decode import MAX_PIXELS, decode
from megavlm.data.records import Records, open_records
from megavlm.data.types import ImageRef
from megavlm.files import write_out
from megavlm.inputs.bad_sample import BadSample
from megavlm.inputs.vision_inputs import ARRAY, NAME, VisionInput, channels_json, measured, vision_input_of
from megavlm.program import program
from megavlm.rules.fields import Kind


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
    parser.add_argument("--image-root", help="Folder that image paths are relative to; default: SOURCE's.")
    parser.add_argument("--vision-input", default=ARRAY.name, help="As in training.")
    parser.add_argument(
        "--vision-in-channels",
        type=int,
        help="Number of channels of the arrays; default: the shorter end of the first image's dimensions.",
    )
    parser.add_argument("--samples", type=count, default=1000, help="Records to read, spread over all of them.")
    return parser


def measure(options: argparse.Namespace) -> None:
    """Write the statistics of a data set's channels. Raises UserError if no image of it can be read."""
    (source,) = Kind(DatasetConfig, many=True).from_words([options.source], name="SOURCE")
    source = replace(source, image_root=options.image_root or source.image_root)
    records = open_records(source)
    vision_input = vision_input_of(options.vision_input, options.vision_in_channels or 0)
    skipped: list[BadSample] = []
    found = measured(_images(records, vision_input, options, skipped))
    write_out("--out", options.out, channels_json(vision_input.name, found))
    print(f"{options.out}: {len(found.mean)} channels, {len(skipped)} images could not be read")
    if skipped:
        print(f"  the first: {skipped[0].detail}")
    print(
        f"train on it: {program('train')} --vision-input {vision_input.name} "
        f"--set model.vision.in_channels={len(found.mean)} --channel-statistics {options.out} …"
    )


def _images(
    records: Records, vision_input: VisionInput, options: argparse.Namespace, skipped: list[BadSample]
) -> Iterator[NDArray[Any]]:
    """Yield the images of records that are spread evenly over the data set; what cannot be read goes to `skipped`."""
    channels, shown = options.vision_in_channels, time.monotonic()
    chosen = np.unique(np.linspace(0, len(records) - 1, min(options.samples, len(records))).astype(int))
    for done, index in enumerate(chosen.tolist()):
        if time.monotonic() - shown > 2:
            shown = time.monotonic()
            print(f"{done} of {len(chosen)} records", file=sys.stderr)
        try:
            for visual in records.read(index).images:
                if not isinstance(visual, ImageRef):
                    continue
                if vision_input.make is not None:
                    yield vision_input.make(decode(visual.source))
                    continue
                image = read_array(visual.source, channels=channels, max_pixels=MAX_PIXELS)
                channels = image.shape[-1]
                yield image
        except BadSample as error:
            skipped.append(error)
