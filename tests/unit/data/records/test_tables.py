"""Records in tables and in tars: found by their number, whatever their files are like."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.command_line.parsing import parse
from megavlm.config.schema import DatasetConfig
from megavlm.data.records import Records, data_identity, open_records, tables, tars, text_files
from megavlm.data.records.containers import Container, key_of_parts
from megavlm.data.records.tables import TableFile
from megavlm.data.records.text_files import BOM, NotAnArray, SpanFile, array_spans, line_spans
from megavlm.data.types import Conversation, ImageRef, Turn, VideoRef
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import FileRange
from tests.support.tar_shards import sample, write_shards, write_tar

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
TURNS = pa.list_(pa.struct({"from": pa.string(), "value": pa.string()}))


def spoken(number: int) -> list[dict[str, str]]:
    return [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": f"answer {number}"}]


def rows(count: int) -> Any:
    """Every other image is in the table, the others are files."""
    many = range(count)
    images = [{"bytes": b"%d" % n, "path": None} if n % 2 else {"bytes": None, "path": f"{n}.png"} for n in many]
    turns = [spoken(number) for number in range(count)]
    columns = {"id": pa.array(range(count)), "image": pa.array(images, IMAGE), "conversations": pa.array(turns, TURNS)}
    return pa.table(columns)


def write(path: Path, table: Any, *, batch: int = 3, form: str = "stream", **options: Any) -> Path:
    if form == "parquet":
        pq.write_table(table, path, row_group_size=batch, **options)
        return path
    new = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}[form]
    with new(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
        file.write_table(table, max_chunksize=batch)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of two files of seven and three rows."""
    folder = tmp_path / "saved"
    folder.mkdir()
    table, names = rows(10), ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write(folder / names[0], table.slice(0, 7))
    write(folder / names[1], table.slice(7))
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_fingerprint": "a1"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"image": {"_type": "Image"}}}))
    for number in range(0, 10, 2):
        (folder / f"{number}.png").write_bytes(b"")
    return folder


def conversation(folder: Path, number: int) -> Conversation:
    image = ImageRef(b"%d" % number if number % 2 else (folder / f"{number}.png").resolve())
    return Conversation((Turn("user", (image, "What?")), Turn("assistant", (f"answer {number}",))))


def test_a_saved_data_set_is_a_source(saved: Path) -> None:
    records = open_records(DatasetConfig(str(saved)))
    assert len(records) == 10
    expected = [conversation(saved, number) for number in range(10)]
    assert [records.read(number) for number in (9, *range(10))] == [expected[9], *expected]
    again = pickle.loads(pickle.dumps(records))
    assert again.read(8) == expected[8]
    assert again.label(8) == "data-00001-of-00002.arrow[1]"


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("stream", {}),
        ("file", {}),
        ("stream", {"compression": "zstd"}),
        ("parquet", {}),
        ("parquet", {"version": "1.0"}),
    ],
)
def test_rows_by_number(form: str, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_CACHE", 1)
    table = rows(10)
    path = write(tmp_path / ("t.parquet" if form == "parquet" else "t.arrow"), table, form=form, **options)
    container = TableFile(path, lambda names: names[1:])
    assert container.names == ["id", "image", "conversations"]
    expected = [{name: value for name, value in row.items() if name != "id"} for row in table.to_pylist()]
    assert [container.read(number) for number in range(len(container))] == expected
    again = pickle.loads(pickle.dumps(container))
    assert [again.read(index) for index in (9, 0, 4, 9)] == [expected[index] for index in (9, 0, 4, 9)]
    assert container.label(4) == f"{path.name}[4]"


def test_files_share_the_memory_of_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (
        TableFile(write(tmp_path / f"{name}.parquet", rows(3), form="parquet"), lambda names: names) for name in "ab"
    )
    decoded: list[int] = []
    whole = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda *args, **options: decoded.append(1) or whole(*args, **options)
    )
    for bound, groups in ((1, 4), (2**20, 2)):
        monkeypatch.setattr(tables, "_CACHE", bound)
        tables._GROUPS._forget()
        decoded.clear()
        for _ in range(2):
            one.read(0), other.read(0)
        assert len(decoded) == groups


