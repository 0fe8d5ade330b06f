"""Tars are indexed once and read by number; damage costs what it damaged."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tarfile
from pathlib import Path

import pytest

from megavlm.command_line.parsing import parse
from megavlm.config.schema import DatasetConfig
from megavlm.data.records import Records, data_identity, open_records, tars
from megavlm.data.records.containers import key_of_parts
from megavlm.data.types import Conversation, ImageRef, VideoRef
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample
from megavlm.paths import FileRange
from tests.support.tar_shards import sample, write_shards, write_tar


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", count=3, each=5)
    return tmp_path / "data"


def opened(path: Path | str) -> Records:
    return open_records(DatasetConfig(str(path)))


def said(item: Conversation) -> str:
    return str(item.turns[-1].parts[0])


def found(records: Records) -> list[str]:
    """What each sample says, or why it cannot be read."""
    answers: list[str] = []
    for number in range(len(records)):
        try:
            answers.append(said(records.read(number)))
        except BadSample as error:
            answers.append(str(error.reason))
    return answers


ANSWERS = [f"{shard}-{number}" for shard in range(3) for number in range(5)]


def test_samples_are_conversations_of_raw_bytes(folder: Path) -> None:
    records = opened(folder)
    assert found(records) == ANSWERS
    assert records.read(6).images == (ImageRef(b"1-1" * 200),)
    assert records.label(6) == "1.tar/sample 1"
    assert records.key(6) == key_of_parts(sample("1-1"))
    assert found(opened(folder / "1.tar")) == ANSWERS[5:10]


def test_tars_in_a_store_are_copied_with_their_split(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAVLM_CACHE", str(tmp_path / "cache"))
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta/split.yaml").write_text("split_parts: {train: [2.tar, 0.tar]}")
    records = opened(f"file://{folder}")
    assert found(opened(f"file://{folder}/1.tar")) == ANSWERS[5:10]
    shutil.rmtree(folder)
    assert found(records) == ANSWERS[:5] + ANSWERS[10:]


def test_clips_stay_in_their_tar(tmp_path: Path) -> None:
    spoken = [{"from": "human", "value": "<video>What?"}, {"from": "gpt", "value": "x"}]
    told = json.dumps({"conversations": spoken}).encode()
    samples = [{"json": told, "mp4": bytes([number]) * 700} for number in range(3)]
    records = opened(write_tar(tmp_path / "data/0.tar", samples).parent)
    for number in range(3):
        (video,) = records.read(number).images
        assert isinstance(video, VideoRef)
        assert isinstance(video.source, FileRange)
        with video.source.open() as file:
            assert file.read() == samples[number]["mp4"]
            assert (file.seek(-1, 2), file.read(5)) == (699, bytes([number]))
        assert records.key(number) == key_of_parts(samples[number])


def test_bad_samples_are_passed_over(tmp_path: Path) -> None:
    good = sample("good")
    samples = [good, {"json": b"\x00\x01garbage", "jpg": b"x"}, {"json": good["json"]}, {"jpg": b"x"}, good]
    write_tar(tmp_path / "data" / "0.tar", samples)
    (tmp_path / "data" / "1.tar").write_bytes(b"not a tar" * 200)
    expected = ["good", "not_a_record", "image_count", "not_a_record", "good", "truncated"]
    assert found(opened(tmp_path / "data")) == expected


def test_what_is_damaged_after_it_was_opened_costs_its_samples(folder: Path) -> None:
    records = opened(folder)
    path = folder / "1.tar"
    path.write_bytes(path.read_bytes()[: tars.sample_offsets(path)[3] - 300])
    (folder / "2.tar").unlink()
    answers = found(records)
    assert answers[:7] == ANSWERS[:7]
    assert answers[7:] == ["truncated"] * 3 + ["missing_file"] * 5


def test_what_energon_noted_is_what_is_trained_on(folder: Path) -> None:
    (folder / ".nv-meta").mkdir()
    split = folder / ".nv-meta/split.yaml"
    split.write_text("exclude: []\nsplit_parts:\n  test: []\n  train:\n  - 2.tar\n  - 0.tar\n  val:\n  - 1.tar\n")
    assert found(opened(folder)) == ANSWERS[:5] + ANSWERS[10:]
    split.write_text("exclude: [0.tar]\nsplit_parts: {train: [2.tar, 0.tar]}\n")
    assert found(opened(folder)) == ANSWERS[10:]
    split.write_text("split_parts: {train: [2.tar, ../3.tar]}\n")
    with pytest.raises(UserError, match=r"names '\.\./3\.tar', which is none of its tars"):
        opened(folder)
    split.write_text("[]")
    with pytest.raises(UserError, match="without a list of tars"):
        opened(folder)


def test_a_position_depends_on_the_tars(folder: Path) -> None:
    config = parse(["--datasets", str(folder)])
    before = data_identity(config)
    assert data_identity(config) == before
    write_tar(folder / "1.tar", [sample("other")])
    os.utime(folder / "1.tar", ns=(2**62, 2**62))
    assert data_identity(config) != before


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    for name, what in {"nowhere.tar": "is not a file or folder", "blend.yaml": "with weight="}.items():
        with pytest.raises(UserError, match=what):
            opened(tmp_path / name)
    with pytest.raises(UserError, match="has no tars"):
        open_records(DatasetConfig(str(tmp_path), kind="webdataset"))
    write_tar(tmp_path / "a.tar", [])
    with pytest.raises(UserError, match="without any sample"):
        opened(tmp_path)


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
        left = tars.sample_offsets(cut)
        complete = [end for end in offsets[1:] if end <= size]
        assert left[: len(complete) + 1] == offsets[: len(complete) + 1]
        assert left[-1] in (size, offsets[len(complete)])
        assert len(left) <= len(complete) + 3


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


def test_tars_are_indexed_once_and_again_when_they_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tar(folder / "sub" / "9.tar", [sample("9")])
    write_tar(folder / "none.tar", [])
    assert found(opened(folder)) == [*ANSWERS, "9"]
    assert "indexing 5 tars" in capsys.readouterr().out
    index = (folder / "0.tar.idx").read_bytes()
    assert list(struct.unpack("<6Q", index)) == tars.sample_offsets(folder / "0.tar")
    assert found(opened(folder)) == [*ANSWERS, "9"]
    assert capsys.readouterr().out == ""
    write_tar(folder / "0.tar", [sample("new")])
    os.utime(folder / "0.tar", ns=(2**62, 2**62))
    assert found(opened(folder)) == ["new", *ANSWERS[5:], "9"]


def test_where_nothing_can_be_written_the_index_is_in_the_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAVLM_CACHE", str(tmp_path / "cache"))
    replace = tars.replace_file

    def refuse(path: Path, content: bytes) -> None:
        if path.parent == folder:
            raise PermissionError(path)
        replace(path, content)

    monkeypatch.setattr(tars, "replace_file", refuse)
    assert found(opened(folder)) == ANSWERS
    assert len(list((tmp_path / "cache/tars").iterdir())) == 3
    assert not list(folder.glob("*.idx"))
    shutil.rmtree(tmp_path / "cache")
