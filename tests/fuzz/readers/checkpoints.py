"""Readers of the files of a checkpoint, and of the configuration of its run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megavlm import backend
from megavlm.rules.defaults import resolve

backend.activate()

from megavlm.checkpoint import folders, manifest, remote  # noqa: E402
from megavlm.checkpoint.folders import Holds  # noqa: E402
from megavlm.checkpoint.hf.checkpoint_reader import CheckpointReader  # noqa: E402
from megavlm.checkpoint.hf.sidecar import carry_sidecar, sidecars  # noqa: E402
from megavlm.checkpoint.items import ITEMS, STATE, read_items, read_state  # noqa: E402
from megavlm.checkpoint.reading import VerifyingReader, choices_in  # noqa: E402
from megavlm.checkpoint.summary import FORMAT, check_data, check_fits, read_summary  # noqa: E402
from megavlm.command_line.parsing import parse  # noqa: E402
from megavlm.config.schema import Config, LoraConfig  # noqa: E402
from megavlm.storage.store import StoreError  # noqa: E402
from tests.fuzz.child import Reader as Fuzzed  # noqa: E402
from tests.support.manifests import save_tensors, write_sums  # noqa: E402

TENSORS = {"weight": torch.arange(12.0).reshape(4, 3), "half": torch.ones(2).bfloat16()}


@cache
def saved() -> dict[str, bytes]:
    """Return the files of a small checkpoint by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tensors(folder, TENSORS)
        state = {"position": {"iteration": 3, "step": {"tensor": [7], "dtype": "int64"}}, "loss_scale": None}
        (folder / STATE).write_text(json.dumps(state))
        (folder / "megavlm.json").write_bytes(summary())
        manifest.write_manifest(folder, {})
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def resolved() -> Config:
    return resolve(Config(), vocab_size=512)


@cache
def summary() -> bytes:
    config = resolved()
    described = {
        "format": FORMAT,
        "iteration": 3,
        "plan": {"placement": "stages", "chunks": [["embedding"]], "tp": 1},
        "model": asdict(config.model),
        "lora": asdict(LoraConfig()),
        "data": {"--seed": 1, "--datasets": [{"name": "a", "weight": 1.0, "files": [{"name": "a.json", "bytes": 7}]}]},
        "data_parallel_sharding": "optimizer",
    }
    return json.dumps(described).encode()


def write(folder: Path, name: str, data: bytes) -> Path:
    """Make the checkpoint of iteration 3 in `folder` with other bytes in one of its files, and return it."""
    made = folders.folder_for(folder, 3)
    made.mkdir()
    for each, content in {**saved(), name: data}.items():
        (made / each).write_bytes(content)
    return made


def items(folder: Path, data: bytes) -> None:
    read_items(write(folder, ITEMS, data))


def tensors(folder: Path, data: bytes) -> None:
    """Load a file of tensors as a run does, and read it as an export does."""
    made = write(folder, "__0_0.distcp", data)
    write_sums(made)
    wanted = {name: torch.zeros_like(value) for name, value in TENSORS.items()}
    with suppress(dcp.api.CheckpointException):  # which `reading.load` turns into a line
        dcp.load(wanted, storage_reader=VerifyingReader(made), no_dist=True)
    records = CheckpointReader(made)
    for key, stored in records.stored.items():
        records.read(key, 0, stored.shape[0])


def state(folder: Path, data: bytes) -> None:
    read_state(write(folder, STATE, data))


def description(folder: Path, data: bytes) -> None:
    """Read `megavlm.json` as a resume, `--load` and the tools do."""
    made = write(folder, "megavlm.json", data)
    manifest.is_complete(made)
    remote.checkpoints_at(str(made))[0].summary()
    found = read_summary(made)
    config = resolved()
    expected = {"--seed": 1, "--datasets": [{"name": "a", "weight": 1.0, "files": [{"name": "a.json", "bytes": 8}]}]}
    check_data(found, expected, made, accept=True)
    check_fits(found, config, made)


def listing(folder: Path, data: bytes) -> None:
    """Read `manifest.json` as a resume and `megavlm checkpoint` do."""
    made = write(folder, "manifest.json", data)
    manifest.first_look(made)
    manifest.damage(made)
    (stored,) = remote.checkpoints_at(str(folder))
    state = remote.first_look(stored) or "whole"
    assert len(state.splitlines()) == 1, state[:1000]
    assert len(state) < 1000
    if state == "whole":  # then it is fetched, as a run on a new machine does
        with suppress(StoreError):
            remote.download(stored, folder / "copy", stored.sums(), stored.sums())
            remote.commit_download(stored, folder / "copy")
    assert not (folder / "copy" / "link").exists()
    choices_in(folder, Holds())


def sidecar(folder: Path, data: bytes) -> None:
    made = write(folder, "megavlm.json", summary())
    (made / "hf" / "files").mkdir(parents=True)
    (made / "hf" / "files" / "config.json").write_text("{}")
    (made / "hf" / "unused.safetensors").write_bytes(b"")
    (made / "hf" / "tensors.json").write_bytes(data)
    sidecars(made)
    (folder / "run").mkdir()
    carry_sidecar(made, folder / "run")


def of(read: Callable[[Path, bytes], Any], *names: str, **options: Any) -> Fuzzed:
    return Fuzzed(read, lambda: [saved()[name] for name in names], **options)


def run_config(folder: Path, data: bytes) -> None:
    (folder / "config.yaml").write_bytes(data)
    parse(["--config", str(folder / "config.yaml")])


READERS = {
    "config.yaml": Fuzzed(run_config, lambda: [json.dumps(asdict(Config())).encode()], few=10),
    ITEMS: of(items, ITEMS),
    "distcp": of(tensors, "__0_0.distcp"),
    "megavlm.json": Fuzzed(description, lambda: [summary()]),
    STATE: of(state, STATE),
    "manifest.json": of(listing, "manifest.json"),
    "sidecar": Fuzzed(
        sidecar, lambda: [b'{"spelling": 0, "files": {"a": "model.safetensors", "b": "model-2.safetensors"}}']
    ),
}
