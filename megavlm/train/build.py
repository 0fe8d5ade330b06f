"""The composition root: config → dims → plan → groups → data → model chunks → schedule, optimizer → restore → sinks."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

import megavlm
from megavlm.backend import Backend
from megavlm.checkpoint import folders, state
from megavlm.checkpoint.hf.compose import is_llava, write_composed_sidecar
from megavlm.checkpoint.hf.load import load_weights
from megavlm.checkpoint.hf.sidecar import carry_sidecar, write_sidecar
from megavlm.checkpoint.hf.source import ALL_PARTS, origins_of
from megavlm.config import overlapped
from megavlm.config.derived import with_vocab_size
from megavlm.config.device_defaults import with_device_defaults
from megavlm.config.load import to_yaml
from megavlm.config.schema import Config
from megavlm.data.data_loader import DataLoader, PatchShards
from megavlm.data.reading import build_data_loader, prepare_data
from megavlm.data.source import Source, build_source
from megavlm.errors import UserError
from megavlm.metrics.progress import ProgressLine
from megavlm.metrics.sinks import JsonlSink, Sink, TensorBoardSink
from megavlm.metrics.skips import SkippedLog
from megavlm.model.specs import DTYPES
from megavlm.parallel.groups import Groups, build_groups, on_rank_0, start
from megavlm.parallel.user_buffers import start_user_buffers
from megavlm.pipeline.images import patches_by_rank
from megavlm.planner.auto import offload_complaint
from megavlm.planner.layers import PATCH_EMBED
from megavlm.planner.plan import Plan, dims_of, make_plan, table
from megavlm.precision.device import check_device, device_at_hand
from megavlm.train.engine import Engine, Fill, build_engine


@dataclass(frozen=True)
class Run:
    """Everything that the loop needs, on this rank."""

    config: Config
    plan: Plan
    backend: Backend
    source: Source
    data_loader: DataLoader
    engine: Engine
    position: state.Position  # what is already done
    run_dir: Path
    progress: ProgressLine | None  # on rank 0
    sinks: Sequence[Sink]  # on rank 0; empty elsewhere
    skipped: SkippedLog  # writes on ranks that read data

    @property
    def micro_batches(self) -> int:
        """Of one step, on each data-parallel rank."""
        train = self.config.train
        return train.global_batch_size // (train.micro_batch_size * self.plan.dims.dp)


def build(config: Config, backend: Backend) -> Run:
    """Put a run together.

    Raises UserError where the configuration does not fit, before more than RUN_DIR and the demo's tokenizer is written:
    the plan needs the tokenizer's size.
    """
    start(backend, timeout_minutes=config.parallel.distributed_timeout_minutes)
    check_device(config)
    rank, run_dir = dist.get_rank(), Path(config.run.run_dir)
    dims = dims_of(config, world=dist.get_world_size())
    on_rank_0(partial(_make_run_dir, run_dir))
    source = build_source(config, run_dir=run_dir, rank=rank, barrier=dist.barrier)
    config = with_vocab_size(config, source.vocab_size)
    config = overlapped(with_device_defaults(config, on_gpu=not backend.is_cpu, dp=dims.dp), dp=dims.dp)
    plan = make_plan(config, dims)
    tied_owners = (plan.embedding_owner, plan.output_owner) if config.model.language.tie_embeddings else ()
    timeout = config.parallel.distributed_timeout_minutes
    groups = build_groups(
        plan.dims,
        tied_owners=tied_owners,
        seed=config.train.seed,
        timeout_minutes=timeout,
        shard_size=config.parallel.hybrid_shard_size,
    )
    if config.parallel.tp_comm_overlap:
        start_user_buffers(config, backend)
    on_rank_0(partial(_write_run_files, run_dir, config, plan, backend))
    if rank == 0:
        print(table(plan, config), flush=True)
        for hint in (*_about_layers(config), *_about_offload(config, plan, backend)):
            print(hint, flush=True)

    on_rank_0(partial(prepare_data, config))
    data_loader = build_data_loader(
        config,
        source,
        groups,
        device=backend.device,
        dtype=DTYPES[config.precision.dtype],
        vision_group=_vision_group(plan, groups),
        patch_shards=_patch_shards(config, plan, groups),
    )
    folder = _start(config, run_dir)
    fill = _weights(config, folder, vocab_size=source.vocab_size, image_token=source.image_token)
    engine = build_engine(
        config,
        plan,
        groups,
        vocab_size=source.vocab_size,
        backend=backend,
        fill=fill,
        num_sources=len(source.names) if len(source.names) > 1 else 0,
    )
    position = _restore(engine, data_loader, config, plan, folder)
    progress, sinks = _outputs(config, run_dir, position.iteration) if rank == 0 else (None, [])
    return Run(
        config=config,
        plan=plan,
        backend=backend,
        source=source,
        data_loader=data_loader,
        engine=engine,
        position=position,
        run_dir=run_dir,
        progress=progress,
        sinks=sinks,
        skipped=SkippedLog(run_dir / "skipped" / f"replica-{groups.coords.dp:05d}.jsonl" if groups.is_reader else None),
    )


def _about_layers(config: Config) -> Iterator[str]:
    """Why layers are not made of Transformer Engine's parts, where it is installed and was not forgone."""
    if config.execution.transformer_impl == "auto" and (error := device_at_hand().te_error):
        yield f"Transformer Engine cannot be loaded ({error}): layers are torch's, and slower"


