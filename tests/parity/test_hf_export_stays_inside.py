"""What a checkpoint's `hf/` names is written into the export, and nowhere else; links do not lead out of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megavlm.checkpoint.hf.sidecar import carry_sidecar, sidecars
from megavlm.checkpoint.manifest import TENSORS, read_manifest, write_manifest
from megavlm.errors import UserError
from megavlm.programs import convert
from tests.support import hf
from tests.support.tiny_models import tiny


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of an imported checkpoint."""
    root = tmp_path_factory.mktemp("original")
    folder = hf.save(tiny("llava"), root / "theirs")
    assert convert.main(["import", str(folder), str(root / "ours")]) == 0
    return root / "ours"


@pytest.fixture
def imported(original: Path, tmp_path: Path) -> Path:
    """A copy of it, beside a file of someone else."""
    shutil.copytree(original, tmp_path / "ours")
    (tmp_path / "foreign.safetensors").write_text("someone else's")
    return tmp_path / "ours"


def kept(root: Path) -> Path:
    (found,) = root.glob("**/hf")
    return found


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
        (sidecar / name).symlink_to(sidecar.parents[3] / to if to.startswith("..") else to)

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
def test_an_export_writes_only_its_own_folder(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    damage(kept(imported))
    checkpoint = kept(imported).parent
    tensors = {name: total for name, total in read_manifest(checkpoint).items() if name.endswith(TENSORS)}
    write_manifest(checkpoint, tensors)  # as whoever changes a file can do, too
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert convert.main(["export", str(imported), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megavlm convert: ")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not Path("/tmp/megavlm-foreign.safetensors").exists()
    assert (tmp_path / "foreign.safetensors").read_text() == "someone else's"


def test_damaged_tensors_are_not_exported(imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = max(kept(imported).parent.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)
    assert convert.main(["export", str(imported), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file.name} is damaged" in line
    assert not list(tmp_path.glob("*out*"))


def test_a_link_in_a_folder_is_not_copied_into_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hf.save(tiny("llava"), tmp_path / "theirs")
    (folder / "notes.txt").symlink_to("/etc/passwd")
    assert convert.main(["import", str(folder), str(tmp_path / "ours")]) == 2
    assert "is a link that leads out of its folder" in capsys.readouterr().err
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
