"""Convert runs to Hugging Face folders: `megavlm convert export RUN HF_OUT_DIR`, `merge-lora`, …"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megavlm.command_line.commands import Parser, count, reported
from megavlm.errors import UserError
from megavlm.files import check_folder
from megavlm.program import started_as
from megavlm.rules.extensions import without_extensions
from megavlm.storage.cache import local_path


@reported("convert")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 1 verify found a difference, 2 an argument is wrong (reported in one line)."""
    if argv[:1] == ["import"]:
        raise UserError("a run reads a Hugging Face folder itself, at any layout: start it with --init-from HF_DIR")
    options = _parser().parse_args(without_extensions(argv))
    if "out" in options:
        check_folder("OUT_DIR", options.out)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Convert runs and checkpoints to Hugging Face folders.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    writers = (
        ("export", "Convert a run or checkpoint to a Hugging Face folder.", export),
        ("merge-lora", "Export a run with its LoRA adapters merged.", export),
        ("export-lora", "Export the LoRA adapters of a run as a PEFT folder.", export_lora),
    )
    for name, about, run in writers:
        each = commands.add_parser(name, help=about)
        each.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path)
        each.add_argument("out", metavar="OUT_DIR", type=Path)
        if run is export:
            each.add_argument("--ema", action="store_true", help="Export averages of a run with --ema-decay.")
        else:
            each.add_argument("--base", help="Name or folder of the base model, for PEFT's config.")
        each.set_defaults(run=run, merge=name == "merge-lora")
    compare = commands.add_parser("verify", help="Compare logits with Transformers; exit status 1 if they differ.")
    compare.add_argument("folder", metavar="HF_DIR")
    compare.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", type=Path, nargs="?")
    compare.add_argument("--tolerance", type=float, default=1e-4, help="Maximum logit difference.")
    compare.add_argument("--samples", type=count, default=2, help="Number of random samples.")
    compare.add_argument("--seq-length", type=count, default=None, help="Tokens per sample; default: fits one image.")
    compare.set_defaults(run=verify)
    return parser


def export(options: argparse.Namespace) -> int:
    """Export a checkpoint of a run that started from Hugging Face folders; with `merge-lora`, merge its adapters."""
    from megavlm import backend

    backend.activate()

    from megavlm.checkpoint.hf.exporting import export_run

    export_run(options.source, options.out, merge=options.merge, averaged=options.ema)
    print(options.out)
    return 0


def export_lora(options: argparse.Namespace) -> int:
    """Export the adapters of a run in PEFT's format."""
    from megavlm import backend

    backend.activate()

    from megavlm.checkpoint.hf.adapters import export_adapters_of

    export_adapters_of(options.source, options.out, base=options.base)
    print(options.out)
    return 0


def verify(options: argparse.Namespace) -> int:
    """Compare logits of Transformers' and megavlm's model in fp32 on random samples; return 1 if they differ."""
    folder = local_path(options.folder, "HF_DIR")
    if options.checkpoint and (options.checkpoint / "config.json").exists() > (folder / "config.json").exists():
        raise UserError(f"HF_DIR comes first: write {options.checkpoint} {options.folder}")

    from megavlm import backend

    chosen = backend.activate()

    from megavlm.inference.verify import compare

    sizes = {"samples": options.samples, "seq_length": options.seq_length}
    found = compare(folder, options.checkpoint, chosen, **sizes, tolerance=options.tolerance)
    print(
        f"largest logit difference {found.largest:.2e} (largest logit {found.scale:.2f}), "
        f"same prediction at {100 * found.same_choice:.2f} % of {options.samples} × {found.length} positions"
    )
    if not found.largest <= options.tolerance:  # NaN differs, too
        print(f"{started_as('convert')}: that is more than --tolerance {options.tolerance}", file=sys.stderr)
        if found.parted is not None:
            print(f"the first module that differs beyond rounding: {found.parted}", file=sys.stderr)
        return 1
    return 0