def _about_offload(config: Config, plan: Plan, backend: Backend) -> Iterator[str]:
    """What a user of `--offload` should know of this machine."""
    if not config.execution.offload:
        return
    if backend.is_cpu:
        yield "--offload copies within one memory on a CPU: same numbers, nothing saved"
        return
    if "optimizer" in config.execution.offload and torch.get_num_threads() == 1:
        yield "--offload optimizer updates in one thread: set OMP_NUM_THREADS to the cores per GPU"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if complaint := offload_complaint(config, plan.dims, node_memory=memory, devices=devices):
        yield f"{complaint}: the run may end for lack of it"


def _vision_group(plan: Plan, groups: Groups) -> dist.ProcessGroup | None:
    """The ranks of this replica that need pixels; None on a rank that needs none."""
    if plan.encoder:
        return groups.mp
    return groups.tp if plan.owner_of(PATCH_EMBED) == groups.coords.pp else None


def _patch_shards(config: Config, plan: Plan, groups: Groups) -> PatchShards | None:
    """A colocated encoder's pixels go only to the ranks that encode them."""
    if not plan.encoder:
        return None
    return partial(patches_by_rank, model=config.model, ranks=groups.mp.size(), width=plan.vision_tp)


def _start(config: Config, run_dir: Path) -> Path | None:
    """The checkpoint to go on from: the run's newest, else `--load`'s."""
    folder = folders.newest(run_dir / "checkpoints")
    if folder is None and config.checkpoint.load is not None:
        folder = folders.resolve(Path(config.checkpoint.load))
    return folder


def _weights(config: Config, folder: Path | None, *, vocab_size: int, image_token: int) -> Fill | None:
    """Where a run's first weights come from, unless the seed or a checkpoint with optimizer state gives them."""
    run_dir = Path(config.run.run_dir)
    if folder is not None:
        on_rank_0(partial(carry_sidecar, folder, run_dir))
        return partial(state.load_weights, folder=folder, config=config) if state.is_weights_only(folder) else None
    origins = origins_of(config)
    for origin in origins:
        if origin.parts == ALL_PARTS:
            on_rank_0(partial(write_sidecar, origin, run_dir))
    if is_llava(origins, config.model):
        on_rank_0(partial(write_composed_sidecar, origins, config.model, run_dir, image_token=image_token))
    return partial(load_weights, origins=origins, config=config, vocab_size=vocab_size) if origins else None


def _restore(
    engine: Engine, data_loader: DataLoader, config: Config, plan: Plan, folder: Path | None
) -> state.Position:
    """Go on from a checkpoint, if it is of a run. Returns what is done."""
    if folder is None or state.is_weights_only(folder):
        return state.Position(iteration=0, loader={})
    position = state.load(engine.trained(), folder, config=config, plan=plan)
    data_loader.load_state_dict(position.loader)
    engine.scheduler.step(increment=position.iteration)
    if dist.get_rank() == 0:
        print(f"resumed from {folder} at iteration {position.iteration}", flush=True)
    return position


def _outputs(config: Config, run_dir: Path, first_iteration: int) -> tuple[ProgressLine, list[Sink]]:
    progress = ProgressLine(config.train.train_iters, sys.stderr, log_interval=config.logging.log_interval)
    sinks: list[Sink] = [progress, JsonlSink(run_dir / "metrics.jsonl", resume_iteration=first_iteration)]
    if config.logging.tensorboard:
        sinks.append(
            TensorBoardSink(run_dir / "tensorboard", purge_step=first_iteration + 1 if first_iteration else None)
        )
    return progress, sinks


def _make_run_dir(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} cannot be written ({error.strerror}): choose another folder") from error


def _write_run_files(run_dir: Path, config: Config, plan: Plan, backend: Backend) -> None:
    """`config.yaml`, `plan.json` and `environment.json`: what ran, readable without us."""
    try:
        (run_dir / "config.yaml").write_text(to_yaml(config))
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} cannot be written ({error.strerror}): choose another folder") from error
    (run_dir / "plan.json").write_text(plan.dumps())
    environment = {
        "megavlm": megavlm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
        "device": backend.name,
        "communication": backend.communication,
        "world": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        "hostname": platform.node(),
        "cpus": os.cpu_count(),
        "command": sys.argv,
    }
    (run_dir / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
