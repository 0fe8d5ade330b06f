"""`--datasets` by looking at them, and one line of what is wrong with them."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from megavlm.config.schema import DatasetConfig
from megavlm.data import decode as decode_module
from megavlm.data.decode import decode, size_of
from megavlm.data.records import is_tars, open_records
from megavlm.data.records.containers import Records
from megavlm.data.records.identity import _of_dataset
from megavlm.data.records.media import stored_below
from megavlm.data.records.shapes import SHAPES, shape_of
from megavlm.data.types import Conversation, ImageRef, Turn
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.storage import transfer
from megavlm.storage.store import Store, StoreError
from megavlm.storage.transfer import StoredFile
from tests.support.data_files import write_llava
from tests.support.hostile import reason_of


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


def opened(path: Path, *, pairs: bool | None = None, **fields: Any) -> Records:
    return open_records(DatasetConfig(path=str(path), **fields), pairs=pairs)


def conversations(records: Records) -> list[Conversation]:
    return [records.read(index) for index in range(len(records))]


def as_lines(records: list[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.json", json.dumps(LLAVA)),
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


def test_text_has_a_document_per_line(folder: Path) -> None:
    (folder / "d.txt").write_text("One.\n\n{Two}\n")
    records = opened(folder / "d.txt")
    assert conversations(records) == [Conversation((Turn("text", (text,)),)) for text in ("One.", "{Two}")]
    assert records.label(1) == "d.txt:3"
    (folder / "d.jsonl").write_text(as_lines([{"text": "One.\nStill one."}]))
    assert conversations(opened(folder / "d.jsonl")) == [Conversation((Turn("text", ("One.\nStill one.",)),))]


def test_a_folder_is_its_files_by_name(folder: Path) -> None:
    """Those of other splits are left out beside those of the training split."""
    parts = folder / "parts"
    parts.mkdir()
    for name, numbers in (("b.jsonl", [2]), ("a.jsonl", [0, 1]), ("c-test.jsonl", [3]), ("c-train.jsonl", [4])):
        (parts / name).write_text(as_lines([llava(number) for number in numbers]))
    (parts / "._a.json").write_bytes(b"\0")  # as macOS has it
    for expected in ((0, 1, 2, 4), (0, 1, 2, 3)):
        records = opened(parts, image_root=str(folder))
        assert [c.turns[1].parts[0] for c in conversations(records)] == [f"answer {number}" for number in expected]
        (parts / "c-train.jsonl").unlink(missing_ok=True)
    assert records.label(2) == "b.jsonl:1"


def test_images_lie_below_the_image_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "d.jsonl").write_text(as_lines([llava(0), llava(1, "../a.jpg"), llava(2, "b.jpg")]))
    path = folder / "elsewhere" / "d.jsonl"
    monkeypatch.setenv("HOME", str(folder))
    for root in (str(folder), "~"):
        assert opened(path, image_root=root).read(0).images == (ImageRef((folder / "a.jpg").resolve()),)
    for index, reason in enumerate([Reason.MISSING, Reason.OUTSIDE, Reason.MISSING]):
        assert reason_of(opened(path).read, index) == reason


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("d.json", None, "is not a file or folder"),
        ("d.json", b"", "is empty"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0), "is compressed: unpack it with gunzip"),
        ("d.csv", "text\na\n".encode("utf-16"), "is UTF-16: convert it"),
        ("d.jsonl", b"\n\n", "has no records"),
        ("d.json", b'[{"conversations": [', r"is no JSON array \(at byte 1, element 0"),
        ("d.jsonl", b"garbage\n" * 200, r"has no record among its first 100 \(d.jsonl:1: it is not JSON"),
        ("d.jsonl", '{"text": "é"}\n'.encode("latin-1") * 9, "first 9 .*not UTF-8 but perhaps Latin-1.*iconv -f"),
        ("d.csv", 'text\n"é"\n'.encode("latin-1"), "not UTF-8 but perhaps Latin-1"),
        ("d.csv", b"image;question;answer\n1;2;3", "fields 'image;question;answer', none of"),
        ("d.csv", b"text,text\n1,2", "two columns 'text'"),
        ("d.csv", b"text\n", "has no records"),
        ("d.csv", b'"text\n1\n', "is no csv file .'it is no row"),
        ("d.csv", b"image,frage\n1,2", r"fields 'image', 'frage', none of .*columns=question:NAME\+answer:NAME \("),
        ("d.csv", b"image,question,chosen,rejected\n1,2,3,4", "pairs of answers use --objective dpo, else say which"),
        (
            "d.jsonl",
            b'{"query": "x", "a": null}',
            r"'query', 'a' \(null\), none of .*columns=response:NAME\+image:NAME",
        ),
        ("d.jsonl", b'{"query": "x"}\n{"response": "y"}', "none of the first 2 has all of query or prompt . response"),
        ("d.jsonl", b"version https://git-lfs.github.com/spec/v1", "it is not JSON .*: 'version https://git-lfs"),
        (
            "d.jsonl",
            b'{"question": "x"}\n',
            "fields 'question', none of conversations; messages; .*columns=answer:NAME",
        ),
        ("d.parquet", b"PAR1 not really", "is no parquet file"),
        ("d.json", b'{\n "a": {"root": "x", "annotation": "a.jsonl"}\n}', "name each, as ANNOTATION,image_root=ROOT"),
    ],
)
def test_what_is_wrong_with_a_source_is_one_line(folder: Path, name: str, data: bytes | None, message: str) -> None:
    if data is not None:
        (folder / name).write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        opened(folder / name)
    assert str(caught.value).startswith(f"--datasets {folder / name} ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_text_that_names_a_picture_is_told(folder: Path) -> None:
    """As in `metadata.jsonl` of folders of images."""
    (folder / "metadata.jsonl").write_text(as_lines([{"file_name": "a.jpg", "text": "A cat."}]))
    assert opened(folder / "metadata.jsonl").unread == ["file_name"]


@pytest.mark.parametrize(("name", "mark"), [("d.csv", ","), ("d.tsv", "\t")])
def test_a_table_of_text(folder: Path, name: str, mark: str) -> None:
    """Cells may have line breaks, quotation marks and lists; an empty one is null. A bad row costs itself."""
    rows = [
        ("question", "answer", "image", "note"),
        ('"What is\r\nit?"', '"a ""cat"", or, \tnot"', "a.jpg", ""),
        ("Who?", '"é\n"', "", "x"),
        ("Who?", "me", '"[""a.jpg"", ""a.jpg""]"', ""),
        ("Who?", "me"),
        ("Who?", "", "", ""),
    ]
    text = "\ufeff" + "\r\n".join(mark.join(row) for row in rows)
    (folder / name).write_text(text, newline="")
    records = pickle.loads(pickle.dumps(opened(folder / name)))
    image = ImageRef((folder / "a.jpg").resolve())
    assert [records.read(number).turns[0].parts for number in range(3)] == [
        (image, "\nWhat is\r\nit?"),
        ("Who?",),
        (image, "\n", image, "\nWho?"),
    ]
    assert records.read(0).turns[1].parts == ('a "cat", or, \tnot',)
    assert len(records) == 5
    for number, told in ((3, "2 cells, the first row 4"), (4, "no field `answer` or `answers`")):
        with pytest.raises(BadSample, match=told):
            records.read(number)


ODD = [{"frage": "What?", "antwort": f"answer {number}", "bild": "a.jpg", "text": "of it"} for number in range(3)]
COLUMNS = {"question": "frage", "answer": "antwort", "image": "bild"}


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "d.csv"])
def test_columns_give_fields_other_names(folder: Path, name: str) -> None:
    table = pa.Table.from_pylist(ODD)
    if name == "d.jsonl":
        (folder / name).write_text(as_lines(ODD))
    else:
        (pq.write_table if name == "d.parquet" else pa_csv.write_csv)(table, folder / name)
    assert opened(folder / name).read(1).turns[0].role == "text"
    found = conversations(opened(folder / name, columns=COLUMNS))
    image = ImageRef((folder / "a.jpg").resolve())
    assert found == [
        Conversation((Turn("user", (image, "\nWhat?")), Turn("assistant", (f"answer {number}",))))
        for number in range(3)
    ]
    with pytest.raises(UserError, match=r"'frage', 'antwort', 'bild', 'text', and no 'bilt', .*did you mean bild"):
        opened(folder / name, columns={**COLUMNS, "image": "bilt"})
    echo = opened(folder / name, columns={"question": "antwort", "answer": "antwort"}).read(2)
    assert [turn.parts for turn in echo.turns] == [("answer 2",)] * 2
    with pytest.raises(UserError, match="columns=bild:image, but bild is not read: turn it round, image:bild"):
        opened(folder / name, columns={"bild": "image"})


def test_the_page_has_a_whole_record_of_each_kind(folder: Path) -> None:
    """The table of docs/data.md, and the three records that it begins with, are read as they are printed."""
    page = (Path(__file__).parents[4] / "docs/data.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\| `(\{.*?\})`", page, re.MULTILINE))
    assert set(rows) == set(SHAPES)
    whole = re.findall(r"^    (\{.*\})$", page, re.MULTILINE)[:3]
    for name in ("a.jpg", "cat.jpg"):
        (folder / name).write_bytes(b"")
    for kind, record in [*rows.items(), *zip(("llava", "messages", "vqa"), whole, strict=True)]:
        (folder / "d.jsonl").write_text(record)
        asked = {"pairs": kind == "pairs", "answers": kind == "preferences"}
        records = open_records(DatasetConfig(path=str(folder / "d.jsonl")), **asked)
        assert records.read(0).turns[-1].role == {"text": "text", "pairs": "positive"}.get(kind, "assistant")
        assert shape_of(json.loads(record)) == kind
        assert records.read(0).images or kind == "alpaca"


def test_paths_may_be_those_of_windows(folder: Path) -> None:
    (folder / "images" / "clip").mkdir(parents=True)
    for name in ("images/b.jpg", "images/clip/0.jpg", "odd\\c.jpg"):
        (folder / name).write_bytes(b"")
    (folder / "d.jsonl").write_text(
        as_lines([*(llava(0, name) for name in ("images\\b.jpg", "odd\\c.jpg", "..\\..\\x.jpg", "no\\x.jpg"))])
        + as_lines([{"question": "?", "answer": "x", "video": "images\\clip"}])
    )
    records = opened(folder / "d.jsonl", kind="llava")
    assert records.read(0).images == (ImageRef((folder / "images/b.jpg").resolve()),)
    assert records.read(1).images == (ImageRef((folder / "odd\\c.jpg").resolve()),)
    for number, reason in ((2, Reason.OUTSIDE), (3, Reason.MISSING)):
        assert reason_of(records.read, number) == reason
    frames = opened(folder / "d.jsonl", kind="vqa").read(4).images[0].source
    assert frames == (ImageRef((folder / "images/clip/0.jpg").resolve()),)


def test_a_kind_that_does_not_fit(folder: Path) -> None:
    (folder / "d.jsonl").write_text(as_lines(LLAVA))
    with pytest.raises(UserError, match="none of messages"):
        opened(folder / "d.jsonl", kind="messages")


def test_folders_without_records_or_of_several_kinds(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no \.json"):
        opened(folder / "empty")
    (folder / "d.jsonl").write_text(as_lines(LLAVA))
    (folder / "d.txt").write_text("text")
    with pytest.raises(UserError, match="several kinds"):
        opened(folder)


def test_which_sources_are_tars(folder: Path) -> None:
    (folder / "tars").mkdir()
    (folder / "tars" / "0.tar").write_bytes(b"")
    places = ["s3://bucket/data", str(folder / "tars"), "x.tar", "blend.yaml"]
    assert all(is_tars(DatasetConfig(path=path)) for path in places)
    assert not is_tars(DatasetConfig(path=str(folder)))
    assert is_tars(DatasetConfig(path=str(folder), kind="webdataset"))
    assert not is_tars(DatasetConfig(path="s3://bucket/d.jsonl"))
    assert not is_tars(DatasetConfig(path="s3://bucket/shards", kind="llava"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.json"])
def test_a_fifo_among_the_files_is_not_waited_for(folder: Path, name: str) -> None:
    empty = folder / "empty"
    empty.mkdir()
    os.mkfifo(empty / name)
    with pytest.raises(UserError, match="no regular file"):
        open_records(DatasetConfig(str(empty)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAVLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(transfer, "_FIRST_PAUSE", 0.001)


@pytest.mark.parametrize("image_root", ["images", None])
def test_records_and_images_of_a_store_are_those_of_the_disk(tmp_path: Path, image_root: str | None) -> None:
    path = write_llava(tmp_path / "data", samples=6)
    if image_root is None:  # by default beside the records
        path = path.rename(path.parent / "images" / path.name)
    root = {} if image_root is None else {"image_root": f"file://{path.parent}/{image_root}"}
    here, there = (
        open_records(DatasetConfig(path=f"{start}{path}", **{name: start + value[7:] for name, value in root.items()}))
        for start in ("", "file://")
    )
    assert len(here) == len(there) == 6
    images = 0
    for index in range(6):
        one, other = here.read(index), there.read(index)
        assert [turn.role for turn in one.turns] == [turn.role for turn in other.turns]
        for mine, theirs in zip(one.images, other.images, strict=True):
            images += 1
            assert isinstance(theirs.source, StoredFile)
            assert size_of(theirs.source) == size_of(mine.source)
            assert np.array_equal(decode(theirs.source), decode(mine.source))
    assert images > 3
    identity = [_of_dataset(DatasetConfig(path=f"{start}{path}"), weight=None) for start in ("", "file://")]
    assert identity[0] == identity[1]  # a run may go on where the data were moved to a store


@pytest.mark.parametrize("name", ["../a.jpg", "/etc/passwd", "a/../../b.jpg", "a//b.jpg", "a\0.jpg", "..", ""])
def test_images_of_a_store_lie_below_their_folder(name: str) -> None:
    assert reason_of(stored_below, "s3://bucket/images", name) is Reason.OUTSIDE


def test_a_missing_image_is_a_bad_sample_and_a_store_that_fails_is_asked_again(tmp_path, monkeypatch):
    assert reason_of(decode, StoredFile(f"file://{tmp_path}", "no.jpg")) is Reason.MISSING
    (tmp_path / "a").write_bytes(b"content")
    calls, read = [], Store.read

    def failing(self: Store, *args: Any, **kwargs: Any) -> bytes:
        calls.append(args)
        if len(calls) < 9:
            raise StoreError("503")
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Store, "read", failing)
    monkeypatch.setattr(transfer, "_LONGEST_PAUSE", 0.002)
    assert StoredFile(f"file://{tmp_path}", "a").read(at_most=10) == b"content"
    with pytest.raises(UserError, match="image_root"):
        open_records(DatasetConfig(path=str(write_llava(tmp_path / "d", samples=2)), image_root="s3://user:pw@b/x"))


@pytest.mark.parametrize(
    ("name", "profile", "whole"), [("a.jpg", 0, False), ("long.jpg", 70_000, True), ("a.png", 0, True)]
)
def test_the_size_of_a_large_photo_costs_its_beginning(name, profile, whole, tmp_path, monkeypatch):
    """Unless its header is longer than what is fetched, or its format may have the orientation at the end."""
    path = tmp_path / name
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(pixels).save(path, quality=95, exif=turned, icc_profile=b"x" * profile or None)
    length = path.stat().st_size
    assert length > 2**17
    fetched: list[int] = []
    for method in ("read", "head"):
        original = getattr(Store, method)

        def counted(self: Store, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            content = original(self, *args, **kwargs)
            fetched.append(len(content[0] if isinstance(content, tuple) else content))
            return content

        monkeypatch.setattr(Store, method, counted)
    stored = StoredFile(f"file://{tmp_path}", name)
    assert size_of(stored) == size_of(path) == decode(path).shape[:2]
    assert size_of(stored) == size_of(path)  # each epoch asks
    assert sum(fetched) == 2**16 + (length if whole else 0)
    decode_module._stored_size.cache_clear()
    if path.suffix == ".jpg":  # a PNG's size stands in its first bytes
        path.write_bytes(path.read_bytes()[:100] + b"\0" * 2**17)
        with pytest.raises(BadSample):
            size_of(stored)
