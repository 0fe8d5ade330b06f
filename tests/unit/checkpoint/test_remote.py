"""Checkpoints in a store: whole or not there, whatever is cut short, damaged or hostile."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megavlm.checkpoint import folders, manifest, remote
from megavlm.checkpoint.folders import Holds, Keep
from megavlm.checkpoint.manifest import MANIFEST, SUMMARY
from megavlm.checkpoint.remote import DamagedInStore
from megavlm.checkpoint.uploader import Mirror, Uploader
from megavlm.errors import UserError
from megavlm.programs import checkpoint as program
from megavlm.resilience.events import events
from megavlm.storage import transfer
from megavlm.storage.store import Store, StoreError
from tests.support.manifests import committed

FILES = {"__0_0.distcp": b"tensors" * 1000, "__1_0.distcp": b"others" * 900, "common.pt": b"c", "hf/config.json": b"{}"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_FIRST_PAUSE", 0.001)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    yield Store.at(f"memory://{tmp_path.name}")
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run/checkpoints"


def save(root: Path, iteration: int, *, attempt: str = "a", loss: float = 0.0) -> Path:
    files = {name: content + attempt.encode() for name, content in FILES.items()}
    summary = {"iteration": iteration, "metrics": {"loss": loss}, "keep_best": ["loss", "min"]}
    return committed(root, iteration, {**files, SUMMARY: json.dumps(summary)}, attempt=attempt)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fetch(checkpoint: remote.StoredCheckpoint, root: Path, world: int = 1) -> Path:
    sums = checkpoint.sums()
    for rank in range(world):
        remote.download(checkpoint, root, remote.share(sums, rank=rank, world=world), sums)
    return remote.commit_download(checkpoint, root)


def mirror_of(root: Path, store: Store, **keep: Any) -> Mirror:
    return Mirror(root, store, Keep(**keep))


class Failing:
    """A file system that fails at the calls that `fails` chooses by name of the method and path."""

    def __init__(self, system: Any, fails: Any) -> None:
        self._system, self._fails = system, fails

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._system, name)
        if not callable(found):
            return found

        def call(path: Any = "", *args: Any, **kwargs: Any) -> Any:
            if self._fails(name, str(path)):
                raise ConnectionResetError("cut")
            return found(path, *args, **kwargs)

        return call


def test_a_checkpoint_comes_back_byte_by_byte(store: Store, root: Path, tmp_path: Path) -> None:
    folder = save(root, 100)
    remote.upload(folder, store, done=set())
    (there,) = remote.complete_in(store)
    assert (there.iteration, there.name) == (100, "iter_0000100")
    assert remote.first_look(there) is None
    assert remote.damage(there) is None
    other = tmp_path / "other"
    damaged = contents(save(other, 100, attempt="damaged"))
    assert contents(fetch(there, other, world=3)) == contents(folder)
    assert {path.name for path in other.iterdir()} == {folder.name, f"damaged-{folder.name}"}
    assert contents(other / f"damaged-{folder.name}") == damaged  # for whoever looks into it


@pytest.mark.parametrize("file", [*FILES, SUMMARY, MANIFEST])
def test_an_upload_that_is_cut_short_is_no_checkpoint_and_goes_on(store: Store, root: Path, file: str) -> None:
    folder, written, cut = save(root, 100), [], [True]

    def fails(method: str, path: str) -> bool:
        writes = method in ("open", "pipe_file") and folder.name in path
        written.extend([path] * writes)
        return cut[0] and writes and path.endswith(file)

    failing = replace(store, _system=Failing(store._system, fails))
    done: set[str] = set()
    with pytest.raises(StoreError, match="ConnectionResetError: cut"):
        remote.upload(folder, failing, done=done)
    assert remote.complete_in(store) == []
    cut[0] = False
    written.clear()
    before = set(done)
    remote.upload(folder, failing, done=done)
    assert remote.damage(remote.complete_in(store)[0]) is None
    assert not [path for path in written for name in before if path.endswith(f"/{name}")]  # nothing is copied twice
    assert written[-1].endswith(MANIFEST)


def test_another_save_of_the_iteration_takes_the_place_of_the_first(store: Store, root: Path) -> None:
    remote.upload(save(root, 100), store, done=set())
    again, seen = save(root, 100, attempt="b"), []

    def fails(method: str, path: str) -> bool:
        if method == "open":
            seen.append(remote.complete_in(store))
        return False

    remote.upload(again, replace(store, _system=Failing(store._system, fails)), done=set())
    assert not any(seen)  # no manifest stands beside files of another save
    assert remote.damage(remote.complete_in(store)[0]) is None


def test_damage_on_either_side_is_found_and_named(store: Store, root: Path, tmp_path: Path) -> None:
    folder = save(root, 100)
    remote.upload(folder, store, done=set())
    (there,) = remote.complete_in(store)
    there.folder.write("__1_0.distcp", b"X" + FILES["__1_0.distcp"][1:] + b"a")
    assert remote.first_look(there) is None  # the size is right
    assert "__1_0.distcp is damaged" in str(remote.damage(there))
    with pytest.raises(DamagedInStore, match=r"__1_0\.distcp is damaged"):
        fetch(there, tmp_path / "other")
    assert folders.complete(tmp_path / "other") == []
    there.folder.write("__1_0.distcp", b"short")
    assert "has 5 bytes, not" in str(remote.first_look(remote.complete_in(store)[0]))
    there.folder.remove("common.pt")
    assert remote.first_look(remote.complete_in(store)[0]) in (
        "common.pt is missing",
        "__1_0.distcp has 5 bytes, not 5,401",
    )
    (folder / "common.pt").write_bytes(b"Xa")
    with pytest.raises(UserError, match=r"common\.pt is damaged"):
        remote.upload(folder, store, done=set())
    assert remote.complete_in(store) == []


def test_a_download_goes_on_where_it_was(store: Store, root: Path, tmp_path: Path) -> None:
    remote.upload(save(root, 100), store, done=set())
    (there,) = remote.complete_in(store)
    read: list[str] = []

    def fails(method: str, path: str) -> bool:
        read.extend([path] * (method == "open"))
        return False

    watched = replace(there, folder=replace(there.folder, _system=Failing(store._system, fails)))
    sums = there.sums()
    remote.download(watched, tmp_path / "other", ["__0_0.distcp"], sums)
    remote.download(watched, tmp_path / "other", sums, sums)
    assert len([path for path in read if path.endswith("__0_0.distcp")]) == 1


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", "", "a\x00b"])
def test_a_hostile_manifest_writes_nothing(store: Store, root: Path, tmp_path: Path, name: str) -> None:
    remote.upload(save(root, 100), store, done=set())
    (there,) = remote.complete_in(store)
    hostile = {"files": {name: {"bytes": 1, "crc32": 0}, SUMMARY: {"bytes": 1, "crc32": 0}}}
    there.folder.write(MANIFEST, json.dumps(hostile).encode())
    assert "outside of it" in str(remote.first_look(there))
    with pytest.raises(ValueError, match="outside of it"):
        fetch(there, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_newest_goes_first_and_the_rule_holds_in_the_store(store: Store, root: Path) -> None:
    rule = Keep(newest=2, every=40, best="loss")
    mirror = Mirror(root, store, rule)
    assert mirror.due() is None
    for iteration, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        save(root, iteration, loss=loss)
    folders.prune(root, rule)
    order = []
    while (folder := mirror.due()) is not None:
        order.append(folder.name[-2:])
        mirror.copy(folder, lambda moved: None)
    assert order == ["30", "20"]  # 10 is not kept
    for iteration in (40, 50, 60, 70):
        mirror.copy(save(root, iteration, loss=5.0), lambda moved: None)
        folders.prune(root, rule)
        mirror.prune()
    assert [each.iteration for each in remote.complete_in(store)] == [20, 40, 60, 70]
    fresh = Mirror(root, store, rule)  # as after a restart
    assert fresh.due() is None
    save(root, 70, attempt="b")
    assert fresh.due() == root / "iter_0000070"


def test_copies_stay_until_newer_ones_are_there(store: Store, root: Path) -> None:
    """A store that is slower than the run: what is saved meanwhile is not copied yet."""
    mirror = mirror_of(root, store, newest=1)
    folder = save(root, 10)
    save(root, 20)
    save(root, 30)
    mirror.copy(folder, lambda moved: None)
    mirror.prune()
    assert [each.iteration for each in remote.complete_in(store)] == [10]


def test_a_copy_that_is_taken_away_protects_no_other(store: Store, root: Path) -> None:
    """A second save of iteration 20 takes the place of the first, and then cannot be copied: 10 must stay."""
    mirror = mirror_of(root, store, newest=2)
    for iteration in (10, 20):
        mirror.copy(save(root, iteration), lambda moved: None)
    (save(root, 20, attempt="b") / "common.pt").write_bytes(b"Xb")
    with pytest.raises(UserError, match="damaged"):
        mirror.copy(root / "iter_0000020", lambda moved: None)
    mirror.copy(save(root, 30), lambda moved: None)
    mirror.prune()
    assert [each.iteration for each in remote.complete_in(store)] == [10, 30]


def test_a_copy_that_is_deleted_in_part_is_no_checkpoint(store: Store, root: Path) -> None:
    remote.upload(save(root, 100), store, done=set())
    (there,) = remote.complete_in(store)
    cut = Failing(store._system, lambda method, path: method == "rm")
    with pytest.raises(StoreError, match="cut"):
        remote.remove(replace(there.folder, _system=cut))
    assert remote.complete_in(store) == []


def test_what_a_run_went_back_from_does_not_count(store: Store, root: Path, tmp_path: Path) -> None:
    """A checkpoint of a future, which could not be loaded, neither keeps new ones out nor is deleted."""
    remote.upload(save(tmp_path / "future", 1000), store, done=set())
    mirror = mirror_of(root, store, newest=1)
    for iteration in (10, 20):
        save(root, iteration)
        folder = mirror.due()
        assert folder is not None
        mirror.copy(folder, lambda moved: None)
        mirror.prune()
    assert [each.iteration for each in remote.complete_in(store)] == [20, 1000]


def test_a_checkpoint_that_is_damaged_here_is_refused_once(store: Store, root: Path) -> None:
    folder = save(root, 10)
    (folder / "common.pt").write_bytes(b"Xa")
    mirror = mirror_of(root, store, newest=2)
    with pytest.raises(UserError, match="damaged"):
        mirror.copy(folder, lambda moved: None)
    assert mirror.due() is None
    assert mirror.refused


def test_commands_read_a_store_like_a_folder(store: Store, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for iteration, loss in ((10, 1.0), (20, 2.0)):
        remote.upload(save(root, iteration, loss=loss), store, done=set())
    for place in (str(root), store.url):
        assert program.main(["verify", place]) == program.main(["list", place]) == 0
        said = capsys.readouterr().out
        assert re.search(r"^iter_0000010 .* loss 1  best  whole\niter_0000020 .* loss 2  whole$", said, re.MULTILINE)
        assert program.main(["show", f"{place}/iter_0000010"]) == 0
        assert json.loads(capsys.readouterr().out)["iteration"] == 10


def test_failures_are_told_once_and_stop_nothing(store, root, monkeypatch, capsys):
    """A store that refuses, one that breaks in a way nobody knows, and what was deleted meanwhile."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    down = [True]

    def fails(method: str, path: str) -> bool:
        return down[0] and method == "pipe_file" and path.endswith(MANIFEST)

    mirror = mirror_of(root, replace(store, _system=Failing(store._system, fails)), newest=1)
    uploader = Uploader(root.parent, mirror)
    folder = save(root, 10)
    assert [uploader.turn(), uploader.turn()] == [False, False]
    with monkeypatch.context() as patched:
        patched.setattr(remote, "upload", _break)
        assert not uploader.turn()
        shutil.rmtree(folder)
        assert uploader.turn()
    down[0] = False
    save(root, 20)
    with monkeypatch.context() as patched:  # the run deletes it at this moment
        patched.setattr(Holds, "add", lambda self, folder: False)
        assert not uploader.turn()
    assert remote.complete_in(store) == []
    assert [uploader.turn(), uploader.turn()] == [False, True]
    kinds = [(event["kind"], event["iteration"]) for event in events(root.parent)]
    assert kinds == [("upload_failed", 10), ("upload_failed", 10), ("upload", 20)]
    assert capsys.readouterr().err.count("NOT UPLOADED") == 2


