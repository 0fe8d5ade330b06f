"""Announce a run, open the metric sinks and callbacks of rank 0, and record the start in RUN_DIR."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megavlm.arch.plan import Plan, start_line, table
from megavlm.backend import Backend
from megavlm.checkpoint import folders
from megavlm.config.derived import offloaded
from megavlm.config.lora_config import beyond_adapters
from megavlm.config.messages import described, did_you_mean, plain
from megavlm.config.registry import registered, users_module
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.metrics.callback import Callback
from megavlm.metrics.samples import SamplesSink
from megavlm.metrics.sinks import ExpertLoadsSink, JsonlSink, ProgressLine, lost_steps
from megavlm.metrics.tracker_clients import TensorBoardSink
from megavlm.metrics.trackers import check_installed, trackers_of
from megavlm.planner.auto import offload_memory_error
from megavlm.precision.device import device_at_hand
from megavlm.resilience import events
from megavlm.resilience.events import write_status
from megavlm.rules.defaults import start_table, starts_from_weights

_METRICS = "metrics.jsonl"


def announce(config: Config, plan: Plan, backend: Backend, *, asked: Config, given: Config) -> None:
    """Print the start line of a run, its plan, its defaults that were not `asked` for, and hints; called on rank 0.

    `given` are the options including those of the run that is resumed.
    """
    first = start_line(config, continued=folders.newest(Path(config.run.run_dir) / "checkpoints"))
    lines = [first, table(plan, config), start_table(given, asked=asked), *hints(config, plan, backend)]
    print("\n".join(lines), flush=True)


def hints(config: Config, plan: Plan, backend: Backend) -> Iterator[str]:
    """Yield warnings: weights without data, fewer processes than were asked for, resumes that differ, no Transformer
    Engine, limits of `--offload`.
    """
    if starts_from_weights(config) and config.data.kind == "synthetic":
        yield "warning: the given weights train on synthetic samples: name your data sets with --datasets"
    if config.run.world_size is not None and config.run.world_size != plan.dims.world:
        yield f"--world-size {config.run.world_size} is for --dry-run: torchrun --nproc-per-node starts processes"
    if warning := beyond_adapters(config):
        yield f"warning: {warning}"
    if config.parallel.compress_gradients != "none":
        yield "--compress-gradients: no checkpoint has the residual, so a resume is not bit for bit the same run"
    if config.execution.transformer_impl == "auto" and (error := device_at_hand().te_error):
        yield f"Transformer Engine cannot be loaded ({error}): layers are PyTorch's, which are slower"
    if not config.execution.offload:
        return
    if backend.is_cpu:
        yield "--offload copies within the same memory on a CPU: results are equal and no memory is saved"
        return
    if "optimizer" in offloaded(config) and torch.get_num_threads() == 1:
        yield "--offload optimizer updates in one thread: set OMP_NUM_THREADS to the number of cores per GPU"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if complaint := offload_memory_error(config, plan.dims, node_memory=memory, devices=devices):
        yield f"{complaint}: the run may end out of memory"


def note_start(
    config: Config, run_dir: Path, iteration: int, *, world: int, seconds: float, load_seconds: float
) -> None:
    """Record that the run continues after `iteration`, `seconds` after the program began, including `load_seconds` for
    reading the checkpoint. Call it before `outputs`, which drops the lost steps.
    """
    events.record(
        run_dir,
        "start",
        iteration=iteration,
        world=world,
        seconds=round(seconds, 3),
        load_seconds=round(load_seconds, 3) if iteration else None,
        **lost_steps(run_dir / _METRICS, resume_iteration=iteration),
    )
    write_status(run_dir, "running", iteration=iteration, train_iters=config.train.train_iters)


def callbacks_of(config: Config) -> list[Callback]:
    """Return the user's callbacks. Raises UserError if one cannot be made or a tracker is not installed."""
    check_installed(config.logging.tracker)
    return load(config.logging.callback)


def outputs(config: Config, run_dir: Path, iteration: int) -> tuple[ProgressLine, list[Callback]]:
    """Return the progress line, and all sinks and trackers of metrics, which continue after `iteration`."""
    progress = ProgressLine(config.train.train_iters, sys.stderr, log_interval=config.logging.log_interval)
    sinks: list[Callback] = [progress, JsonlSink(run_dir / _METRICS, resume_iteration=iteration)]
    if config.model.experts.num_experts:
        iters = config.train.train_iters
        sinks.append(ExpertLoadsSink(run_dir, train_iters=iters, resume_iteration=iteration))
    if config.evaluation.sample_interval:
        sinks.append(SamplesSink(run_dir / "samples", resume_iteration=iteration))
    if config.logging.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_iteration=iteration))
    return progress, [*sinks, *trackers_of(config, run_dir)]


def load(names: Sequence[str]) -> list[Callback]:
    """Import, make and return callbacks, in this order. Raises UserError, which names the one that fails."""
    return [_load(name) for name in names]


def _load(name: str) -> Callback:
    entry = registered("callbacks").get(name)
    module_name, _, attribute = (name if entry is None else entry.code).partition(":")
    module = users_module(f"--callback {plain(name)}", module_name, missing=": add its folder to PYTHONPATH")
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, [name for name, each in vars(module).items() if isinstance(each, type)])
        hint = hint or ": name a class that it has"
        raise UserError(f"--callback {plain(name)}: {plain(module_name)} has no {plain(attribute)}{hint}")
    try:
        made = getattr(module, attribute)()
    except Exception as error:
        raise UserError(f"--callback {plain(name)} cannot be made: {described(error)}") from error
    if not isinstance(made, Callback):
        raise UserError(
            f"--callback {plain(name)} makes a {type(made).__name__}: derive it from megavlm.metrics.callback.Callback"
        )
    return made
