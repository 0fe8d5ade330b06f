"""Choose and load a run's initial state: its newest checkpoint, that of `--load`, pretrained weights, or the seed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megavlm.arch.plan import Plan
from megavlm.checkpoint import folders, state
from megavlm.checkpoint.folders import Holds
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.checkpoint.hf.pretrained import pretrained_of
from megavlm.checkpoint.reading import Choices, choices_in, choices_of, load_newest
from megavlm.checkpoint.summary import check_data, check_fits, read_summary
from megavlm.config.schema import Config
from megavlm.data.loader import DataLoader
from megavlm.parallel.rendezvous import from_rank_0
from megavlm.resilience import events
from megavlm.train.build_engine import WeightInit
from megavlm.train.engine import Engine
from megavlm.train.fetch import load_path


def choose_checkpoints(config: Config, run_dir: Path, holds: Holds) -> Choices:
    """Return the checkpoints to start from: the run's own, else those of `--load`, else none. Equal on all ranks.

    Rank 0 protects them for all ranks (`Holds`): no other run deletes them.
    """

    def choose() -> Choices:
        options = config.checkpoint
        choices = choices_in(run_dir / "checkpoints", holds, fallback=options.fallback)
        if not choices.folders and options.load is not None:
            choices = choices_of(load_path(options.load, run_dir), holds, fallback=options.fallback)
        for remark in choices.remarks:
            _warn(run_dir, remark)
        return choices

    return from_rank_0(choose, Choices(()))


def initial_weights(config: Config, choices: Choices, *, vocab_size: int) -> WeightInit | None:
    """Return the function that sets the initial weights; None if the seed or `restore` sets them."""
    if choices.folders or not (pretrained_list := pretrained_of(config)):
        return None
    return partial(load_weights, pretrained_list=pretrained_list, config=config, vocab_size=vocab_size)


def restore(
    engine: Engine,
    data_loader: DataLoader,
    config: Config,
    plan: Plan,
    choices: Choices,
    identity: dict[str, Any],
) -> state.Position:
    """Restore model, optimizer and data loader from the newest whole checkpoint, if there is one; return its position.

    Newer checkpoints of this run, which are damaged, are renamed, so that they do not outlive those saved from now on.
    """
    if not choices.folders:
        return state.Position(iteration=0, loader={})
    run_dir = Path(config.run.run_dir)

    def check(folder: Path) -> None:
        summary = read_summary(folder)
        check_fits(summary, config, folder)
        if changed := check_data(summary, identity, folder, accept=config.checkpoint.accept_changed_data):
            _warn(run_dir, changed)

    checkpoint, position = load_newest(
        choices,
        check=check,
        load=lambda folder: state.load(engine.trained(), folder, config=config, plan=plan),
        say=partial(_warn, run_dir),
    )
    data_loader.load_state_dict(position.loader)
    engine.scheduler.step(increment=position.iteration)
    if dist.get_rank() == 0:
        if checkpoint.parent == run_dir / "checkpoints":
            for iteration, folder in folders.checkpoints(checkpoint.parent):
                own = folders.folder_for(checkpoint.parent, position.iteration)
                if folder == checkpoint and folder != own and not own.exists():  # somebody has renamed it
                    print(f"{folder} is of iteration {position.iteration}, and is now {own.name}", flush=True)
                    folder.rename(own)
                elif iteration > position.iteration:
                    why = f"a copy of {own.name}, and " if folder == checkpoint else ""
                    print(f"{folder} is {why}now {folders.set_aside(folder).name}", flush=True)
        print(f"resumed from {checkpoint} at iteration {position.iteration}", flush=True)
    return position


def _warn(run_dir: Path, text: str) -> None:
    """Print a warning about a checkpoint on rank 0, and record it as an event `damage`."""
    if dist.get_rank() == 0:
        print(f"warning: {text}", flush=True)
        events.record(run_dir, "damage", reason=text)
