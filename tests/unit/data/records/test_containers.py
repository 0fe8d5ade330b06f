"""Records by number: lines, arrays and rows, whatever lies between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.records import text_files
from megavlm.data.records.containers import Container
from megavlm.data.records.text_files import BOM, NotAnArray, SpanFile, array_spans, line_spans
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
