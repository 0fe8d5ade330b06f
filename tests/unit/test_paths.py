"""A name out of a file leads to a regular file in its folder, or nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megavlm.files import copy_files
from megavlm.paths import Escapes, inside, open_regular, plain, read_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.json").write_text("{}")
    (folder / "same.json").symlink_to(folder / "a.json")
    (folder / "out.json").symlink_to(tmp_path / "secret")
    (folder / "dots.json").symlink_to("../secret")
    (folder / "loop.json").symlink_to(folder / "loop.json")
    (folder / "down").mkdir()
    os.mkfifo(folder / "fifo.json")
    return folder


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../secret", "down/../a.json", "a\0b", "..\\a", "x" * 256, "a\ud800"]
)
def test_only_plain_names_are_names(folder: Path, name: str):
    with pytest.raises(Escapes):
        plain(name)
    with pytest.raises(Escapes):
        inside(folder, name)


@pytest.mark.parametrize("name", ["out.json", "dots.json"])
def test_links_are_not_followed_out(folder: Path, name: str):
    with pytest.raises(Escapes, match="leads out"):
        inside(folder, name)


@pytest.mark.parametrize("name", ["fifo.json", "down", "missing", "loop.json"])
def test_what_is_no_file_is_not_opened(folder: Path, name: str):
    with pytest.raises(OSError, match=r"no regular file|No such file|Too many levels"):
        inside(folder, name)
    with pytest.raises(OSError, match=r"no regular file|No such file|Too many levels"):
        open_regular(folder / name)


def test_files_and_links_among_them_are_given(folder: Path):
    assert inside(folder, "a.json").read_text() == inside(folder, "same.json").read_text() == "{}"
    assert inside(folder, "down", directory=True) == folder / "down"


def test_the_download_cache_of_hugging_face_is_one_folder(tmp_path: Path):
    blob, snapshot = tmp_path / "models--a--b/blobs/0123", tmp_path / "models--a--b/snapshots/main"
    for each in (blob.parent, snapshot):
        each.mkdir(parents=True)
    blob.write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    (tmp_path / "models--a--b/secret").write_text("secret")
    (snapshot / "beside.json").symlink_to("../../secret")
    (snapshot / "out.json").symlink_to("../../../secret")
    (tmp_path / "secret").write_text("secret")
    assert inside(snapshot, "config.json").read_text() == "{}"
    for name in ("out.json", "beside.json"):
        with pytest.raises(Escapes):
            inside(snapshot, name)


def test_a_copy_takes_files_and_no_links_out(folder: Path, tmp_path: Path):
    with pytest.raises(Escapes):
        copy_files(folder, tmp_path / "copy", suffixes=(".json",))
    for name in ("out.json", "dots.json"):
        (folder / name).unlink()
    copy_files(folder, tmp_path / "copy", suffixes=(".json",))
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["a.json", "same.json"]


def test_a_file_beyond_its_bound_is_not_read(folder: Path):
    assert read_bytes(folder / "a.json", at_most=2) == b"{}"
    with pytest.raises(OSError, match="more than 1"):
        read_bytes(folder / "a.json", at_most=1)
