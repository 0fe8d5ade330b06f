"""Convert between Hugging Face folders and checkpoints: `megavlm convert import HF_DIR OUT_DIR`, `export`, …"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megavlm.arch.dims import dims_of
from megavlm.arch.plan import make_plan
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained, refuse, with_pretrained_model
from megavlm.command_line.commands import Parser, reported
from megavlm.command_line.parsing import parse
from megavlm.config.derived import replica_size
from megavlm.config.lora_config import frozen_parts, trained_whole
from megavlm.config.schema import CheckpointConfig, Config, PrecisionConfig
from megavlm.errors import UserError
from megavlm.files import check_folder, replace_file
from megavlm.program import program, started_as
from megavlm.rules.check import check
from megavlm.rules.defaults import resolve
from megavlm.rules.extensions import without_extensions
from megavlm.rules.load import to_yaml
from megavlm.storage.cache import local_path


@reported("convert")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 1 verify found a difference, 2 an argument is wrong (reported in one line)."""
    options, rest = _parser().parse_known_args(without_extensions(argv))
    if rest and options.run is not import_:
        raise UserError(f"unknown option {rest[0]}: --help lists them")
    if "out" in options:
        check_folder("OUT_DIR", options.out)
    status: int = options.run(options, rest) if options.run is import_ else options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Convert between Hugging Face folders and megavlm checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    into = commands.add_parser("import", help="Convert a Hugging Face folder to a checkpoint for --load (any layout).")
    into.add_argument("source", metavar="HF_DIR", type=Path)
    into.add_argument("out", metavar="OUT_DIR", type=Path)
    into.set_defaults(run=import_)
    out = commands.add_parser("export", help="Convert a run or checkpoint to a Hugging Face folder.")
    out.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path)
    out.add_argument("out", metavar="HF_OUT_DIR", type=Path)
    out.add_argument("--ema", action="store_true", help="Export the averaged weights of a run with --ema-decay.")
    out.set_defaults(run=export, merge=False)
    merge = commands.add_parser("merge-lora", help="Export a run with its LoRA adapters merged.")
    merge.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path)
    merge.add_argument("out", metavar="HF_OUT_DIR", type=Path)
    merge.add_argument("--ema", action="store_true", help="Export averages of weights and adapters (--ema-decay).")
    merge.set_defaults(run=export, merge=True)
    adapters = commands.add_parser("export-lora", help="Export the LoRA adapters of a run as a PEFT folder.")
    adapters.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path)
    adapters.add_argument("out", metavar="PEFT_OUT_DIR", type=Path)
    adapters.add_argument("--base", help="Name or folder of the base model, for PEFT's config.")
    adapters.set_defaults(run=export_lora)
    compare = commands.add_parser("verify", help="Compare logits with Transformers; exit status 1 if they differ.")
    compare.add_argument("folder", metavar="HF_DIR", type=Path)
    compare.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", type=Path, nargs="?")
    compare.add_argument("--tolerance", type=float, default=1e-4, help="Maximum logit difference; default: 1e-4.")
    compare.add_argument("--samples", type=int, default=2, help="Number of random samples; default: 2.")
    compare.add_argument("--seq-length", type=int, default=None, help="Tokens per sample; default: fits one image.")
    compare.set_defaults(run=verify)
    return parser