def test_tags_of_boxes_are_refused_in_tables_too(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "<bbox>"}]
    table = pa.Table.from_pylist([{"conversations": turns, "objects": {"bbox": [[1, 2]]}}])
    write(tmp_path / "t.parquet", table, form="parquet")
    with pytest.raises(BadSample, match="<bbox> for what `objects` holds"):
        open_records(DatasetConfig(str(tmp_path / "t.parquet"))).read(0)


def reason(container: TableFile, number: int) -> Reason | None:
    try:
        container.read(number)
    except BadSample as error:
        return error.reason
    return None


def test_a_damaged_batch_or_row_group_costs_its_rows(saved: Path, tmp_path: Path) -> None:
    path = saved / "data-00000-of-00002.arrow"
    data = path.read_bytes()
    assert b"answer 4" in data
    path.write_bytes(data.replace(b"answer 4", b"answer \xff"))
    container = TableFile(path, list)
    assert [reason(container, number) for number in range(7)] == [None] * 3 + [Reason.NOT_A_RECORD] * 3 + [None]

    path = tmp_path / "t.parquet"
    write(path, rows(1000), form="parquet", batch=500, compression="zstd", use_dictionary=False)
    start = pq.read_metadata(path).row_group(1).column(1).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 60] = b"\xff" * 60
    path.write_bytes(content)
    container = TableFile(path, list)
    assert [reason(container, number) for number in (0, 700)] == [None, Reason.NOT_A_RECORD]


