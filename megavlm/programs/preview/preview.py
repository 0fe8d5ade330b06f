"""Preview the training data: `megavlm preview CONFIG.yaml`, or with the flags of a run.

Write one self-contained HTML page: images as the model receives them, the text with its trained tokens highlighted,
how full packed sequences are, the sampling share of each source, and skipped samples with reasons.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megavlm.command_line.commands import Parser, reported
from megavlm.command_line.configuration import configured
from megavlm.files import write_out


@reported("preview")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 an argument or the data is wrong (reported in one line)."""
    options, rest = _parser().parse_known_args(argv)
    if rest and not rest[0].startswith("-"):
        is_data = Path(rest[0]).suffix in (".jsonl", ".parquet", ".csv", ".tsv", ".arrow", ".tar")
        rest = ["--datasets" if is_data else "--config", *rest]
    config = configured(rest, world=None)  # a preview does not depend on the layout

    from megavlm.programs.preview.page import page

    names = ", ".join(source.name or Path(source.path).stem for source in config.data.datasets)
    write_out("--out", options.out, page(config, most=options.samples, title=f"Data of {names}"))
    print(f"wrote {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Write an HTML page that shows the training data of a run.",
        epilog="All flags of a run are accepted as well. "
        "A leading argument without -- is taken as --config, or as --datasets where it is a file of records.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("preview.html"), metavar="FILE", help="Write the page here.")
    parser.add_argument("--samples", type=int, default=24, help="Number of samples shown in full.")
    return parser
