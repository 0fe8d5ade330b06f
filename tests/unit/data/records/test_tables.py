"""Rows of parquet and Arrow files by number, and folders as `save_to_disk` of Hugging Face `datasets` writes them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megavlm.config.schema import DatasetConfig
from megavlm.data.records import open_records, tables
from megavlm.data.records.tables import TableFile
from megavlm.data.types import Conversation, ImageRef, Turn
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason

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
