"""Rules about the learning rate, the data and the files of a run. `rules.py` defines what a rule is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megavlm.config.messages import shown
from megavlm.config.option import has_validation
from megavlm.config.registry import registered
from megavlm.config.schema import Config, DatasetConfig
from megavlm.errors import UserError
from megavlm.resilience.bad_steps import iterations
from megavlm.rules.defaults import is_set, resolve
from megavlm.rules.training_rules import OPTIMIZER_RULES
from megavlm.storage import complaint as url_complaint
from megavlm.storage import is_url, without_secrets


def with_train_iters(config: Config, iterations: int) -> Config:
    """Return the resolved configuration of a run of `--epochs` with its number of steps, and what follows from it.

    Raises UserError if the schedule does not fit into so many steps.
    """
    config = resolve(replace(config, train=replace(config.train, train_iters=iterations)))
    for rule in (warmup_fits, wsd_decay_fits, profile_sees_iterations):
        if complaint := rule(config):
            raise UserError(f"--epochs {config.train.epochs:g} makes {iterations} iterations: {complaint}")
    return config


def one_length(config: Config) -> str | None:
    train, optimizer = config.train, config.optimizer
    if train.epochs is not None and is_set(train, "train_iters"):
        return (
            f"--epochs {train.epochs:g} and --train-iters {train.train_iters} both say how long to train: leave one of "
            "them out"
        )
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_iters:
        return (
            f"--lr-warmup-fraction {optimizer.lr_warmup_fraction} and --lr-warmup-iters {optimizer.lr_warmup_iters} "
            "both say how long to warm up: leave one of them out"
        )
    return None


def lr_decays_downwards(config: Config) -> str | None:
    """--min-lr must not exceed --lr; the minimum rates of the parts are scaled with their peak rates."""
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        return f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}: lower --min-lr or raise --lr"
    return None


def warmup_fits(config: Config) -> str | None:
    run = resolve(config)
    if not is_set(run.optimizer, "lr_decay_iters"):  # --epochs: the data have not been looked at
        return None
    warmup, iterations = run.optimizer.lr_warmup_iters, run.train.train_iters
    if is_set(run.train, "train_iters") and warmup > iterations:
        return (
            f"--lr-warmup-iters {warmup} is longer than --train-iters {iterations}: shorten the warm-up or train longer"
        )
    flag, end = _decay_end(config)
    if warmup >= end:
        return f"--lr-warmup-iters {warmup} leaves nothing to decay before {flag} {end}: use at most {end - 1}"
    return None


def wsd_decay_fits(config: Config) -> str | None:
    optimizer = config.optimizer
    if optimizer.lr_decay_style != "WSD" and is_set(optimizer, "lr_wsd_decay_iters"):
        return (
            f"--lr-wsd-decay-iters belongs to --lr-decay-style WSD, but that is {optimizer.lr_decay_style}: change the "
            f"style, or set --lr-wsd-decay-iters none"
        )
    optimizer = resolve(config).optimizer
    if not is_set(optimizer, "lr_decay_iters"):
        return None
    flag, end = _decay_end(config)
    length = optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style == "WSD" and optimizer.lr_warmup_iters + length > end:
        return (
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} + --lr-wsd-decay-iters {length} do not fit into {flag} "
            f"{end}: set --lr-wsd-decay-iters to at most {end - optimizer.lr_warmup_iters}"
        )
    return None


def loss_scale_starts_above_its_floor(config: Config) -> str | None:
    optimizer = config.optimizer
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        return (
            f"optimizer.min_loss_scale {optimizer.min_loss_scale} is above optimizer.initial_loss_scale "
            f"{optimizer.initial_loss_scale}: lower the former or raise the latter"
        )
    return None


def imageless_samples_exist(config: Config) -> str | None:
    size = config.train.global_batch_size
    for place in config.data.imageless_samples:
        if place >= size:
            return (
                f"data.imageless_samples {place} is not in a batch of --global-batch-size {size}: use 0 to {size - 1}"
            )
    return None


def files_have_datasets(config: Config) -> str | None:
    data = config.data
    if data.datasets and data.kind not in (None, "files"):
        return f"--data {data.kind} does not use --datasets: leave one of them out"
    if data.kind == "files" and not data.datasets:
        return "--data files needs --datasets: name your data sets, for example --datasets PATH,image_root=DIR"
    return _complaint_about("--datasets", data.datasets)


def validation_is_apart(config: Config) -> str | None:
    """Validation data are a split of the data sets, or other data sets."""
    data = config.data
    if data.validation and data.validation_split:
        return "--validation and --validation-split both say what is not trained on: leave one of them out"
    for dataset in data.validation:
        if dataset.weight not in (None, 1):
            return f"--validation {shown(dataset.path)} has a weight, but each of its samples counts once: leave it out"
    return _complaint_about("--validation", data.validation)


def _complaint_about(flag: str, datasets: Sequence[DatasetConfig]) -> str | None:
    for dataset in datasets:
        if not dataset.path:
            return f"{flag} has an entry without a path: write path: FILE"
        if dataset.weight is not None and dataset.weight <= 0:
            return f"{flag} {shown(dataset.path)} has weight {dataset.weight}: it must be greater than 0"
    names = [dataset.name or Path(dataset.path).stem for dataset in datasets]
    for name in names:
        if names.count(name) > 1:
            return f"{flag} has two data sets named {shown(name)}: set different names (name=…)"
    return None


def profile_sees_iterations(config: Config) -> str | None:
    logging = config.logging
    if not logging.profile:
        return None
    start, end, last = logging.profile_step_start, logging.profile_step_end, resolve(config).train.train_iters
    if start >= end:
        return f"--profile-step-start {start} is not before --profile-step-end {end}: use at most {end - 1}"
    if last is not None and start >= last:
        return f"--profile-step-start {start} is not less than --train-iters {last}: use at most {last - 1}"
    if not logging.profile_ranks:
        return "--profile-ranks is empty: name ranks, or leave --profile out"
    return None


def callbacks_are_classes(config: Config) -> str | None:
    logging = config.logging
    for name in (each for each in logging.callback if each not in registered("callbacks")):
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", name):
            return f"--callback {shown(name)} is not MODULE:CLASS: write it as in my_package.my_module:MyCallback"
    for name in (*logging.callback, *logging.tracker):
        if (*logging.callback, *logging.tracker).count(name) > 1:
            flag = "--tracker" if name in logging.tracker else "--callback"
            return f"{flag} names {shown(name)} twice: leave one of them out"
    if logging.tracker and not logging.tracker_project:
        return "--tracker-project is empty: name the project, or leave it out"
    return None


def run_dir_is_a_folder(config: Config) -> str | None:
    run_dir = config.run.run_dir
    if not run_dir:
        return "--run-dir is empty: name the folder to write to"
    if is_url(run_dir):
        return (
            f"--run-dir {shown(without_secrets(run_dir))} is a URL, but a run writes to a disk first: use "
            f"--run-dir runs/NAME --checkpoint-dir {shown(without_secrets(run_dir))}"
        )
    try:
        run_dir.encode()
    except UnicodeEncodeError:
        return f"--run-dir {shown(run_dir)} is no UTF-8 text: choose another name"
    if "\0" in run_dir:
        return f"--run-dir {shown(run_dir)} has a NUL: choose another name"
    path = Path(run_dir)
    try:
        taken = [place for place in (path, *path.parents) if place.exists() and not place.is_dir()]
        is_model = (path / "config.json").is_file()
        has_checkpoints = (path / "megavlm.json").is_file() or any(path.glob("iter_*/megavlm.json"))
    except OSError as error:
        return f"--run-dir {shown(run_dir)} cannot be used: {error.strerror}"
    if is_model:
        return f"--run-dir {shown(run_dir)} has a config.json, as models do: name another folder for the run"
    if has_checkpoints:
        return f"--run-dir {shown(run_dir)} is not a run, but its checkpoints: give it to --load, and another name here"
    if taken:
        return f"--run-dir {shown(run_dir)} cannot be a folder because {shown(str(taken[0]))} is a file: choose another"
    return None


def checkpoint_dir_is_another_place(config: Config) -> str | None:
    place = config.checkpoint.checkpoint_dir
    if place is None:
        return None
    if not config.checkpoint.save:
        return "--checkpoint-dir has copies of checkpoints, but --no-save writes none: leave one of them out"
    if is_url(place):
        problem = url_complaint(place)
        return f"--checkpoint-dir {shown(without_secrets(place))} {problem}" if problem else None
    if Path(place).resolve() == Path(config.run.run_dir, "checkpoints").resolve():
        return f"--checkpoint-dir {shown(place)} is where --run-dir has its checkpoints: name another place for copies"
    return None


def load_is_a_path(config: Config) -> str | None:
    if config.checkpoint.load is not None and is_url(config.checkpoint.load):
        problem = url_complaint(config.checkpoint.load)
        return f"--load {shown(without_secrets(config.checkpoint.load))} {problem}" if problem else None
    return None


def iterations_to_skip_are_numbers(config: Config) -> str | None:
    try:
        iterations(config.numerics.iterations_to_skip)
    except ValueError as error:
        return (
            f"--iterations-to-skip {shown(str(error))} is no iteration: use numbers from 1 and ranges, as in 12 40-45"
        )
    return None


def rewinding_has_checkpoints(config: Config) -> str | None:
    if config.numerics.on_spike == "rewind" and not (config.checkpoint.save and config.checkpoint.save_interval):
        return "--on-spike rewind goes back to a checkpoint, but none is saved: add --save-interval 1000, or use skip"
    return None


def best_checkpoint_has_its_score(config: Config) -> str | None:
    best, every = config.checkpoint.keep_best, config.checkpoint.save_interval
    if best is None or not best.startswith("validation/"):
        return None
    if not has_validation(config):
        return f"--keep-best {shown(best)} needs validation data: add --validation PATH or --validation-split 0.01"
    interval = resolve(config).evaluation.eval_interval
    if interval and every and every % interval == 0:
        return None
    return (
        f"--keep-best {shown(best)} needs a validation with every checkpoint: make --save-interval {every} a multiple "
        f"of --eval-interval {interval}, both above 0, or use --keep-best loss"
    )


def _decay_end(config: Config) -> tuple[str, int]:
    """Return the option that sets the end of the decay, and its value."""
    if is_set(config.optimizer, "lr_decay_iters"):
        return "--lr-decay-iters", config.optimizer.lr_decay_iters
    return "--train-iters", resolve(config).train.train_iters


RUN_RULES: tuple[Callable[[Config], str | None], ...] = (
    one_length,
    lr_decays_downwards,
    warmup_fits,
    wsd_decay_fits,
    loss_scale_starts_above_its_floor,
    *OPTIMIZER_RULES,
    imageless_samples_exist,
    files_have_datasets,
    validation_is_apart,
    profile_sees_iterations,
    callbacks_are_classes,
    run_dir_is_a_folder,
    checkpoint_dir_is_another_place,
    load_is_a_path,
    iterations_to_skip_are_numbers,
    rewinding_has_checkpoints,
    best_checkpoint_has_its_score,
)