def test_a_slow_disk_is_no_store_that_does_not_answer(store, root, tmp_path, monkeypatch):
    """Files are summed up before they are sent, and after they have come."""
    monkeypatch.setattr(manifest, "_PIECE", 100)
    counts: dict[str, list[int]] = {}

    def move(names: Any, act: Any, **_: Any) -> int:
        for name in names:
            act(name, counts.setdefault(name, []).append)
        return 0

    monkeypatch.setattr(remote, "move", move)
    remote.upload(save(root, 10), store, done=set())
    [stored] = remote.complete_in(store)
    remote.download(stored, tmp_path / "new", ["__0_0.distcp"], stored.sums())
    assert counts["__0_0.distcp"].count(0) == 2 * 71
    remote.download(stored, tmp_path / "new", ["__0_0.distcp"], stored.sums())
    assert counts["__0_0.distcp"].count(0) == 3 * 71


@pytest.mark.parametrize(("moved", "counts"), [((0, 0), False), ((0, 7), True)])
def test_an_attempt_that_moves_nothing_is_no_answer(store, root, monkeypatch, moved, counts):
    """Else a store that takes requests and never answers would be waited for without end."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def upload(*_: Any, go_on: remote.GoOn, **__: Any) -> int:
        for each in moved:
            go_on(each)
        raise StoreError("nothing has moved for 300 s")

    monkeypatch.setattr(remote, "upload", upload)
    uploader = Uploader(root.parent, mirror_of(root, store, newest=1))
    uploader.success = 1.0
    save(root, 10)
    assert not uploader.turn()
    assert (uploader.success > 1.0) is counts


def _break(*_: Any, **__: Any) -> None:
    raise ValueError("no such thing")
