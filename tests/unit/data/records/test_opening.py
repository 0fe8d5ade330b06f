"""`--datasets` by looking at them, and one line of what is wrong with them."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megavlm.config.schema import DatasetConfig
from megavlm.data.records import is_stream, name_of, open_records
from megavlm.data.records.container import Records
from megavlm.data.types import BadSample, Conversation, ImageRef, Reason, Turn
from megavlm.errors import UserError


def llava(number: int, image: Any = "a.jpg") -> dict[str, Any]:
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": f"answer {number}"}]
    return {"id": number, "image": image, "conversations": turns}


def messages(number: int) -> dict[str, Any]:
    user = {"role": "user", "content": [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "What?"}]}
    return {"messages": [user, {"role": "assistant", "content": f"answer {number}"}]}


LLAVA = [llava(number) for number in range(3)]
MESSAGES = [messages(number) for number in range(3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jpg").write_bytes(b"a")
    return tmp_path


def opened(path: Path, **fields: Any) -> Records:
    return open_records(DatasetConfig(path=str(path), **fields))


def conversations(records: Records) -> list[Conversation]:
    return [records.read(index) for index in range(len(records))]


def as_lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.json", json.dumps(LLAVA)),
        ("d.json", json.dumps(LLAVA, indent=2)),
        ("d.json", as_lines(LLAVA)),
        ("d.jsonl", as_lines(LLAVA)),
        ("d.jsonl", as_lines(MESSAGES)),
        ("d.ndjson", as_lines(MESSAGES)),
        ("d.jsonl", "garbage\n[1]\n" + as_lines(LLAVA)),
        ("d", as_lines(LLAVA)),
    ],
)
def test_json_is_opened_by_looking(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    records = pickle.loads(pickle.dumps(opened(folder / name)))
    assert records.name == "d"
    for number in range(3):
        conversation = records.read(len(records) - 3 + number)
        assert conversation.turns[0] == Turn("user", (ImageRef((folder / "a.jpg").resolve()), "What?"))
        assert conversation.turns[1] == Turn("assistant", (f"answer {number}",))


@pytest.mark.parametrize("column", ["conversations", "messages"])
def test_parquet(folder: Path, column: str) -> None:
    texts = [[("user", "<image>What?"), ("assistant", f"answer {number}")] for number in range(5)]
    turns = [[{"role": role, "content": content} for role, content in text] for text in texts]
    images = [[{"bytes": b"jpg", "path": "x.jpg"}]] * 4 + [[{"bytes": None, "path": "a.jpg"}]]
    pq.write_table(pa.table({column: turns, "images": images}), folder / "d.parquet", row_group_size=2)
    found = conversations(opened(folder / "d.parquet"))
    assert [conversation.turns[1].parts for conversation in found] == [(f"answer {number}",) for number in range(5)]
    assert found[0].images == (ImageRef(b"jpg"),)
    assert found[4].images == (ImageRef((folder / "a.jpg").resolve()),)


def test_text_has_a_document_per_line(folder: Path) -> None:
    (folder / "d.txt").write_text("One.\n\n{Two}\n")
    records = opened(folder / "d.txt")
    assert conversations(records) == [Conversation((Turn("text", (text,)),)) for text in ("One.", "{Two}")]
    assert records.label(1) == "d.txt:3"
    (folder / "d.jsonl").write_text(as_lines([{"text": "One.\nStill one."}]))
    assert conversations(opened(folder / "d.jsonl")) == [Conversation((Turn("text", ("One.\nStill one.",)),))]


def test_a_folder_is_its_files_by_name(folder: Path) -> None:
    parts = folder / "parts"
    parts.mkdir()
    for name, numbers in (("b.jsonl", [2]), ("a.jsonl", [0, 1])):
        (parts / name).write_text(as_lines([llava(number) for number in numbers]))
    records = opened(parts, image_root=str(folder))
    assert [c.turns[1].parts[0] for c in conversations(records)] == ["answer 0", "answer 1", "answer 2"]
    assert records.label(2) == "b.jsonl:1"


def test_images_lie_below_the_image_root(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "d.jsonl").write_text(as_lines([llava(0), llava(1, "../a.jpg"), llava(2, "b.jpg")]))
    path = folder / "elsewhere" / "d.jsonl"
    assert opened(path, image_root=str(folder)).read(0).images == (ImageRef((folder / "a.jpg").resolve()),)
    for index, reason in enumerate([Reason.MISSING, Reason.OUTSIDE, Reason.MISSING]):
        with pytest.raises(BadSample) as caught:
            opened(path).read(index)
        assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("d.json", None, "is not a file or folder"),
        ("d.json", b"", "is empty"),
        ("d.json", b"[]", "has no records"),
        ("d.jsonl", b"\n\n", "has no records"),
        ("d.json", b'[{"conversations": [', r"is no JSON array \(at byte 1, element 0"),
        ("d.jsonl", b"garbage\n" * 200, "has no record among its first 100"),
        ("d.jsonl", b'{"question": "x"}\n', "fields 'question', none of conversations, messages, text"),
        ("d.jsonl", json.dumps({f"f{n:02}": n for n in range(40)}).encode(), "'f10', 'f11' and 28 more, none of"),
        ("d.jsonl", '{"text": "x"}'.encode("utf-16"), "is UTF-16"),
        ("d.jsonl", gzip.compress(b'{"text": "x"}', mtime=0), "is gzip"),
        ("d.parquet", b"PAR1 not really", "is no parquet file"),
    ],
)
def test_what_is_wrong_with_a_source_is_one_line(folder: Path, name: str, data: bytes | None, message: str) -> None:
    if data is not None:
        (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        opened(folder / name)
    assert str(caught.value).startswith(f"--datasets {folder / name} ")
    assert len(str(caught.value).splitlines()) == 1


def test_parquet_without_known_columns_names_them(folder: Path) -> None:
    pq.write_table(pa.table({"question": ["x"]}), folder / "d.parquet")
    with pytest.raises(UserError, match="fields 'question'"):
        opened(folder / "d.parquet")


def test_a_kind_that_does_not_fit(folder: Path) -> None:
    (folder / "d.jsonl").write_text(as_lines(LLAVA))
    with pytest.raises(UserError, match="none of messages"):
        opened(folder / "d.jsonl", kind="messages")


def test_an_image_root_that_is_missing(folder: Path) -> None:
    (folder / "d.jsonl").write_text(as_lines(LLAVA))
    with pytest.raises(UserError, match="image_root=nowhere"):
        opened(folder / "d.jsonl", image_root="nowhere")


def test_folders_without_records_or_of_several_kinds(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no \.json"):
        opened(folder / "empty")
    (folder / "d.jsonl").write_text(as_lines(LLAVA))
    (folder / "d.txt").write_text("text")
    with pytest.raises(UserError, match="several kinds"):
        opened(folder)


def test_which_sources_are_streams(folder: Path) -> None:
    (folder / "tars").mkdir()
    (folder / "tars" / "0.tar").write_bytes(b"")
    streams = ["s3://bucket/data", str(folder / "tars"), "x.tar", "blend.yaml"]
    assert all(is_stream(DatasetConfig(path=path)) for path in streams)
    assert not is_stream(DatasetConfig(path=str(folder)))
    assert is_stream(DatasetConfig(path=str(folder), kind="webdataset"))
    assert not is_stream(DatasetConfig(path="s3://bucket/d.jsonl"))
    assert not is_stream(DatasetConfig(path="s3://bucket/shards", kind="llava"))


def test_names(folder: Path) -> None:
    assert name_of(DatasetConfig(path="x/llava_665k.json")) == "llava_665k"
    assert name_of(DatasetConfig(path="x/", name="y")) == "y"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.json"])
def test_a_fifo_among_the_files_is_not_waited_for(folder: Path, name: str) -> None:
    empty = folder / "empty"
    empty.mkdir()
    os.mkfifo(empty / name)
    with pytest.raises(UserError, match="no regular file"):
        open_records(DatasetConfig(str(empty)))
