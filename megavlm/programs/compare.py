"""Find the first layer at which two models differ: `megavlm compare A B [records.jsonl]`.

A and B are runs, checkpoints or Hugging Face folders. Both get the same samples, from the records or random. The
outputs of all layers are compared in the order of computation, and then the modules inside the first layer that differs
by more than rounding explains.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megavlm.command_line.commands import Parser, count, reported
from megavlm.config.schema import DatasetConfig
from megavlm.errors import UserError
from megavlm.rules.extensions import without_extensions
from megavlm.rules.fields import record_of_word
from megavlm.storage.cache import local_path

_BEFORE, _AFTER = 3, 8  # rows of the table before the first that differs, and from it on


@reported("compare")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 rounding explains all differences, 1 the models differ, 2 a wrong argument."""
    given = _parser().parse_args(without_extensions(argv))
    if len(given.dtype) > 2:
        raise UserError(f"--dtype {' '.join(given.dtype)}: give one type, or one for A and one for B")
    if given.transformers and given.gradients:
        raise UserError("--gradients are not compared with Transformers: leave --transformers or --gradients out")
    data = None if given.records is None else record_of_word(DatasetConfig, given.records, name="FILE")
    paths = tuple(local_path(place, "MODEL") for place in (given.a, given.b))

    from megavlm import backend

    chosen = backend.activate()

    from megavlm.inference.compare import compare

    found = compare(
        (paths[0], paths[1]),
        data,
        chosen,
        precisions=(given.dtype[0], given.dtype[-1]),
        samples=given.samples,
        seq_length=given.seq_length,
        gradients=given.gradients,
        transformers=given.transformers,
    )
    for name, (ours, theirs) in found.options.items():
        print(f"{name} is {ours} in A and {theirs} in B")
    parted = found.parted
    if parted is None:
        worst = max(found.rows, key=lambda row: row.difference / row.allowed)
        print(f"all {len(found.rows)} agree within rounding; the farthest apart is {worst}")
        return 0
    print(f"they diverge at {parted}\n")
    at = list(found.rows).index(parted)
    shown = found.rows[max(0, at - _BEFORE) : at + _AFTER]
    width = max(len(row.name) for row in shown)
    print(f"  {'':{width}}  difference  explained by rounding")
    for row in shown:
        print(f"{'>' if row.parts else ' '} {row.name:{width}}  {row.difference:10.1e}  {row.allowed:.1e}")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Name the first layer where two models diverge by more than rounding explains.", allow_abbrev=False
    )
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="Run, checkpoint, or Hugging Face folder.")
    parser.add_argument(
        "records", nargs="?", metavar="FILE", help="Records as of --datasets; default: random images and text."
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=("fp32", "bf16", "fp16"),
        default=["fp32"],
        metavar="TYPE",
        help="Type to compute in, or A's and B's.",
    )
    parser.add_argument("--gradients", action="store_true", help="Compare gradients as well.")
    parser.add_argument("--transformers", action="store_true", help="Let Transformers run B.")
    parser.add_argument("--samples", type=count, default=2, metavar="N", help="Number of samples.")
    parser.add_argument("--seq-length", type=count, metavar="N", help="Most tokens of a sample; default: the run's.")
    return parser
