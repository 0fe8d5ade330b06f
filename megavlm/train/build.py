"""Build a run: config → dims → plan → groups → data → model chunks → schedule, optimizer → initial state → sinks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megavlm.arch.objectives import ties_output
from megavlm.backend import Backend
from megavlm.backend.clock import clock_of
from megavlm.backend.memory import peak_memory
from megavlm.checkpoint import folders
from megavlm.checkpoint.begun import as_begun
from megavlm.checkpoint.retention import Holds, Keep
from megavlm.checkpoint.saving import Saver
from megavlm.checkpoint.state import Position
from megavlm.config.derived import minutes_to_meet, offloaded, overlapped
from megavlm.config.device_defaults import with_device_defaults
from megavlm.config.lora import beyond_adapters
from megavlm.config.resolve import resolve
from megavlm.config.rules import check
from megavlm.config.schema import Config
from megavlm.config.start_defaults import start_table, starts_from_weights
from megavlm.data.data_loader import DataLoader
from megavlm.data.files import FilesSource
from megavlm.data.source import ComputedSource, HeldOutPrompt
from megavlm.metrics.callback import Callback, Start
from megavlm.metrics.progress import ProgressLine
from megavlm.metrics.sinks import SkippedLog
from megavlm.parallel.dims import dims_of
from megavlm.parallel.groups import build_groups, from_rank_0, meet, on_rank_0, start
from megavlm.parallel.user_buffers import start_user_buffers
from megavlm.planner.auto import offload_memory_error
from megavlm.planner.plan import Plan, make_plan, start_line, table
from megavlm.precision.device import check_device, device_at_hand
from megavlm.resilience.lock import RunLock
from megavlm.resilience.phases import START, Phases
from megavlm.resilience.status import note_failure
from megavlm.train.build_engine import build_engine
from megavlm.train.callbacks import Callbacks
from megavlm.train.engine import Engine
from megavlm.train.fetch import fetch
from megavlm.train.initial_state import choose_checkpoints, initial_weights, restore
from megavlm.train.outputs import callbacks_of, note_start, outputs
from megavlm.train.run_data import prepare
from megavlm.train.run_dir import check_shared, make_run_dir, write_run_files, write_sidecars
from megavlm.train.same_extensions import check_same_extensions
from megavlm.train.source import build_source
from megavlm.train.uploads import Uploads
from megavlm.train.watch import Watch


@dataclass(frozen=True)
class Run:
    """Everything that the loop needs, on this rank."""

    config: Config
    plan: Plan
    backend: Backend
    source: ComputedSource | FilesSource
    data_loader: DataLoader
    validation_loader: DataLoader | None  # None without validation samples
    prompts: tuple[HeldOutPrompt, ...]  # of --sample-interval
    engine: Engine
    position: Position  # what is already done
    run_dir: Path
    progress: ProgressLine | None  # on rank 0
    callbacks: Callbacks  # empty but on rank 0
    skipped: SkippedLog  # writes on ranks that read data
    saver: Saver | None  # None with --no-save
    uploads: Uploads | None  # None without --checkpoint-dir
    data_identity: dict[str, Any]  # what a place in the data depends on
    lock: RunLock  # held by rank 0: nobody else writes to the run folder
    watch: Watch


def build(config: Config, backend: Backend, *, began: float | None = None) -> Run:
    """Return a run that is ready for its next iteration; every rank calls this.

    `began` is when the program began, in seconds since 1970 (default: now). Raises UserError for a configuration that
    cannot run. By then RUN_DIR and the demo's tokenizer may be written, because the plan depends on its size.
    """
    began = began or time.time()
    saver = _saver(config)  # first: it forks, which threads and a joined world make unsafe
    timeout = config.parallel.distributed_timeout_minutes
    meeting = meet(timeout_minutes=minutes_to_meet(config))
    memory = partial(peak_memory, backend.device)
    phases = Phases(clock_of(backend.device))
    phases.enter(START, "connections")  # which the first report names
    watch = Watch(config, phases, meeting, memory=memory)
    try:
        start(backend, timeout_minutes=timeout, meeting=meeting)
        return _locked(config, backend, saver, watch, began)
    except BaseException:
        watch.close()
        raise


def _locked(config: Config, backend: Backend, saver: Saver | None, watch: Watch, began: float) -> Run:
    """Build the run in a folder that rank 0 has locked."""
    check_device(config)
    run_dir = Path(config.run.run_dir)
    on_rank_0(partial(make_run_dir, run_dir))
    lock = RunLock(run_dir)
    on_rank_0(lock.acquire)
    watch.owns_folder()
    try:
        check_shared(run_dir)
        return _build(config, backend, lock, saver, watch, began)
    except Exception as error:
        note_failure(run_dir, error)
        lock.release()
        raise


def _build(config: Config, backend: Backend, lock: RunLock, saver: Saver | None, watch: Watch, began: float) -> Run:
    timeout = config.parallel.distributed_timeout_minutes
    rank, run_dir = dist.get_rank(), Path(config.run.run_dir)
    check_same_extensions(config.run.extension)
    watch.starting("callbacks")
    users: list[Callback] = []
    on_rank_0(lambda: users.extend(callbacks_of(config)))
    watch.starting("tokenizer and process groups")
    world = dist.get_world_size()
    asked, config = config, from_rank_0(partial(as_begun, config), config)
    if config != asked:
        check(config, world=world)
    dims = dims_of(config, world=world)
    source = build_source(config, run_dir=run_dir, rank=rank, barrier=dist.barrier)
    given, config = config, resolve(config, vocab_size=source.vocab_size)
    config = overlapped(with_device_defaults(config, on_gpu=not backend.is_cpu, dp=dims.dp_cp), dp=dims.dp_cp)
    plan = make_plan(config, dims)
    groups = build_groups(
        plan.dims,
        tied_owners=(plan.embedding_owner, plan.output_owner) if ties_output(config.model) else (),
        seed=config.train.seed,
        timeout_minutes=timeout,
        shard_size=config.parallel.hybrid_shard_size,
    )
    if config.parallel.tp_comm_overlap:
        start_user_buffers(config, backend)
    write_files = partial(write_run_files, run_dir, given, plan, backend)
    # A run that goes on keeps those of its last start until its checkpoint takes this one's options.
    on_rank_0(lambda: None if folders.checkpoints(run_dir / "checkpoints") else write_files())
    if rank == 0:
        first = start_line(config, continued=folders.newest(run_dir / "checkpoints"))
        told = [first, table(plan, config), start_table(given, asked=asked), *_hints(config, plan, backend)]
        print("\n".join(told), flush=True)

    watch.starting("data")
    config, data = prepare(config, source, plan, groups, backend)
    watch.starting("checkpoint of a store")
    fetch(config, given, run_dir, watch.phases)
    watch.starting("model")
    holds = Holds()
    choices = choose_checkpoints(config, run_dir, holds)
    checkpoint = choices.folders[0] if choices.folders else None
    on_rank_0(partial(write_sidecars, run_dir, config, checkpoint, image_token=source.image_token))
    engine = build_engine(
        config,
        plan,
        groups,
        vocab_size=source.vocab_size,
        backend=backend,
        weights=initial_weights(config, choices, vocab_size=source.vocab_size),
        num_sources=len(source.names) if len(source.names) > 1 else 0,
        phases=watch.phases,
    )
    watch.starting("checkpoint")
    built = time.time()
    with _closed_on_error(engine):
        position = restore(engine, data.loaders.training, config, plan, choices, data.identity)
        on_rank_0(write_files)
    dist.barrier()  # others may still read what rank 0 holds for them
    holds.release()
    callbacks, progress = Callbacks(watch.phases), None
    if rank == 0:
        spent = {"seconds": time.time() - began, "load_seconds": time.time() - built}
        note_start(config, run_dir, position.iteration, world=dims.world, **spent)
        progress, own = outputs(config, run_dir, position.iteration)
        callbacks = Callbacks(watch.phases, own, list(zip(config.logging.callback, users, strict=True)))
        callbacks.on_start(Start(run_dir, config, position.iteration, dims.world, backend.name))
    return Run(
        config=config,
        plan=plan,
        backend=backend,
        source=source,
        data_loader=data.loaders.training,
        validation_loader=data.loaders.validation,
        prompts=data.prompts,
        engine=engine,
        position=position,
        run_dir=run_dir,
        progress=progress,
        callbacks=callbacks,
        saver=saver,
        uploads=_uploads(config),
        data_identity=data.identity,
        lock=lock,
        watch=watch,
        skipped=SkippedLog(run_dir / "skipped" / f"replica-{groups.coords.dp:05d}.jsonl" if groups.is_reader else None),
    )


@contextmanager
def _closed_on_error(engine: Engine) -> Iterator[None]:
    """Close the engine on an error: a process that builds another run must not keep this one's weights and groups."""
    try:
        yield
    except BaseException:
        engine.close()
        raise


def _saver(config: Config) -> Saver | None:
    return Saver(Path(config.run.run_dir) / "checkpoints", _keep(config)) if config.checkpoint.save else None


def _uploads(config: Config) -> Uploads | None:
    store = config.checkpoint.checkpoint_dir
    return None if store is None else Uploads(Path(config.run.run_dir), store, _keep(config))


def _keep(config: Config) -> Keep:
    options = config.checkpoint
    return Keep(options.keep_checkpoints, options.keep_every, options.keep_best, options.keep_best_mode)


def _hints(config: Config, plan: Plan, backend: Backend) -> Iterator[str]:
    """Yield warnings: weights without data, resumes that differ, no Transformer Engine, limits of `--offload`."""
    if starts_from_weights(config) and config.data.kind == "synthetic":
        yield "warning: the given weights train on synthetic samples: name your data sets with --datasets"
    if warning := beyond_adapters(config):
        yield f"warning: {warning}"
    if config.parallel.compress_gradients != "none" and config.parallel.compress_error_feedback:
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
