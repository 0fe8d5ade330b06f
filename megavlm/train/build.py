"""Build a run: config → dims → plan → groups → data → model chunks → schedule, optimizer → initial state → sinks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megavlm.arch.dims import dims_of
from megavlm.arch.layers import EMBEDDING, OUTPUT
from megavlm.arch.objectives import objective_of, ties_output
from megavlm.arch.plan import Plan, make_plan
from megavlm.backend import Backend
from megavlm.backend.accelerator import clock_of, energy_meter, peak_memory
from megavlm.checkpoint import folders
from megavlm.checkpoint.begun import as_begun
from megavlm.checkpoint.folders import Holds, Keep
from megavlm.checkpoint.saving import Saver
from megavlm.checkpoint.state import Position
from megavlm.config.derived import minutes_to_meet, overlapped
from megavlm.config.schema import Config
from megavlm.data.source import Source
from megavlm.metrics.callback import Callback, Start
from megavlm.metrics.sinks import SkippedLog
from megavlm.model.vlm import HoldsWeights
from megavlm.parallel.groups import Groups, build_groups
from megavlm.parallel.rendezvous import barrier, from_rank_0, meet, on_rank_0, start
from megavlm.precision.device import check_device
from megavlm.resilience.events import note_failure
from megavlm.resilience.lock import RunLock
from megavlm.resilience.phases import START, Phases, StartTimes
from megavlm.rules.check import check
from megavlm.rules.defaults import resolve, with_device_defaults
from megavlm.train.build_engine import WeightInit, build_engine
from megavlm.train.build_source import build_source
from megavlm.train.engine import Engine
from megavlm.train.hooks.hook import Callbacks
from megavlm.train.hooks.watch import Watch
from megavlm.train.initial_state import choose_checkpoints, fetch, initial_weights, note_options, restore
from megavlm.train.outputs import announce, callbacks_of, note_start, outputs
from megavlm.train.run import Run
from megavlm.train.run_data import RunData, check_references, prepare, write_references
from megavlm.train.run_dir import check_shared, make_run_dir, write_run_files, write_sidecars
from megavlm.train.uploads import Uploads


def build(config: Config, backend: Backend, *, began: float | None = None) -> Run:
    """Return a run that is ready for its next iteration; every rank calls this.

    `began` is when the program began, in seconds since 1970 (default: now). Raises UserError for a configuration that
    cannot run. By then RUN_DIR and the demo's tokenizer may be written: the plan depends on the tokenizer's size.
    """
    began = began or time.time()
    times = StartTimes(began)
    times.enter("rendezvous")
    saver = _saver(config)  # first: it forks, which threads and a joined world make unsafe
    timeout = config.parallel.distributed_timeout_minutes
    meeting = meet(timeout_minutes=minutes_to_meet(config))
    memory = partial(peak_memory, backend.device)
    phases = Phases(clock_of(backend.device))
    phases.enter(START, "rendezvous")  # which the first report names
    energy = energy_meter(backend.device)
    watch = Watch(config, phases, meeting, times, memory=memory, energy=energy, on_gpu=not backend.is_cpu)
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
    run_dir = Path(config.run.run_dir)
    watch.starting("callbacks")
    users: list[Callback] = []
    on_rank_0(lambda: users.extend(callbacks_of(config)))
    watch.starting("tokenizer")
    chosen = _choose(config, backend)
    watch.starting("groups")
    groups = _groups(chosen.config, chosen.plan)
    write_files = partial(write_run_files, run_dir, chosen.given, chosen.plan, backend)
    # A resumed run keeps the files of its last start until its checkpoint, which may be fetched, accepts the options of
    # this start.
    stored = config.checkpoint.checkpoint_dir is not None
    begin = partial(on_rank_0, lambda: None if folders.checkpoints(run_dir / "checkpoints") else write_files())
    if not stored:
        begin()
    if dist.get_rank() == 0:
        announce(chosen.config, chosen.plan, backend, asked=chosen.asked, given=chosen.given)
    watch.starting("data")
    config, data = prepare(chosen.config, chosen.source, chosen.plan, groups, backend)
    watch.starting("download")
    fetch(config, chosen.given, run_dir, watch.phases)
    if stored:
        begin()
    chosen = replace(chosen, config=config)
    engine, position, loads = _restored(chosen, data, groups, backend, watch, write_files)
    if objective_of(config.model).refers:
        if from_rank_0(lambda: bool(folders.checkpoints(run_dir / "checkpoints")), False):
            on_rank_0(partial(check_references, run_dir, config.checkpoint.checkpoint_dir))
        else:
            write_references(config, chosen.plan, groups, backend, engine)
    watch.starting("outputs")
    callbacks, progress = Callbacks(watch.phases, names_users=bool(config.logging.callback)), None
    if dist.get_rank() == 0:
        spent = {"seconds": time.time() - began, "load_seconds": time.time() - loads}
        note_start(config, run_dir, position.iteration, world=chosen.plan.dims.world, **spent)
        progress, callbacks.own = outputs(config, run_dir, position.iteration)
        callbacks.users = list(zip(config.logging.callback, users, strict=True))
        callbacks.on_start(Start(run_dir, config, position.iteration, chosen.plan.dims.world, backend.name))
    return Run(
        config=config,
        plan=chosen.plan,
        backend=backend,
        source=chosen.source,
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


@dataclass(frozen=True)
class _Chosen:
    """The configuration of a run, with the source and plan derived from it before data are prepared."""

    asked: Config  # by the user, now
    given: Config  # with the options with which a resumed run was started
    config: Config  # with every default
    source: Source
    plan: Plan


def _choose(asked: Config, backend: Backend) -> _Chosen:
    """Return the resolved configuration, equal on all ranks, with its plan. Raises UserError if it cannot run."""
    world = dist.get_world_size()
    given = from_rank_0(partial(as_begun, asked), asked)
    if given != asked:
        check(given, world=world)
    dims = dims_of(given, world=world)
    run_dir = Path(given.run.run_dir)
    source = build_source(given, run_dir=run_dir, rank=dist.get_rank(), barrier=barrier)
    config = resolve(given, vocab_size=source.vocab_size)
    config = overlapped(with_device_defaults(config, on_gpu=not backend.is_cpu), dp=dims.dp_cp)
    return _Chosen(asked, given, config, source, make_plan(config, dims))


def _groups(config: Config, plan: Plan) -> Groups:
    return build_groups(
        plan.dims,
        tied_owners=(plan.owner_of(EMBEDDING), plan.owner_of(OUTPUT)) if ties_output(config.model) else (),
        seed=config.train.seed,
        timeout_minutes=config.parallel.distributed_timeout_minutes,
        shard_size=config.parallel.hybrid_shard_size,
        encoder_tp=plan.vision_tp if plan.encoder else 1,
    )


def _restored(
    chosen: _Chosen,
    data: RunData,
    groups: Groups,
    backend: Backend,
    watch: Watch,
    write_files: Callable[[], None],
) -> tuple[Engine, Position, float]:
    """Build the engine and load the newest checkpoint; return engine, position and the start of loading (Unix time)."""
    config, source = chosen.config, chosen.source
    run_dir, holds = Path(config.run.run_dir), Holds()
    watch.starting("model")
    choices = choose_checkpoints(config, run_dir, holds)
    checkpoint = choices.folders[0] if choices.folders else None
    on_rank_0(partial(write_sidecars, run_dir, config, checkpoint, image_token=source.image_token))
    engine = build_engine(
        config,
        chosen.plan,
        groups,
        vocab_size=source.vocab_size,
        backend=backend,
        weights=_timed(initial_weights(config, choices, vocab_size=source.vocab_size), watch),
        num_sources=len(source.names) if len(source.names) > 1 else 0,
        phases=watch.phases,
    )
    watch.starting("weights")
    began = time.time()
    try:
        position = restore(engine, data.loaders.training, config, chosen.plan, choices, data.identity)
        on_rank_0(write_files)
        on_rank_0(partial(note_options, config, chosen.given))
    except BaseException:
        engine.close()  # a process that builds another run must not keep this one's weights and groups
        raise
    barrier()  # others may still read what rank 0 holds for them
    holds.release()
    return engine, position, began


def _timed(weights: WeightInit | None, watch: Watch) -> WeightInit | None:
    """Wrap a weight loader so that its time counts as the part `weights` of the start."""
    if weights is None:
        return None

    def read(chunks: Sequence[HoldsWeights]) -> None:
        watch.starting("weights")
        weights(chunks)
        watch.starting("model")

    return read


def _saver(config: Config) -> Saver | None:
    return Saver(Path(config.run.run_dir) / "checkpoints", _keep(config)) if config.checkpoint.save else None


def _uploads(config: Config) -> Uploads | None:
    store = config.checkpoint.checkpoint_dir
    return None if store is None else Uploads(Path(config.run.run_dir), store, _keep(config))


def _keep(config: Config) -> Keep:
    options = config.checkpoint
    return Keep(options.keep_checkpoints, options.keep_every, options.keep_best, options.keep_best_mode)
