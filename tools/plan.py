"""Find the fastest layout: `python tools/plan.py --model qwen2_5_vl_7b --gpus 64 --gpu h100 --images 6x1024`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megavlm.config.load import from_yaml_file, to_yaml
from megavlm.config.schema import CheckpointConfig, Config, DataConfig, TrainConfig
from megavlm.config.words import plain
from megavlm.errors import UserError
from megavlm.planner.candidates import Space
from megavlm.planner.gantt import html, png
from megavlm.planner.hardware import PROFILES, profile
from megavlm.planner.layers import module_of
from megavlm.planner.models import MODELS, model
from megavlm.planner.plan import make_plan
from megavlm.planner.report import report
from megavlm.planner.search import Outcome, search, timeline_of


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 found, 1 no layout can run, 2 something given is wrong (said in one line)."""
    options = _parser().parse_args(argv)
    try:
        return plan(options)
    except UserError as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Rank the layouts of a model on a number of devices.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help=f"a published model: {', '.join(MODELS)}")
    what.add_argument("--config", metavar="FILE.yaml", help="a run's configuration")
    what.add_argument("--hf", metavar="DIR", help="a Hugging Face folder; only its config.json is read")
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--gpu", "--profile", dest="gpu", default="h100", help=f"{', '.join(PROFILES)}, or a JSON file")
    parser.add_argument("--seq-length", type=int, metavar="N")
    parser.add_argument("--images", metavar="COUNTxSIDE", help="images per sample and their side in pixels, as 6x1024")
    parser.add_argument("--global-batch-size", "--gbs", type=int, metavar="N", help="default: 8 samples per device")
    parser.add_argument("--precision", choices=("bf16", "fp32"))
    parser.add_argument("--freeze", nargs="*", choices=("vision", "projector", "language"))
    parser.add_argument("--placement", choices=("stages", "colocated"), help="only this one")
    parser.add_argument("--vision-tp", type=int, metavar="N", help="colocated: ranks that share an encoder")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), help="only this mode")
    parser.add_argument("--no-offload", action="store_true", help="leave out what would fit with --offload alone")
    parser.add_argument("--top", type=int, default=10, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE.yaml", help="write the best layout's configuration")
    parser.add_argument("--gantt", type=Path, metavar="FILE", help="draw its timeline: .html or .png")
    return parser


def plan(options: argparse.Namespace) -> int:
    config = configuration(options)
    hardware = profile(options.gpu)
    space = Space()
    if options.placement is not None:
        space = replace(space, placement=(options.placement,))
    if options.recompute is not None:
        space = replace(space, recompute=(options.recompute,))
    if options.no_offload:
        space = replace(space, offload=())
    outcome = search(config, options.gpus, hardware, space=space, top=options.top)
    print(report(outcome))
    if not outcome.best:
        return 1
    if options.out is not None:
        _write(options.out, "--out", to_yaml(outcome.config(config)))
    if options.gantt is not None:
        draw(outcome, config, hardware_name=options.gpu, path=options.gantt)
    return 0


def configuration(options: argparse.Namespace) -> Config:
    """The run to plan for: a file's, or a model's with synthetic data as large as asked."""
    if options.gpus < 1:
        raise UserError(f"--gpus {options.gpus} must be at least 1")
    if options.config is not None:
        config = from_yaml_file(options.config)
    else:
        train = TrainConfig(
            seq_length=4096, global_batch_size=8 * options.gpus, precision="bf16", run_dir="runs/planned"
        )
        config = Config(train=train, data=DataConfig(source="synthetic"))
        if options.model is not None:
            config = replace(config, model=model(options.model))
        else:
            config = replace(config, checkpoint=CheckpointConfig(init_from=options.hf))
    if config.checkpoint.init_from is not None:
        from megavlm.checkpoint.hf.source import with_model_of_origins

        config = with_model_of_origins(config)
    given = {
        "seq_length": options.seq_length,
        "global_batch_size": options.global_batch_size,
        "precision": options.precision,
    }
    train = replace(config.train, **{name: value for name, value in given.items() if value is not None})
    config = replace(config, train=train)
    if options.freeze is not None:
        config = replace(config, model=replace(config.model, freeze=tuple(options.freeze)))
    if options.vision_tp is not None:
        if options.vision_tp < 1:
            raise UserError(f"--vision-tp {options.vision_tp} must be at least 1")
        parallel = replace(config.parallel, vision_tensor_model_parallel_size=options.vision_tp)
        config = replace(config, parallel=parallel)
    if options.images is not None:
        count, side = _images(options.images, config.model.vision.patch_size * config.model.projector.pixel_shuffle)
        config = replace(config, data=replace(config.data, images_per_sample=(count,), image_sizes=(side,)))
    return config


def _images(text: str, multiple: int) -> tuple[int, int]:
    """`6x1024` → (6, 1022): sides are cut to whole features."""
    count, _, side = text.partition("x")
    if not (count.isdigit() and side.isdigit() and int(side) >= multiple):
        raise UserError(f"--images {plain(text)} is not COUNTxSIDE with a side of {multiple} pixels or more, as 6x1024")
    return int(count), int(side) // multiple * multiple


def draw(outcome: Outcome, config: Config, *, hardware_name: str, path: Path) -> None:
    """The best layout's timeline, as a page or a picture by the file's ending."""
    candidate = outcome.best[0].candidate
    timeline = timeline_of(outcome.best[0], config, profile(hardware_name))
    chunks = make_plan(outcome.config(config), candidate.dims).chunks
    title = f"{candidate.label} on {plain(hardware_name)}"

    def sees(chunk: int) -> bool:
        return any(module_of(name) == "vision" for name in chunks[chunk])

    if path.suffix == ".png":
        png(timeline, path, title=title, sees=sees)
        print(f"wrote {path}")
    else:
        _write(path, "--gantt", html(timeline, title=title, sees=sees))


def _write(path: Path, flag: str, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {plain(str(path))} cannot be written: {error.strerror}") from None
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
