"""Choose and load a run's initial state: its newest checkpoint, that of `--load`, pretrained weights, or the seed.

A checkpoint in an object store (`--checkpoint-dir`, `--load URL`) is downloaded first.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megavlm.arch.plan import Plan
from megavlm.checkpoint import folders, manifest, remote, state
from megavlm.checkpoint.begun import stored_configuration
from megavlm.checkpoint.folders import Holds
from megavlm.checkpoint.hf.importing import load_weights
from megavlm.checkpoint.hf.pretrained import pretrained_of
from megavlm.checkpoint.reading import Choices, choices_in, choices_of, load_newest
from megavlm.checkpoint.remote import DamagedInStore, StoredCheckpoint
from megavlm.checkpoint.summary import check_data, check_fits, read_summary
from megavlm.config.schema import Config
from megavlm.data.loader import DataLoader
from megavlm.errors import StoreLost, UserError
from megavlm.parallel.rendezvous import from_rank_0, in_step, on_rank_0
from megavlm.resilience import events
from megavlm.resilience.phases import START, Phases
from megavlm.storage import is_url
from megavlm.storage.store import Store, StoreError
from megavlm.storage.transfer import with_retries
from megavlm.train.build_engine import WeightInit
from megavlm.train.engine import Engine
from megavlm.train.run_dir import configuration


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
    for pretrained in pretrained_list:
        if pretrained.folder.remark and dist.get_rank() == 0:
            print(pretrained.folder.remark, flush=True)
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
                    folders.move(folder, own)
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


@dataclass(frozen=True)
class Fetch:
    """Source of a download of the newest checkpoint, and the target folder."""

    flag: str  # the option that names the place
    url: str
    root: Path  # a folder that all ranks share
    run_dir: Path
    fallback: bool  # whether an older checkpoint may stand in for a damaged one


def fetch(config: Config, given: Config, run_dir: Path, phases: Phases) -> None:
    """Download the checkpoint from which this run starts, if it is in a store. Every rank calls it, and copies a part.

    The options as `given` are written to config.yaml in `--checkpoint-dir`, unless it has those of its checkpoints.
    Raises UserError, StoreLost.
    """
    options = config.checkpoint
    own = run_dir / "checkpoints"
    if options.checkpoint_dir is not None:
        wanted = Fetch("--checkpoint-dir", options.checkpoint_dir, own, run_dir, options.fallback)
        if (problem := from_rank_0(partial(_note_configuration, wanted, given), None)) is not None:
            raise problem
        _fetch(wanted, phases)
    if options.load is None or not is_url(options.load):
        return
    if from_rank_0(lambda: folders.newest(own) is not None, False):
        on_rank_0(lambda: shutil.rmtree(run_dir / "downloads", ignore_errors=True))
        return
    _fetch(Fetch("--load", options.load, _download_of(run_dir, options.load), run_dir, options.fallback), phases)


def _note_configuration(wanted: Fetch, given: Config) -> UserError | None:
    """Write config.yaml to the store, which tests write access. Where that fails, return the error; for a run that has
    a checkpoint on the disk, warn and return None.
    """
    try:
        store, content = Store.at(wanted.url), stored_configuration(wanted.url) or configuration(given).encode()
        with_retries(lambda: store.write("config.yaml", content))
    except StoreError as error:
        line = f"{wanted.flag}: {error}. Look at the name of the place, and at the rights to write there"
        if folders.newest(wanted.root) is None:
            return (UserError if error.final else StoreLost)(line)
        _warn(wanted.run_dir, line)
    return None


def note_options(config: Config, given: Config) -> None:
    """Write `given`, options that the loaded checkpoint has accepted, to config.yaml in `--checkpoint-dir`."""
    if (url := config.checkpoint.checkpoint_dir) is not None:
        with suppress(StoreError):  # `fetch` has warned of a store that is lost, or the first upload does
            with_retries(lambda: Store.at(url).write("config.yaml", configuration(given).encode()))


def load_path(load: str, run_dir: Path) -> Path:
    """Return the local run or checkpoint of `--load`; for a URL, the folder into which `fetch` copied it."""
    if not is_url(load):
        return Path(load)
    folder = _download_of(run_dir, load)
    name = load.rstrip("/").rpartition("/")[2]
    return folder / name if folders.is_checkpoint(folder / name) else folder


def _download_of(run_dir: Path, url: str) -> Path:
    return run_dir / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:12]


def _fetch(wanted: Fetch, phases: Phases) -> None:
    """Copy the newest whole checkpoint, unless the disk has one that is as new. Each file's checksum is verified."""
    skipped: set[str] = set()
    while True:
        chosen = from_rank_0(partial(_choose, wanted, skipped), None)
        if isinstance(chosen, UserError):
            raise chosen
        if chosen is None:
            return
        began = time.monotonic()
        errors = in_step(partial(_copy, chosen, wanted.root), tick=lambda: phases.enter(START, "download"))
        problem = next((error for error in errors if error is not None), None)
        if problem is None:
            on_rank_0(partial(_commit, chosen, wanted, began))
            return
        if not isinstance(problem, StoreError):
            raise UserError(f"{chosen.folder.url} cannot be copied to {wanted.root}: {problem}") from problem
        if not isinstance(problem, DamagedInStore):
            raise StoreLost(f"{wanted.flag}: {problem}. Start again when the store answers") from problem
        _leave_out(wanted, chosen, str(problem))
        skipped.add(chosen.name)


