"""What a checkpoint's `hf/` names is written into the export, and nowhere else; links do not lead out of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megavlm.checkpoint.hf.sidecar import carry_sidecar, sidecars
from megavlm.errors import UserError
from megavlm.programs import convert
from tests.support import hf
from tests.support.harness import Single
from tests.support.tiny_models import tiny


@pytest.fixture(scope="module")
def original(single: Single, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that began with a folder."""
    root = tmp_path_factory.mktemp("original")
    return hf.run_of(hf.save(tiny("llava"), root / "theirs"), root / "ours", single)


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of it, beside a file of someone else."""
    shutil.copytree(original, tmp_path / "ours")
    (tmp_path / "foreign.safetensors").write_text("someone else's")
    return tmp_path / "ours"


def listing(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def apply(sidecar: Path) -> None:
        values = json.loads((sidecar / "tensors.json").read_text())
        change(values)
        (sidecar / "tensors.json").write_text(json.dumps(values))

    return apply


def name_file(name: object) -> Callable[[Path], None]:
    return listing(lambda values: values["files"].update({next(iter(values["files"])): name}))


def link(name: str, to: str) -> Callable[[Path], None]:
    def apply(sidecar: Path) -> None:
        if (sidecar / name).exists():
            (sidecar / name).rename(sidecar / f"{name.replace('/', '-')}-moved")
        (sidecar / name).symlink_to(sidecar.parents[1] / to if to.startswith("..") else to)

    return apply


def fifo(sidecar: Path) -> None:
    (sidecar / "tensors.json").unlink()
    os.mkfifo(sidecar / "tensors.json")


CASES: dict[str, Callable[[Path], None]] = {
    "absolute": name_file("/tmp/megavlm-foreign.safetensors"),
    "above": name_file("../foreign.safetensors"),
    "no safetensors": name_file("config.json"),
    "no name": name_file(7),
    "unknown tensor": listing(lambda values: values["files"].update(nothing="model.safetensors")),
    "tensor left out": listing(lambda values: values["files"].pop(next(iter(values["files"])))),
    "unknown spelling": listing(lambda values: values.update(spelling=98)),
    "no spelling": listing(lambda values: values.pop("spelling")),
    "spelling of another type": listing(lambda values: values.update(spelling="0")),
    "deep": lambda sidecar: (sidecar / "tensors.json").write_text("[" * 100_000) and None,
    "fifo": fifo,
    "linked file": link("files/notes.txt", "/etc/passwd"),
    "linked config": link("files/config.json", "/etc/passwd"),
    "linked folder": link("files", "/etc"),
    "linked tensors": link("unused.safetensors", "/etc/passwd"),
}


@pytest.mark.parametrize("damage", CASES.values(), ids=CASES)
def test_an_export_writes_only_its_own_folder(run, tmp_path, capsys, damage):
    damage(run / "hf")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert convert.main(["export", str(run), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megavlm convert: ")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not Path("/tmp/megavlm-foreign.safetensors").exists()
    assert (tmp_path / "foreign.safetensors").read_text() == "someone else's"


def test_damaged_tensors_are_not_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = max(run.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    for at in range(0, len(content), 512):  # moments are not exported
        content[at] ^= 64
    file.write_bytes(content)
    assert convert.main(["export", str(run), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file.name} is damaged" in line
    assert not list(tmp_path.glob("*out*"))


def test_a_link_in_a_folder_is_not_copied_into_runs(single: Single, tmp_path: Path) -> None:
    folder = hf.save(tiny("llava"), tmp_path / "theirs")
    (folder / "notes.txt").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="is a link that leads out of its folder"):
        hf.run_of(folder, tmp_path / "ours", single)
    assert not list((tmp_path / "ours").rglob("notes.txt"))


def parts_in(parent: Path) -> Path:
    """The `hf/` of a model of parts, as small as it can be."""
    for part in ("vision", "projector", "language"):
        files = parent / "hf" / part / "files"
        files.mkdir(parents=True)
        (files / "config.json").write_text(json.dumps({"part": part}))
        (files.parent / "unused.safetensors").write_bytes(b"")
        (files.parent / "tensors.json").write_text(json.dumps({"spelling": 0, "files": {}}))
    return parent / "hf"


def test_a_run_takes_the_parts_of_the_checkpoint_that_it_starts_from(tmp_path: Path) -> None:
    theirs = parts_in(tmp_path / "theirs")
    (tmp_path / "mine").mkdir()
    carry_sidecar(tmp_path / "theirs", tmp_path / "mine")
    mine = sidecars(tmp_path / "mine")
    assert {part: (each.files / "config.json").read_bytes() for part, each in mine.items()} == {
        part: (theirs / part / "files" / "config.json").read_bytes() for part in ("vision", "projector", "language")
    }
    assert all(each.path.is_relative_to(tmp_path / "mine") for each in mine.values())
    carry_sidecar(tmp_path / "mine", tmp_path / "mine")  # a run that goes on


@pytest.mark.parametrize(
    ("name", "linked"),
    [
        *((name, True) for name in ("hf", "hf/projector", "hf/projector/files", "hf/projector/files/config.json")),
        *((name, False) for name in ("hf/projector", "hf/projector/files")),
    ],
)
def test_a_part_that_is_elsewhere_or_missing_is_one_line(tmp_path: Path, name: str, linked: bool) -> None:
    parts_in(tmp_path / "theirs")
    place = tmp_path / "theirs" / name
    place.rename(tmp_path / "moved")
    if linked:
        place.symlink_to(tmp_path / "moved")
    with pytest.raises(UserError, match=r"is damaged .* nothing can be exported from it"):
        sidecars(tmp_path / "theirs")
