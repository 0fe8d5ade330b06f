"""Records by number: lines, arrays and rows, whatever lies between them."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.records import arrays, parquet, parquet_decoder, spans
from megavlm.data.records.arrays import NotAnArray, array_spans
from megavlm.data.records.container import Container, Joined
from megavlm.data.records.parquet import ParquetFile
from megavlm.data.records.spans import BOM, RecordSpans, SpanFile, line_spans
from megavlm.inputs.bad_sample import BadSample, Reason


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
def test_arrays_and_lines_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], ascii: bool, indent: int | None
) -> None:
    folder = tmp_path_factory.mktemp("json")
    text = json.dumps(records, ensure_ascii=ascii, indent=indent)
    assert all_of(array_of(written(folder / "a.json", text.encode()))) == records
    lines = "\n".join(json.dumps(record, ensure_ascii=ascii) for record in records)
    assert all_of(lines_of(written(folder / "l.jsonl", lines.encode()))) == records


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_arrays_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    records = [{"text": 'comma, ] } \\" é 図'}, 123456, -1.5e3, [[], {}], "", None, {"a": {"b": ["]"]}}]
    monkeypatch.setattr(arrays, "_CHUNK", chunk)
    path = written(tmp_path / "a.json", BOM + json.dumps(records, ensure_ascii=False, indent=2).encode() + b" \n")
    assert all_of(array_of(path)) == records


def test_an_empty_array(tmp_path: Path) -> None:
    assert len(array_of(written(tmp_path / "a.json", b" [ ] "))) == 0


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
    monkeypatch.setattr(spans, "_CHUNK", 4)
    path = written(tmp_path / "l", BOM + b'1\r\n\n\r\n22\n"\n"\r\n3\r')
    monkeypatch.setattr(np, "memmap", None)
    container = lines_of(path)
    assert [path.read_bytes()[a:b] for a, b in zip(*bounds(container), strict=True)] == [b"1", b"22", b'"', b'"', b"3"]
    quoted = line_spans(path, quoted=True)
    assert [path.read_bytes()[a:b] for a, b in zip(quoted.starts, quoted.ends, strict=True)][2] == b'"\n"'


def bounds(container: SpanFile) -> tuple[Any, Any]:
    return container._spans.starts, container._spans.ends


def test_empty_lines_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_CHUNK", 2**16)
    path = written(tmp_path / "l", b"\n" * 2**22 + b"1\n")
    tracemalloc.start()
    container = lines_of(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (container.read(0), container.label(0)) == (1, f"l:{2**22 + 1}")
    assert peak < 2**23


def test_a_line_beyond_all_size_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "l", b'{"a": 1}\n')
    os.truncate(path, 2**40)
    ends = np.array([8, 2**40], np.int64)
    container = SpanFile(path, RecordSpans(np.array([0, 9], np.int64), ends), content="lines")
    assert container.read(0) == {"a": 1}
    with pytest.raises(BadSample, match=r"it has \d+ bytes, more than"):
        container.read(1)


def test_spans_can_be_pickled_after_reading(tmp_path: Path) -> None:
    container = lines_of(written(tmp_path / "l", b"1\n2\n"))
    assert container.read(1) == 2
    assert all_of(pickle.loads(pickle.dumps(container))) == [1, 2]


def table_of(count: int) -> pa.Table:
    return pa.table(
        {
            "text": [f"row {number}" for number in range(count)],
            "images": [[{"bytes": bytes([number % 256]), "path": None}] for number in range(count)],
            "unused": ["x" * 100] * count,
        }
    )


def test_rows_of_a_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_CACHE", 1)
    pq.write_table(table_of(10), tmp_path / "t.parquet", row_group_size=3)
    container = ParquetFile(tmp_path / "t.parquet", lambda names: names[:2])
    assert len(container) == 10
    assert container.names == ["text", "images", "unused"]
    expected = [{"text": f"row {n}", "images": [{"bytes": bytes([n]), "path": None}]} for n in range(10)]
    assert all_of(container) == expected
    assert [container.read(index) for index in (9, 0, 4, 9)] == [expected[index] for index in (9, 0, 4, 9)]
    assert all_of(pickle.loads(pickle.dumps(container))) == expected
    assert container.label(4) == "t.parquet[4]"


def test_row_groups_are_kept_for_a_while(tmp_path: Path) -> None:
    pq.write_table(table_of(10), tmp_path / "t.parquet", row_group_size=5)
    groups = parquet._Groups(tmp_path / "t.parquet", ["text"])
    first = groups.get(0)
    groups.get(1)
    assert groups.get(0) is first


def test_a_damaged_row_group_costs_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(table_of(1000), path, row_group_size=500, compression="zstd", use_dictionary=False)
    metadata = pq.read_metadata(path)
    start = metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 60] = b"\xff" * 60
    path.write_bytes(data)
    container = ParquetFile(path, list)
    assert container.read(0)["text"] == "row 0"
    with pytest.raises(BadSample) as caught:
        container.read(700)
    assert caught.value.reason == Reason.NOT_A_RECORD


def test_files_one_after_the_other(tmp_path: Path) -> None:
    parts = [lines_of(written(tmp_path / name, data)) for name, data in [("a", b"1\n2"), ("b", b"3"), ("c", b"4\n5")]]
    joined = Joined(parts)
    assert all_of(joined) == [1, 2, 3, 4, 5]
    assert [joined.label(index) for index in range(5)] == ["a:1", "a:2", "b:1", "c:1", "c:2"]


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give decoding 64 MiB, and its result 16."""
    monkeypatch.setattr(parquet_decoder, "MEMORY", 2**26)
    monkeypatch.setattr(parquet_decoder, "DECODED", 2**24)
    monkeypatch.setattr(parquet_decoder, "_DECODER", parquet_decoder._Decoder())


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("rows", [10_000, 10])
def test_a_row_group_that_grows_beyond_all_size_is_not_decoded(tmp_path: Path, rows: int) -> None:
    """Many rows of one long text are a few hundred bytes in the file: the result is too large, or a single batch."""
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": ["x" * (10**8 // rows)] * rows}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    with pytest.raises(BadSample, match=r"row group 0 cannot be read: it (is too large|needs too much memory)"):
        ParquetFile(path, list).read(0)
    container = ParquetFile(path, list)
    for _ in range(2):  # the second time without decoding it
        with pytest.raises(BadSample, match="row group 0 cannot be read"):
            container.read(1)
        container._columns = ["none"]
    pq.write_table(table_of(10), path)  # what comes after is read
    assert ParquetFile(path, list).read(9)["text"] == "row 9"


@pytest.mark.parametrize(
    "values",
    [["x"] * 2**21, [{"role": None}] * 2**20, [[None] * 2**11] * 2**10, [[]] * 2**21],
    ids=["texts", "structs", "lists", "empty lists"],
)
def test_a_row_of_millions_of_values_is_no_record(tmp_path: Path, values: list[Any]) -> None:
    pq.write_table(pa.table({"messages": [values]}), tmp_path / "row.parquet")
    with pytest.raises(BadSample, match="values, more than"):
        ParquetFile(tmp_path / "row.parquet", list).read(0)


def test_a_table_of_more_rows_than_its_bytes_is_refused(tmp_path: Path) -> None:
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(tmp_path / "nulls.parquet", schema, compression="zstd") as writer:
        for _ in range(4):
            writer.write_batch(pa.RecordBatch.from_arrays([pa.nulls(2**20, pa.string())], schema=schema), 2**20)
    with pytest.raises(ValueError, match="too many for its size"):
        ParquetFile(tmp_path / "nulls.parquet", list)
