"""Arrow files by row, and folders as `save_to_disk` of Hugging Face `datasets` writes them."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from megavlm.config.schema import DatasetConfig
from megavlm.data.records import open_records
from megavlm.data.records.arrow import ArrowFile
from megavlm.data.types import Conversation, ImageRef, Turn
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
TURNS = pa.list_(pa.struct({"from": pa.string(), "value": pa.string()}))


def spoken(number: int) -> list[dict[str, str]]:
    return [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": f"answer {number}"}]


def rows(count: int) -> Any:
    """Every other image is in the table, the others are files."""
    images = [
        {"bytes": b"%d" % n, "path": None} if n % 2 else {"bytes": None, "path": f"{n}.png"} for n in range(count)
    ]
    turns = [spoken(number) for number in range(count)]
    columns = {"id": pa.array(range(count)), "image": pa.array(images, IMAGE), "conversations": pa.array(turns, TURNS)}
    return pa.table(columns)


def write(path: Path, table: Any, *, batch: int = 3, form: str = "stream", **options: Any) -> Path:
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


@pytest.mark.parametrize("form", ["stream", "file"])
def test_both_formats_and_turns_as_an_object_of_lists(form: str, tmp_path: Path) -> None:
    turns = {name: [turn[name] for turn in spoken(1)] for name in ("from", "value")}
    images = [[{"bytes": b"1", "path": None}]]
    table = pa.table({"images": images, "conversations": [turns]})
    records = open_records(DatasetConfig(str(write(tmp_path / "a.arrow", table, form=form))))
    assert records.read(0) == conversation(tmp_path, 1)


def test_a_damaged_batch_costs_its_rows(saved: Path) -> None:
    path = saved / "data-00000-of-00002.arrow"
    data = path.read_bytes()
    assert b"answer 4" in data
    path.write_bytes(data.replace(b"answer 4", b"answer \xff"))  # in the second of three batches
    container = ArrowFile(path, list)
    assert [reason(container, number) for number in range(7)] == [None] * 3 + [Reason.NOT_A_RECORD] * 3 + [None]


def test_a_file_that_becomes_shorter_ends_no_process(saved: Path) -> None:
    path = saved / "data-00000-of-00002.arrow"
    container = ArrowFile(path, list)
    assert reason(container, 0) is None
    os.truncate(path, 100)
    assert [reason(container, number) for number in range(7)] == [Reason.NOT_A_RECORD] * 7


def reason(container: ArrowFile, number: int) -> Reason | None:
    try:
        container.read(number)
    except BadSample as error:
        return error.reason
    return None


BROKEN = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-300]), "ends inside"),
    "no Arrow": (lambda path: path.write_bytes(b"text" * 99), "no message"),
    "nothing": (lambda path: path.write_bytes(b""), "is empty|which columns"),
    "compressed": (lambda path: write(path, rows(9), compression="zstd"), "compressed"),
    "dictionary": (
        lambda path: write(path, pa.table({"text": pa.array(["a"] * 3).dictionary_encode()})),
        "plain values",
    ),
    "nulls": (lambda path: write(path, pa.table({"text": pa.nulls(2**21)}), batch=2**21), "too many for its size"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_says_why(name: str, saved: Path) -> None:
    make, says = BROKEN[name]
    make(saved / "data-00001-of-00002.arrow")
    with pytest.raises(UserError, match=says):
        open_records(DatasetConfig(str(saved)))


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