def import_(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Import a Hugging Face folder; flags of a run (--tp 2 …) are checked and stored in config.yaml."""
    for name, what in (("config.json", "has a config.json, as models do"), ("metrics.jsonl", "is a run")):
        if (options.out / name).exists():
            raise UserError(f"OUT_DIR {options.out} {what}: name another folder")
    options.source = local_path(str(options.source), "HF_DIR")
    config = with_pretrained_model(parse([*rest, "--init-from", str(options.source)]))
    world = replica_size(config)
    check(config, world=world)
    given, config = config, resolve(config)
    make_plan(config, dims_of(config, world=world))
    pretrained = Pretrained.of(options.source, *ALL_PARTS)

    from megavlm import backend

    chosen = backend.activate()

    from megavlm.checkpoint.hf.importing import import_checkpoint
    from megavlm.train.single_process import ONE, full_model, single_process_groups, unpadded_shapes

    single = replace(config, parallel=type(config.parallel)(), train=replace(config.train, micro_batch_size=1))
    shapes = unpadded_shapes(full_model(single, single_process_groups(chosen), chosen), single)
    found = [*pretrained.problems(), *sorted(pretrained.wrong_shapes(shapes))]
    refuse(found, f"{options.source} does not contain the model that its config.json describes")
    start = time.perf_counter()
    plan = make_plan(single, ONE)
    folder = import_checkpoint(pretrained, shapes, config, plan, root=options.out / "checkpoints")
    loading = replace(given, checkpoint=replace(given.checkpoint, init_from=None, load=str(options.out)))
    replace_file(options.out / "config.yaml", to_yaml(loading))
    parameters = sum(map(math.prod, shapes.values()))
    print(f"{folder}: {parameters / 1e6:.1f} million parameters in {time.perf_counter() - start:.1f} s")
    print(f"start from it: {program('train')} --config {options.out / 'config.yaml'} --run-dir RUN")
    return 0


def export(options: argparse.Namespace) -> int:
    """Export a checkpoint of a run that started from Hugging Face folders; `merge-lora` merges its adapters."""
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

    from megavlm.checkpoint.hf.adapters import export_adapters, read_adapters, read_routers, table_in_memory
    from megavlm.checkpoint.hf.checkpoint_reader import TrainedReader
    from megavlm.checkpoint.hf.exporting import exportable, family_at

    checkpoint, sidecar, saved = exportable(options.source)
    records = TrainedReader(checkpoint)
    adapters = read_adapters(records, saved.model)
    if not adapters:
        raise UserError(f"{options.source} has no adapters: train with --lora-rank, or use export")
    if left := trained_whole(saved):
        raise UserError(
            f"{options.source} has also trained {' and '.join(left)} whole, which adapters do not contain: use "
            f"merge-lora, or train with --freeze {' '.join((*frozen_parts(saved), *left))}"
        )
    family = family_at(sidecar)
    named = {name for held in adapters.values() if held.of_experts is None for name in held.pairs}
    if lost := sorted(named & {*family.not_in_peft}):
        raise UserError(
            f"{options.source} has adapters of {', '.join(lost)}, which PEFT would take for those of experts: use "
            "merge-lora, or train with --lora-targets q_proj k_proj v_proj o_proj"
        )
    table = table_in_memory(family, saved.model)
    routers = read_routers(records) if saved.lora.train_router else {}
    export_adapters(adapters, table, saved.lora, options.out, base=options.base, routers=routers)
    print(options.out)
    return 0


def verify(options: argparse.Namespace) -> int:
    """Compare both models' logits in fp32 on the same random images and text."""
    if options.checkpoint and (options.checkpoint / "config.json").exists() > (options.folder / "config.json").exists():
        raise UserError(f"HF_DIR comes first: write {options.checkpoint} {options.folder}")
    options.folder = local_path(str(options.folder), "HF_DIR")
    asked = Config(checkpoint=CheckpointConfig(init_from=str(options.folder)), precision=PrecisionConfig("fp32"))
    config = resolve(with_pretrained_model(asked))
    pretrained = Pretrained.of(options.folder, *ALL_PARTS)

    from megavlm import backend

    chosen = backend.activate()

    from megavlm.train.verify import compare

    found = compare(
        pretrained, options.checkpoint, config, chosen, samples=options.samples, seq_length=options.seq_length
    )
    print(
        f"largest logit difference {found.largest:.2e} (largest logit {found.scale:.2f}), "
        f"same prediction at {100 * found.same_choice:.2f} % of {options.samples} × {found.length} positions"
    )
    if found.largest > options.tolerance:
        print(f"{started_as('convert')}: that is more than --tolerance {options.tolerance}", file=sys.stderr)
        return 1
    return 0