def _choose(wanted: Fetch, skipped: set[str]) -> StoredCheckpoint | UserError | None:
    """Return the newest checkpoint that is newer than all whole ones on the disk; None if there is none.

    An error is returned, not raised, so that its type reaches all ranks.
    """
    whole = [iteration for iteration, path in folders.complete(wanted.root) if manifest.first_look(path) is None]
    newest = max(whole, default=-1)
    try:
        found = with_retries(partial(_candidates, wanted))
        for candidate in reversed(found):
            if candidate.iteration <= newest:
                return None
            if candidate.name in skipped:
                continue
            if problem := with_retries(partial(remote.first_look, candidate)):
                _leave_out(wanted, candidate, problem)
                continue
            _check_room(candidate, wanted.root)
            print(f"copying {candidate.folder.url} ({candidate.bytes / 1e9:.3f} GB) to {wanted.root}", flush=True)
            return candidate
    except StoreError as error:
        if newest < 0:
            kind = UserError if error.final else StoreLost
            return kind(f"{wanted.flag}: {error}. The run does not begin without it: look at the name and the rights")
        _warn(wanted.run_dir, f"{wanted.flag}: {error}. The run goes on from iteration {newest} in {wanted.root}")
        return None
    if newest < 0 and (found or wanted.flag == "--load"):
        what = "no checkpoint that is whole" if found else "no complete checkpoint"
        return UserError(f"{wanted.flag} {wanted.url} has {what}: name another place")
    return None


def _candidates(wanted: Fetch) -> list[StoredCheckpoint]:
    store, only = remote.place_of(wanted.url) if wanted.flag == "--load" else (Store.at(wanted.url), None)
    return [each for each in remote.complete_in(store) if only in (None, each.name)]


def _leave_out(wanted: Fetch, checkpoint: StoredCheckpoint, problem: str) -> None:
    """Warn of a damaged checkpoint. Raises UserError where no older one may stand in for it."""
    line = f"checkpoint {checkpoint.folder.url} is damaged: {problem}"
    if not wanted.fallback:
        raise UserError(f"{line}. Leave --no-fallback out to go on from an older one")
    _warn(wanted.run_dir, f"{line}. It is left out")


def _copy(checkpoint: StoredCheckpoint, root: Path) -> None:
    """Copy this rank's part of the files."""
    sums = with_retries(checkpoint.sums)
    remote.download(checkpoint, root, remote.share(sums, rank=dist.get_rank(), world=dist.get_world_size()), sums)


def _commit(checkpoint: StoredCheckpoint, wanted: Fetch, began: float) -> None:
    try:
        folder = with_retries(partial(remote.commit_download, checkpoint, wanted.root))
    except OSError as error:
        raise UserError(f"{checkpoint.folder.url} cannot be copied to {wanted.root}: {error}") from error
    for iteration, older in folders.checkpoints(wanted.root):
        if wanted.root != wanted.run_dir / "checkpoints" and iteration != checkpoint.iteration:
            shutil.rmtree(older)
    seconds = time.monotonic() - began
    events.record(
        wanted.run_dir,
        "download",
        iteration=checkpoint.iteration,
        seconds=round(seconds, 3),
        bytes=checkpoint.bytes,
        folder=checkpoint.folder.url,
    )
    print(f"copied and verified {folder} in {seconds:.1f} s", flush=True)


def _check_room(checkpoint: StoredCheckpoint, root: Path) -> None:
    """Raise UserError if the disk has no room for a checkpoint."""
    root.mkdir(parents=True, exist_ok=True)
    begun = remote.temporary_for(root, checkpoint.name)
    there = sum(file.stat().st_size for file in begun.rglob("*") if file.is_file())
    if (free := shutil.disk_usage(root).free) < checkpoint.bytes - there:
        raise UserError(
            f"{root} has {free / 1e9:.1f} GB free, and {checkpoint} needs {checkpoint.bytes / 1e9:.1f}: make room, or "
            "choose a --run-dir on another disk"
        )
