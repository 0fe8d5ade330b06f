"""When data are the same as those of a checkpoint, and what is said when they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megavlm.command_line.parsing import parse
from megavlm.data.records import data_identity, difference


def identity(*argv: str) -> dict[str, Any]:
    """As a checkpoint holds it."""
    return dict(json.loads(json.dumps(data_identity(parse(argv)))))


def write(path: Path, records: list[str]) -> Path:
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in records))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.jsonl", [f"text {number:05d}" for number in range(5000)])


def test_a_moved_file_is_the_same_data(file: Path, tmp_path: Path) -> None:
    before = identity("--datasets", str(file))
    (tmp_path / "elsewhere").mkdir()
    assert difference(before, identity("--datasets", str(file.rename(tmp_path / "elsewhere/a.jsonl")))) is None


@pytest.mark.parametrize("record", [0, 4999])
def test_other_records_of_the_same_size_are_other_data(file: Path, record: int) -> None:
    before = identity("--datasets", str(file))
    records = [f"text {number:05d}" for number in range(5000)]
    records[record] = "TEXT 12345"
    write(file, records)
    assert "a has other files or other records (a.jsonl)" in str(difference(before, identity("--datasets", str(file))))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--seed", "5"], "--seed 1234, but this run has 5"),
        (["--no-shuffle"], "--shuffle True, but this run has False"),
        (["--no-packing"], "--packing True, but this run has False"),
    ],
)
def test_the_option_that_changed_is_named(file: Path, argv: list[str], named: str) -> None:
    assert difference(identity("--datasets", str(file)), identity("--datasets", str(file), *argv)) == named


def test_the_option_of_computed_samples_that_changed_is_named() -> None:
    assert difference(identity(), identity()) is None
    assert "--images-per-sample [1]" in str(difference(identity(), identity("--images-per-sample", "2", "1")))


def test_other_weights_number_and_files_of_data_sets_are_other_data(file: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b.jsonl", ["x"])
    before = identity("--datasets", str(file), str(other))
    assert "weight null, not 2.0" in str(difference(before, identity("--datasets", f"{file},weight=2", str(other))))
    assert difference(identity("--datasets", f"{file},weight=1"), identity("--datasets", str(file))) is None
    mapped = identity("--datasets", f"{file},columns=text:words", str(other))
    assert "columns null, not {" in str(difference(before, mapped))
    assert "2, not 1" in str(difference(before, identity("--datasets", str(file))))
    assert "name 'a', not 'b'" in str(difference(before, identity("--datasets", str(other), str(file))))


@pytest.mark.parametrize("saved", [{}, {"--datasets": 1}, {"--datasets": None}, {"--seed": [[]]}])
def test_whatever_a_checkpoint_says_is_compared(file: Path, saved: dict[str, Any]) -> None:
    assert (difference(saved, identity("--datasets", str(file))) is None) == (saved == {})
