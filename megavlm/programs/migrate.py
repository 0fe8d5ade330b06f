"""Convert the configuration of another trainer: `megavlm migrate FILE … [--out config.yaml]`, and back with `--to`."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from megavlm.command_line import migration
from megavlm.command_line.commands import Parser, count, reported
from megavlm.errors import UserError
from megavlm.files import write_out
from megavlm.program import program


@reported("migrate")
def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 done, 2 a file or an argument is wrong (reported in one line)."""
    asked = _parser().parse_args(argv)
    if asked.to is None:
        _migrate(asked.files, asked.kind, asked.world_size, _out(asked.out, "config.yaml"))
        return 0
    if len(asked.files) > 1:
        raise UserError("--to takes one file, the config.yaml of a run")
    lines, data, name = migration.sent_back(asked.files[0], asked.to)
    _print_lines({each: [line for line in lines if line.status == each] for each in migration.STATUSES})
    _write(_out(asked.out, name), data, as_json=name.endswith(".json"))
    return 0


def _out(given: Path | None, default: str) -> Path:
    """Return --out, or the default. Raises UserError if the default file exists already: it may be the user's."""
    if given is None and Path(default).exists():
        raise UserError(f"{default} is there: name the file to write with --out")
    return given or Path(default)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Convert the configuration of another trainer, and say what differs.")
    add = parser.add_argument
    what = (
        "DeepSpeed's JSON, the YAML of Accelerate, LLaMA-Factory, ms-swift or Megatron-LM, or a script with a command"
    )
    add("files", metavar="FILE", nargs="+", type=Path, help=f"{what}; files that belong together are given together.")
    add("--from", dest="kind", choices=migration.KINDS, help="Trainer of FILE; default: detected from its keys.")
    add("--world-size", type=count, help="Number of processes, which makes the global batch; default: FILE's.")
    add("--to", choices=["deepspeed", "fsdp"], help="Convert config.yaml of a run to this, as far as it can say it.")
    add("--out", type=Path, help="File to write; default: config.yaml, ds_config.json or fsdp.yaml.")
    return parser


def _migrate(files: Sequence[Path], kind: str | None, world: int | None, out: Path) -> None:
    found = migration.migrated(files, kind=kind, world=world)
    for file, name in zip(files, found.kinds, strict=True):
        print(f"{file} is {name}'s")
    lists: dict[str, Sequence[object]] = {
        each: [line for line in found.lines if line.status == each and not line.default] for each in migration.STATUSES
    }
    lists["left out, with the defaults there"] = [
        line for line in found.lines if line.default and (line.ours or line.note)
    ]
    _print_lines(lists | {"differs, whatever the file says": [f"  {each}" for each in found.remarks]})
    found.check()
    _write(
        out,
        migration.nested(found.values),
        head=f"# Written by megavlm migrate from {' '.join(file.name for file in files)}\n",
    )
    words = [f"--config {out}", *["--datasets PATH --set"] * bool(found.waiting)]
    words += [shlex.quote(f"{key}={json.dumps(value)}") for key, value in found.waiting.items()]
    print(f"Its plan and memory:\n  {program('train')} {' '.join(words)} --dry-run")


def _print_lines(lists: Mapping[str, Sequence[object]]) -> None:
    for title, lines in lists.items():
        print(*([f"\n{title}", *lines] if lines else []), sep="\n", end="\n" * bool(lines))


def _write(out: Path, data: Mapping[str, Any], *, head: str = "", as_json: bool = False) -> None:
    text = json.dumps(data, indent=2) + "\n" if as_json else yaml.safe_dump(data, sort_keys=False, width=120)
    write_out("--out", out, head + text)
    print(f"\n{out} is written")
