"""Tars are indexed once, wherever there is room, and damage costs what it damaged."""

from __future__ import annotations

import json
import struct
import tarfile
from pathlib import Path

import pytest

from megavlm.data.records import tars
from tests.support.tar_shards import sample, write_shards, write_tar


def counts(home: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((home / ".nv-meta" / ".info.json").read_text())["shard_counts"]
    return found


def test_offsets_are_where_samples_begin(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [{**sample("x"), "long" * 40 + ".txt": b"y"}, sample("y"), {"txt": b"z"}])
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    begins = {member.name.partition(".")[0]: member.offset for member in reversed(members)}
    assert tars.sample_offsets(path)[:-1] == sorted(begins.values())
    assert tars.sample_offsets(path)[-1] % 512 == 0


def test_a_cut_anywhere_leaves_the_samples_before_it(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", [sample(str(number)) for number in range(5)])
    offsets = tars.sample_offsets(whole)
    data = whole.read_bytes()
    cut = tmp_path / "cut.tar"
    for size in range(1, offsets[-1], 217):
        cut.write_bytes(data[:size])
        found = tars.sample_offsets(cut)
        complete = [end for end in offsets[1:] if end <= size]
        assert found[: len(complete) + 1] == offsets[: len(complete) + 1]
        assert found[-1] in (size, offsets[len(complete)])
        assert len(found) <= len(complete) + 3


def test_garbage_in_the_middle_is_one_sample(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [sample(str(number)) for number in range(5)])
    offsets = tars.sample_offsets(path)
    data = bytearray(path.read_bytes())
    data[offsets[2] : offsets[2] + 512] = b"\xaa" * 512
    path.write_bytes(data)
    assert tars.sample_offsets(path) == [*offsets[:3], len(data)]


@pytest.mark.parametrize("size", [2**62, 2**40, -1])
def test_a_member_that_lies_about_its_size_is_one_sample(tmp_path: Path, size: int) -> None:
    path = write_tar(tmp_path / "a.tar", [sample("0"), sample("1")])
    offsets, data = tars.sample_offsets(path), path.read_bytes()
    header = tarfile.TarInfo("a-002.jpg")
    header.size = size
    path.write_bytes(data[: offsets[-1]] + header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert tars.sample_offsets(path)[:3] == offsets
    assert len(tars.sample_offsets(path)) <= 4


@pytest.mark.parametrize("data", [b"", b"no tar at all" * 100])
def test_what_is_no_tar_is_one_damaged_sample(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    assert tars.sample_offsets(tmp_path / "a.tar") == [0, len(data)]


def test_folders_are_prepared_in_place_and_once(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write_shards(folder, count=2, each=3)
    write_tar(folder / "sub" / "9.tar", [sample("9")])
    write_tar(folder / "none.tar", [])
    tars.prepare(folder, cache=tmp_path / "cache")
    assert tars._home_of(folder, cache=tmp_path / "cache") == folder
    assert counts(folder) == {"0.tar": 3, "1.tar": 3, "sub/9.tar": 1}
    index = (folder / "0.tar.idx").read_bytes()
    assert list(struct.unpack("<4Q", index)) == tars.sample_offsets(folder / "0.tar")
    said: list[str] = []
    tars.prepare(folder, cache=tmp_path / "cache", log=said.append)
    assert said == []


def test_where_nothing_can_be_written_links_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = tmp_path / "data", tmp_path / "run" / "webdataset"
    write_shards(folder / "sub", count=2, each=3)
    monkeypatch.setattr(tars, "_is_writable", lambda folder: False)
    tars.prepare(folder, cache=cache)
    home = tars._home_of(folder, cache=cache)
    assert home.parent == cache
    assert counts(home) == {"sub/0.tar": 3, "sub/1.tar": 3}
    assert (home / "sub" / "0.tar").read_bytes() == (folder / "sub" / "0.tar").read_bytes()
    assert not (folder / ".nv-meta").exists()


def test_one_tar(tmp_path: Path) -> None:
    write_shards(tmp_path, count=2, each=3)
    tars.prepare(tmp_path / "1.tar", cache=tmp_path / "cache")
    assert counts(tars._home_of(tmp_path / "1.tar", cache=tmp_path / "cache")) == {"1.tar": 3}


def test_folders_without_samples_say_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tars"):
        tars.prepare(tmp_path, cache=tmp_path / "cache")
    write_tar(tmp_path / "a.tar", [])
    with pytest.raises(ValueError, match="without any sample"):
        tars.prepare(tmp_path, cache=tmp_path / "cache")