@pytest.mark.parametrize("name", ["a.arrow", "a.parquet"])
@pytest.mark.parametrize("damage", [lambda data: data[:-300], lambda data: b"text" * 99], ids=["cut", "text"])
def test_a_file_that_cannot_be_read_is_one_line_that_names_it(name: str, damage: Any, tmp_path: Path) -> None:
    path = write(tmp_path / name, rows(9), form=name[2:].replace("arrow", "stream"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=rf"{name} is no {name[2:]} file \(.*write it again") as caught:
        open_records(DatasetConfig(str(path)))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("state.json", {"_data_files": [{"filename": "../a.arrow"}]}, "no plain file name"),
        ("state.json", {"_data_files": [{"filename": "b.arrow"}]}, "not there"),
        ("state.json", {"_data_files": "all"}, "must be a list"),
        ("state.json", {}, "has no files"),
        ("state.json", {"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}, "another order"),
        ("dataset_dict.json", {"splits": ["train"]}, "has the splits part: name one"),
    ],
)
def test_a_folder_that_cannot_be_read_says_why(name: str, content: Any, says: str, saved: Path) -> None:
    (saved / "part").mkdir()
    (saved / "part/state.json").write_text("{}")
    (saved / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=says):
        open_records(DatasetConfig(str(saved)))


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


def test_preferences_in_tars_are_read_as_such_on_request(tmp_path: Path) -> None:
    """ms-swift's are conversations, too."""
    said = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A cat."}]
    record = {"messages": said, "rejected_response": "A dog."}
    source = DatasetConfig(str(write_tar(tmp_path / "a.tar", [{"json": json.dumps(record).encode(), "jpg": b"x"}])))
    for answers, last, lengths in ((False, "A cat.", ()), (True, "A dog.", (2, 2))):
        found = open_records(source, pairs=False, answers=answers).read(0)
        assert (found.turns[-1].parts, found.answers, found.images[0]) == ((last,), lengths, ImageRef(b"x"))


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


def test_tars_of_other_splits_are_left_out_beside_those_of_the_training_split(folder: Path) -> None:
    (folder / "1.tar").rename(folder / "1-val.tar")
    (folder / "._0.tar").write_bytes(b"of macOS")
    assert found(opened(folder)) == ANSWERS
    (folder / "2.tar").rename(folder / "train.tar")
    assert found(opened(folder)) == ANSWERS[:5] + ANSWERS[10:]


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


def test_tars_are_indexed_once_and_again_when_they_change(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("MEGAVLM_CACHE", "/proc/none")  # which is not needed where an index can be written beside a tar
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


def all_of(container: Container) -> list[Any]:
    return [container.read(index) for index in range(len(container))]


def lines_of(path: Path) -> SpanFile:
    return SpanFile(path, line_spans(path), content="lines")


def array_of(path: Path) -> SpanFile:
    return SpanFile(path, array_spans(path), content="array")


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(records=st.lists(JSON, min_size=1, max_size=6), ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_arrays_and_lines_give_back_what_was_written(tmp_path_factory, records, ascii, indent):
    folder = tmp_path_factory.mktemp("json")
    text = json.dumps(records, ensure_ascii=ascii, indent=indent)
    assert all_of(array_of(written(folder / "a.json", text.encode()))) == records
    lines = "\n".join(json.dumps(record, ensure_ascii=ascii) for record in records)
    assert all_of(lines_of(written(folder / "l.jsonl", lines.encode()))) == records


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"a": 1}, {"a"', "element 1"),
        (b'[{"a": 1}', "at byte 9, element 1: ',' is missing, the end stands there"),
        (b"[1, 2] 3", "the end is missing, '3' stands there"),
        (b"[1 2]", "',' is missing"),
        (b"[1,]", "element 1"),
        (b"[,1]", "element 0"),
        (b"[\xff\xfe]", "element 0"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_what_is_no_array_says_where(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(NotAnArray, match=message):
        array_spans(written(tmp_path / "a.json", data))


@pytest.mark.parametrize(
    ("data", "values", "labels"),
    [
        (b"1\n2\n", [1, 2], ["l:1", "l:2"]),
        (b"1\r\n2\r\n", [1, 2], ["l:1", "l:2"]),
        (b"1\n2", [1, 2], ["l:1", "l:2"]),
        (BOM + b"1\n2", [1, 2], ["l:1", "l:2"]),
        (b"\n1\n\r\n\n2\n\n", [1, 2], ["l:2", "l:5"]),
        (b"1\n\n\n", [1], ["l:1"]),
        (b"\n\r\n", [], []),
        (b"7", [7], ["l:1"]),
        ('"a\u2028b\x85c"\n"d"'.encode(), ["a\u2028b\x85c", "d"], ["l:1", "l:2"]),  # only \n ends a line
    ],
)
def test_lines(tmp_path: Path, data: bytes, values: list[Any], labels: list[str]) -> None:
    container = lines_of(written(tmp_path / "l", data))
    assert all_of(container) == values
    assert [container.label(index) for index in range(len(container))] == labels


def test_a_bad_line_is_one_bad_record(tmp_path: Path) -> None:
    lines = [b'{"a": 1}', b"\x00\xff\xfe garbage", b'{"a": ', b"[" * 100_000, b"9" * 5000, b"   ", b'{"a": 2}']
    container = lines_of(written(tmp_path / "l", b"\n".join(lines)))
    assert container.read(0) == {"a": 1}
    assert container.read(6) == {"a": 2}
    for index in range(1, 6):
        with pytest.raises(BadSample) as caught:
            container.read(index)
        assert caught.value.reason == Reason.NOT_A_RECORD
        assert len(str(caught.value)) < 400


def test_lines_are_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is cut off while it is mapped ends the process."""
    monkeypatch.setattr(text_files, "_CHUNK", 4)
    path = written(tmp_path / "l", BOM + b'1\r\n\n\r\n22\n"\n"\r\n3\r')
    monkeypatch.setattr(np, "memmap", None)
    container = lines_of(path)
    assert [path.read_bytes()[a:b] for a, b in zip(*bounds(container), strict=True)] == [b"1", b"22", b'"', b'"', b"3"]
    quoted = line_spans(path, quoted=True)
    assert [path.read_bytes()[a:b] for a, b in zip(quoted.starts, quoted.ends, strict=True)][2] == b'"\n"'


def bounds(container: SpanFile) -> tuple[Any, Any]:
    return container._spans.starts, container._spans.ends
