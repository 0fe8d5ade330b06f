"""What the manifest of a checkpoint finds: in whole files, and in each item of a file while it is read."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megavlm.checkpoint import folders, manifest
from megavlm.checkpoint.folders import Holds, Keep, kept
from megavlm.checkpoint.hf.adapters import write_adapters
from megavlm.checkpoint.manifest import BLOCK, MANIFEST, SUMMARY, FileSum, FoldedSum, SummingFile
from megavlm.errors import UserError
from tests.support.manifests import committed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / SUMMARY).write_text("{}")
    (tmp_path / "state.json").write_bytes(bytes(range(100)))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(9 * 2**20))
    manifest.write_manifest(tmp_path, {})
    return tmp_path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_whole_checkpoint_has_no_damage(folder: Path) -> None:
    assert manifest.is_complete(folder)
    assert manifest.first_look(folder) is None
    assert manifest.damage(folder) is None


@pytest.mark.parametrize("at", [0, 4 * 2**20, 9 * 2**20 - 1])
def test_a_flipped_bit_of_tensors_is_found_by_reading_them(folder: Path, at: int) -> None:
    flip(folder / "__0_0.distcp", at)
    assert manifest.first_look(folder) is None  # which would take as long as loading
    assert "__0_0.distcp is damaged" in str(manifest.damage(folder))


def test_a_flipped_bit_of_any_other_file_is_seen_at_once(folder: Path) -> None:
    flip(folder / "state.json", 50)
    assert "state.json is damaged" in str(manifest.first_look(folder))


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.json"])
def test_what_a_load_reads_is_listed(folder: Path, name: str) -> None:
    listed = json.loads((folder / MANIFEST).read_text())
    del listed["files"][name]
    (folder / MANIFEST).write_text(json.dumps(listed))
    assert manifest.first_look(folder) == f"its {MANIFEST} does not list {name}"
    (folder / name).unlink()
    (folder / ".nfs0001").write_bytes(b"")  # what a file system leaves is nobody's business
    assert manifest.first_look(folder) is None


def test_sizes_and_missing_files_are_seen_at_once(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(bytes(9 * 2**20 - 1))
    assert manifest.first_look(folder) == "__0_0.distcp has 9,437,183 bytes, not 9,437,184"
    (folder / "__0_0.distcp").unlink()
    assert manifest.first_look(folder) == "__0_0.distcp is missing"
    assert manifest.damage(folder) == "__0_0.distcp is missing"


def test_without_its_manifest_a_folder_is_no_checkpoint(folder: Path) -> None:
    """As a file system leaves it that renames a folder file by file, or copies it."""
    (folder / MANIFEST).unlink()
    assert not manifest.is_complete(folder)
    assert "not saved to its end" in str(manifest.first_look(folder))
    (folder / SUMMARY).unlink()
    assert not manifest.is_complete(folder)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"files": []}',
        '{"files": {"a": 1}}',
        '{"files": {"a": {"bytes": null, "crc32": 1}}}',
        '{"files": {"../x": {"bytes": 1, "crc32": 1}}}',
        '{"files": {"/etc/passwd": {"bytes": 1, "crc32": 1}}}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_manifest_of_any_other_kind_is_damaged(folder: Path, content: str) -> None:
    (folder / MANIFEST).write_bytes(content.encode("latin-1"))
    assert MANIFEST in str(manifest.first_look(folder))
    assert "\n" not in str(manifest.first_look(folder))


def test_a_file_is_summed_while_it_is_written(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        stream = SummingFile(file)
        for piece in (b"abc", memoryview(b"defg"), b""):
            stream.write(piece)
        assert stream.tell() == 7
    assert stream.sum == manifest.sum_of(tmp_path / "a") == FileSum(7, 0x312A6AA6)


def test_a_file_remembers_what_the_file_system_said() -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    stream = SummingFile(Full())
    with pytest.raises(OSError, match="No space"):
        stream.write(b"x")
    assert manifest.in_words(stream.error) == "No space left on device"


def folded(data: bytes, *, pieces: int = BLOCK) -> int:
    total = FoldedSum()
    for at in range(0, len(data), pieces):
        total.update(memoryview(data)[at : at + pieces])
    return total.value


RANDOM = random.Random(1).randbytes(2 * BLOCK + 12_345)


@pytest.mark.parametrize("pieces", [7, BLOCK - 1, len(RANDOM)])
def test_the_sum_does_not_depend_on_the_pieces(pieces: int) -> None:
    assert folded(RANDOM, pieces=pieces) == folded(RANDOM)


def zeroed(data: bytearray) -> None:
    data[8192:12288] = bytes(4096)


def swapped(data: bytearray) -> None:
    data[4096:8192], data[12288:16384] = data[12288:16384], data[4096:8192]


def one_bit_of_every_line(data: bytearray) -> None:
    """Set one bit in every 64 bytes, as a memory cell that is stuck at 1 does."""
    for at in range(13, len(data), 64):
        data[at] |= 0x80


@pytest.mark.parametrize("damage", [zeroed, swapped, one_bit_of_every_line])
def test_the_sum_finds_what_storage_does_to_bytes(damage: Callable[[bytearray], None]) -> None:
    data = bytearray(RANDOM)
    damage(data)
    assert folded(bytes(data)) != folded(RANDOM)


def test_the_sum_finds_each_flipped_bit() -> None:
    for place in random.Random(2).sample(range(8 * len(RANDOM)), 200):
        data = bytearray(RANDOM)
        data[place // 8] ^= 1 << place % 8
        assert folded(bytes(data)) != folded(RANDOM), place


def write(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        committed(root, iteration, {"data": str(iteration)})


def test_newest_complete_counts_and_unfinished_does_not(tmp_path: Path):
    assert folders.newest(tmp_path) is None
    write(tmp_path, 9)
    write(tmp_path, 10)
    (tmp_path / "tmp-iter_0000011").mkdir()  # the kill came here
    assert folders.newest(tmp_path) == folders.folder_for(tmp_path, 10)
    assert [iteration for iteration, _ in folders.complete(tmp_path)] == [9, 10]


def test_order_is_by_number_not_by_name(tmp_path: Path):
    write(tmp_path, 9_999_999, 10_000_000)
    assert folders.newest(tmp_path) == folders.folder_for(tmp_path, 10_000_000)


def test_saving_an_iteration_again_replaces_it(tmp_path: Path):
    write(tmp_path, 5)
    committed(tmp_path, 5, {"other": "new"})
    assert {path.name for path in folders.folder_for(tmp_path, 5).iterdir()} == {"other", "manifest.json"}


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3]), (2, [2, 3]), (9, [1, 2, 3])])
def test_retention_keeps_the_newest_and_clears_leftovers(tmp_path: Path, keep: int, left: list[int]):
    write(tmp_path, 1, 2, 3)
    (tmp_path / "tmp-iter_0000004").mkdir()
    folders.prune(tmp_path, Keep(keep))
    folders.sweep(tmp_path)
    assert [iteration for iteration, _ in folders.complete(tmp_path)] == left
    assert not list(tmp_path.glob("tmp-*"))


def test_a_user_may_name_a_checkpoint_a_run_or_its_checkpoints(tmp_path: Path):
    write(tmp_path / "checkpoints", 3)
    expected = folders.folder_for(tmp_path / "checkpoints", 3)
    for named in (tmp_path, tmp_path / "checkpoints", expected):
        assert folders.resolve(named) == expected
    with pytest.raises(UserError, match="name a run folder"):
        folders.resolve(tmp_path / "nothing")


LOSSES = {10: 2.0, 20: 1.0, 30: 1.0, 40: math.nan, 99: 0.0}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Keep(0), {10, 20, 30, 40, 50}),
        (Keep(2), {40, 50}),
        (Keep(1, every=20), {20, 40, 50}),
        (Keep(1, best="loss"), {30, 50}),
        (Keep(1, best="loss", mode="max"), {10, 50}),
    ],
)
def test_the_rule(rule: Keep, expected: set[int]) -> None:
    assert kept([30, 10, 20, 50, 40], rule, LOSSES) == expected


def test_the_best_survives_until_there_is_a_better_one(tmp_path: Path) -> None:
    """By what each checkpoint says of itself; one that says nothing is not the best."""
    for iteration, metrics in ((1, {"loss": 3.0}), (2, {"loss": 1.0}), (3, {"loss": 2.0}), (4, {}), (5, None)):
        summary = {} if metrics is None else {"metrics": metrics}
        committed(tmp_path, iteration, {SUMMARY: json.dumps(summary)})
        folders.prune(tmp_path, Keep(1, best="loss"))
        assert left(tmp_path) == sorted({min(iteration, 2), iteration})


def left(root: Path) -> list[int]:
    return [iteration for iteration, _ in folders.complete(root)]


def test_a_checkpoint_that_is_held_is_deleted_later(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    holds = Holds()
    assert holds.add(folders.folder_for(tmp_path, 1))
    assert folders.prune(tmp_path, Keep(1)) == [folders.folder_for(tmp_path, 2)]
    assert left(tmp_path) == [1, 3]
    holds.release()
    folders.prune(tmp_path, Keep(1))
    assert left(tmp_path) == [3]


def test_none_of_its_files_is_open_while_a_checkpoint_is_deleted(tmp_path: Path, monkeypatch) -> None:
    """NFS and FUSE keep an open file under another name, so that its folder is not empty."""
    write(tmp_path, 1, 2)
    still_open: list[str] = []

    def rmtree(path: Path) -> None:
        paths = (os.readlink(each) for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each))
        still_open.extend(each for each in paths if each.startswith(str(path)))

    monkeypatch.setattr(folders.shutil, "rmtree", rmtree)
    assert folders.prune(tmp_path, Keep(1)) == [folders.folder_for(tmp_path, 1)]
    assert still_open == []


def test_where_only_files_can_be_renamed_a_checkpoint_is_moved_with_its_manifest_last(tmp_path, monkeypatch) -> None:
    """As on a bucket that gcsfuse mounts."""
    rename, moved = Path.rename, list[str]()

    def refusing(self: Path, target: Path) -> Path:
        if self.is_dir():
            raise OSError(errno.EMFILE, "Too many open files")
        moved.append(self.name)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    for content in ("old", "new"):
        committed(tmp_path, 5, {"state.json": "{}", "zz": content, "hf/config.json": "{}"})
    assert (tmp_path / "iter_0000005/zz").read_text() == "new"
    assert [place for place, name in enumerate(moved) if name == MANIFEST] == [3, 7, 11]
    write(tmp_path, 6)
    assert folders.prune(tmp_path, Keep(1)) == [tmp_path / "iter_0000005"]
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000006"]
    assert folders.set_aside(tmp_path / "iter_0000006") == tmp_path / "damaged-iter_0000006"
    write_adapters({"a": torch.ones(1)}, {}, tmp_path / "adapters")
    assert len(list((tmp_path / "adapters").iterdir())) == 2


def test_what_is_gone_cannot_be_held(tmp_path: Path) -> None:
    assert not Holds().add(folders.folder_for(tmp_path, 1))


def test_links_and_files_in_the_place_of_checkpoints_do_not_fail_a_save(tmp_path: Path) -> None:
    """A checkpoint that was moved to another disk and linked is unlinked, and what has a new one's name makes way."""
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    committed(root, 1, {"file": "x"})
    (root / "iter_0000002").write_text("in the way")
    committed(root, 2, {"file": "x"})
    assert (root / "iter_0000002" / "file").read_text() == "x"
    (root / "iter_0000001").rename(elsewhere)
    (root / "iter_0000001").symlink_to(elsewhere)
    assert folders.prune(root, Keep(newest=1)) == [root / "iter_0000001"]
    folders.sweep(root)
    assert [path.name for path in root.iterdir()] == ["iter_0000002"]
    assert (elsewhere / "file").exists()
