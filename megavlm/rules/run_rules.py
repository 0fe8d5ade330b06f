"""Rules about a run's data sets, callbacks, trackers, folders and checkpoints, and about language models alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megavlm.config.derived import has_vision
from megavlm.config.messages import shown
from megavlm.config.option import data_kind, has_validation
from megavlm.config.registry import registered
from megavlm.config.schema import Config, DataConfig
from megavlm.resilience.bad_steps import iterations
from megavlm.rules import Rule
from megavlm.rules.defaults import resolve
from megavlm.storage import complaint as url_complaint
from megavlm.storage import is_url, without_secrets


def datasets(config: Config) -> Iterator[str]:
    """Check the data sets: paths and distinct names; validation data are a split or separate data sets."""
    data, size = config.data, config.train.global_batch_size
    for place in data.imageless_samples:
        if place >= size:
            yield f"data.imageless_samples {place} is not in a batch of --global-batch-size {size}: use 0 to {size - 1}"
    if data.datasets and data.kind not in (None, "files"):
        yield f"--data {data.kind} does not use --datasets: leave one of them out"
    if data.kind == "files" and not data.datasets:
        yield "--data files needs --datasets: name your data sets, for example --datasets PATH,image_root=DIR"
    if data.validation and data.validation_split:
        yield "--validation and --validation-split both say what is not trained on: leave one of them out"
    for flag, given in (("--datasets", data.datasets), ("--validation", data.validation)):
        names = [dataset.name or Path(dataset.path).stem for dataset in given]
        for dataset, name in zip(given, names, strict=True):
            if not dataset.path:
                yield f"{flag} has an entry without a path: write path: FILE"
            if names.count(name) > 1:
                yield f"{flag} has two data sets named {shown(name)}: set different names (name=…)"


def callbacks_and_trackers(config: Config) -> Iterator[str]:
    logging = config.logging
    for name in (each for each in logging.callback if each not in registered("callbacks")):
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
            yield f"--callback {shown(name)} is not MODULE:CLASS: write it as in my_package.my_module:MyCallback"
    if logging.tracker and not logging.tracker_project:
        yield "--tracker-project is empty: name the project, or leave it out"


def run_dir_is_a_folder(config: Config) -> Iterator[str]:
    run_dir = config.run.run_dir
    option, path = f"--run-dir {shown(run_dir)}", Path(run_dir)
    if not run_dir:
        yield "--run-dir is empty: name the folder to write to"
    if is_url(run_dir):
        place = shown(without_secrets(run_dir))
        yield (
            f"--run-dir {place} is a URL, but a run writes to a disk first: use --run-dir runs/NAME --checkpoint-dir "
            f"{place}"
        )
    if "\0" in run_dir:
        yield f"{option} cannot be used: a name has no NUL"
    try:
        run_dir.encode()
        taken = [place for place in (path, *path.parents) if place.exists() and not place.is_dir()]
        is_model = (path / "config.json").is_file()
        has_checkpoints = (path / "megavlm.json").is_file() or any(path.glob("iter_*/megavlm.json"))
    except (OSError, ValueError) as error:
        yield f"{option} cannot be used ({shown(str(error))}): choose another name"
    else:
        if is_model:
            yield f"{option} has a config.json, as models do: name another folder for the run"
        if has_checkpoints:
            yield f"{option} is not a run, but its checkpoints: give it to --load, and another name here"
        if taken:
            yield f"{option} cannot be a folder because {shown(str(taken[0]))} is a file: choose another"


def checkpoints_have_places(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.checkpoint_dir is not None and not checkpoint.save:
        yield "--checkpoint-dir has copies of checkpoints, but --no-save writes none: leave one of them out"
    for option, place in (("--checkpoint-dir", checkpoint.checkpoint_dir), ("--load", checkpoint.load)):
        if place is not None and is_url(place) and (problem := url_complaint(place)):
            yield f"{option} {shown(without_secrets(place))} {problem}"
    copies = checkpoint.checkpoint_dir
    if copies is not None and Path(copies).resolve() == Path(config.run.run_dir, "checkpoints").resolve():
        yield f"--checkpoint-dir {shown(copies)} is where --run-dir has its checkpoints: name another place for copies"


def bad_steps(config: Config) -> Iterator[str]:
    checkpoint, numerics = config.checkpoint, config.numerics
    try:
        iterations(numerics.iterations_to_skip)
    except ValueError as error:
        yield (
            f"--iterations-to-skip {shown(str(error))} is no iteration: use numbers from 1 and ranges, as in 12 40-45"
        )
    if numerics.on_spike == "rewind" and not (checkpoint.save and checkpoint.save_interval):
        yield "--on-spike rewind goes back to a checkpoint, but none is saved: add --save-interval 1000, or use skip"


def best_checkpoint_has_its_score(config: Config) -> Iterator[str]:
    best, every = config.checkpoint.keep_best, config.checkpoint.save_interval
    if best is None or not best.startswith("validation/"):
        return
    if not has_validation(config):
        yield f"--keep-best {shown(best)} needs validation data: add --validation PATH or --validation-split 0.01"
    interval = resolve(config).evaluation.eval_interval
    if not (interval and every and every % interval == 0):
        yield (
            f"--keep-best {shown(best)} needs a validation with every checkpoint: make --save-interval {every} a "
            f"multiple of --eval-interval {interval}, both above 0, or use --keep-best loss"
        )


def language_alone(config: Config) -> Iterator[str]:
    """Refuse images, and parts that a language model alone does not have. What `model.vision` and `model.projector` say
    is not looked at: a published model keeps its own sizes.
    """
    model, data = config.model, config.data
    if has_vision(model):
        return
    without = "a model without a vision encoder (model.vision.num_layers 0)"
    if data_kind(config) == "digits":
        yield f"--data digits asks about images, and this is {without}: use --data synthetic or --datasets"
    if any(data.images_per_sample) and data.images_per_sample != DataConfig().images_per_sample:
        yield f"--images-per-sample {' '.join(map(str, data.images_per_sample))} gives images to {without}: set it to 0"
    for name in ("bidirectional_images", "bidirectional_windows"):
        if getattr(model.language, name):
            yield f"model.language.{name} is of no use to {without}: set it to false"
    if config.checkpoint.language_from is not None:
        yield f"--language-from joins a language model to a vision encoder, and this is {without}: use --init-from"


RUN_RULES: tuple[Rule, ...] = (
    language_alone,
    datasets,
    callbacks_and_trackers,
    run_dir_is_a_folder,
    checkpoints_have_places,
    bad_steps,
    best_checkpoint_has_its_score,
)
