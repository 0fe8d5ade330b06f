"""Write RUN_DIR's description of the run: configuration, plan, environment and Hugging Face sidecar files."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import uuid
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

import megavlm
from megavlm.arch.objectives import SCORER
from megavlm.arch.plan import Plan
from megavlm.backend import Backend
from megavlm.checkpoint.hf.compose import composed_config, note_channels, write_composed_sidecar, write_part_sidecars
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, pretrained_of
from megavlm.checkpoint.hf.sidecar import FILES, NAME, carry_sidecar, sidecars, write_sidecar
from megavlm.config.derived import starts_from
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.files import replace_file, unwritable
from megavlm.parallel.rendezvous import from_rank_0, of_all_ranks, on_rank_0
from megavlm.rules.defaults import with_start_defaults
from megavlm.rules.load import to_yaml
from megavlm.storage.hub import commit_of


def make_run_dir(run_dir: Path) -> None:
    """Create RUN_DIR. Raises UserError if it cannot be created, or if its checkpoints are out of reach.

    A run that finds no checkpoints would begin anew, and drop its metrics.
    """
    checkpoints = run_dir / "checkpoints"
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        where = f"a link to {os.readlink(checkpoints)}, which is not there" if checkpoints.is_symlink() else "no folder"
        raise UserError(f"{checkpoints} is {where}: mount what it needs, or move it away to begin anew")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(run_dir, error) from error


def check_shared(run_dir: Path, *, patience: float = 15.0) -> None:
    """Raise UserError on all ranks if RUN_DIR is not one folder for all of them, as on nodes' own disks: every rank
    writes its part of a checkpoint there. Every rank calls it, and looks for a new file for `patience` seconds.
    """
    sign = run_dir / from_rank_0(partial(_leave_sign, run_dir), "")
    end = time.monotonic() + patience
    while not (seen := sign.exists()) and time.monotonic() < end:
        time.sleep(0.05)
    hosts = of_all_ranks((platform.node(), seen))
    on_rank_0(partial(sign.unlink, missing_ok=True))
    if blind := sorted({host for host, sees in hosts if not sees}):
        raise UserError(
            f"--run-dir {run_dir} is not the same folder on {', '.join(blind[:8])} as on {hosts[0][0]}: name one on "
            "storage that all nodes share, by its full path"
        )


def _leave_sign(run_dir: Path) -> str:
    name = f"shared-{uuid.uuid4().hex}"
    try:
        (run_dir / name).touch()
    except OSError as error:
        raise unwritable(run_dir, error) from error
    return name


def configuration(config: Config) -> str:
    """Return `config.yaml`: the options as given, and the values that `start_defaults` gave the others."""
    objective = config.model.objective
    if objective.kind == SCORER:
        config = replace(config, model=replace(config.model, objective=replace(objective, kind="reward")))
    return to_yaml(with_start_defaults(config))


def write_run_files(run_dir: Path, config: Config, plan: Plan, backend: Backend) -> None:
    """Write `plan.json`, `environment.json` and, for `--config`, `config.yaml`."""
    models = {place: commit_of(place) for place in starts_from(config).values()}
    data = {each.path: commit_of(each.path, is_data=True) for each in config.data.datasets}
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
        "hub": {place: commit for place, commit in (models | data).items() if commit},
    }
    try:
        replace_file(run_dir / "config.yaml", configuration(config))
        replace_file(run_dir / "plan.json", plan.dumps())
        replace_file(run_dir / "environment.json", json.dumps(environment, indent=2) + "\n")
    except OSError as error:
        raise unwritable(run_dir, error) from error


def write_sidecars(run_dir: Path, config: Config, checkpoint: Path | None, *, image_token: int) -> None:
    """Write RUN_DIR/hf, the files of a Hugging Face model that an export needs, if the run starts from such a model."""
    if checkpoint is not None and sidecars(checkpoint):  # those that come from a store have none
        carry_sidecar(checkpoint, run_dir)
        return
    _write_sidecars(run_dir, config, image_token)
    for files in (run_dir / NAME / FILES, run_dir / NAME / "vision" / FILES):
        if files.exists():
            note_channels(files, config)


def _write_sidecars(run_dir: Path, config: Config, image_token: int) -> None:
    pretrained_list = pretrained_of(config)
    for pretrained in pretrained_list:
        if pretrained.parts == ALL_PARTS:
            write_sidecar(pretrained, run_dir / NAME, config)
    composed = composed_config(pretrained_list, config.model, image_token=image_token)
    if composed is not None:
        write_composed_sidecar(pretrained_list, composed, run_dir, config, image_token=image_token)
    elif pretrained_list and not (run_dir / NAME).exists():
        in_parts = write_part_sidecars(pretrained_list, run_dir, config)
        how = "an export has a folder for each" if in_parts else "the run cannot be exported"
        print(f"no model of Transformers consists of these parts: {how}", flush=True)
