"""No pickle of a checkpoint is read, what its JSON says stays in its folder, and saves ask little of a file system."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megavlm.checkpoint import folders, writer
from megavlm.checkpoint.hf.checkpoint_reader import CheckpointReader
from megavlm.checkpoint.items import ITEMS, STATE, OpenFiles, Record, read_items, read_state, state_as_json
from megavlm.checkpoint.manifest import BLOCK, Damaged, FileSum
from megavlm.checkpoint.reading import VerifyingReader
from megavlm.checkpoint.staging import SaveError, Written, without_record_sums
from megavlm.checkpoint.summary import check_model
from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.rules.defaults import resolve
from tests.support.manifests import folded, save_tensors

VALUES = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(2).bfloat16(),
    "empty": torch.zeros(0, 3),
    "bytes": torch.arange(9, dtype=torch.uint8),
}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint as a run does."""
    found = {name: torch.full_like(value, 7) for name, value in VALUES.items()}
    dcp.load(found, storage_reader=VerifyingReader(folder), no_dist=True)
    return found


@pytest.mark.parametrize("summed", [True, False], ids=["sums of records", "no sums"])
def test_what_is_saved_is_read_without_its_pickles(tmp_path: Path, summed: bool) -> None:
    if summed:
        save_tensors(tmp_path, VALUES)
    else:
        with without_record_sums():
            save_tensors(tmp_path, VALUES)
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    found, reader = loaded(tmp_path), CheckpointReader(tmp_path)
    for name, value in VALUES.items():
        assert torch.equal(found[name], value)
        assert torch.equal(reader.read(name, 0, len(value)), value)
    assert torch.equal(reader.read("weight", 1, 2), VALUES["weight"][1:])


def test_files_stay_open_up_to_a_number_of_them(tmp_path: Path) -> None:
    files = OpenFiles(at_most=2)
    for name in "abc":
        (tmp_path / name).write_text(name)
    one, two, three = [files.of(tmp_path / name) for name in "aac"]
    assert one is two
    assert not three.closed
    assert files.of(tmp_path / "b").read() == b"b"
    assert one.closed
    assert three.closed
    files.close()


def piece(at: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change an element of the only piece of a tensor: its offsets, sizes, file, first byte, length or sum."""
    return lambda items: items["weight"]["pieces"][0].__setitem__(at, value)


def shape(size: list[int]) -> Callable[[dict[str, Any]], None]:
    def change(items: dict[str, Any]) -> None:
        items["weight"]["size"] = size
        items["weight"]["pieces"][0][:2] = [0] * len(size), size

    return change


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "longer": piece(4, 10**6),
    "before the file": piece(3, -4),
    "shifted": piece(0, [1, 0]),
    "larger": lambda items: items["weight"].update(size=[2**40, 3]),
    "larger in all": shape([2**40, 3]),
    "too many dimensions": shape([1] * 17),
    "negative": shape([2, -1]),
    "beyond 64 bits": shape([2**62]),
    "no whole number": piece(3, 0.0),
    "truth": piece(3, False),
    "no sum": lambda items: items["weight"]["pieces"][0].pop(),
    "absolute": piece(2, "/etc/passwd"),
    "above": piece(2, "../outside"),
    "link": piece(2, "link"),
    "fifo": piece(2, "fifo"),
    "missing": piece(2, "missing"),
    "no name": piece(2, ""),
    "long name": piece(2, "x" * 5000),
    "not text": piece(2, ["a"]),
    "other type": lambda items: items["weight"].update(type="load"),
    "no type": lambda items: items["weight"].pop("type"),
    "no object": lambda items: items.update(weight=[1]),
    "no pieces": lambda items: items["weight"].update(pieces=[]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_descriptions_stay_within_the_folder_and_its_files(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    (tmp_path / "outside").write_bytes(b"x" * 2**20)
    folder = tmp_path / "checkpoint"
    save_tensors(folder, VALUES)
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(tmp_path / "outside")
    items = json.loads((folder / ITEMS).read_text())
    change(items)
    (folder / ITEMS).write_text(json.dumps(items))
    with pytest.raises(UserError, match=r"^\S+items\.json is damaged .*use another checkpoint$"):
        read_items(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 10**5, b"\xff", b'{"a": 1}', b'{"a": ' + b"9" * 5000 + b"}"])
def test_any_other_json_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ITEMS).write_bytes(content)
    with pytest.raises(UserError, match=r"^\S+items\.json [^\n]*$"):
        read_items(tmp_path)


@pytest.mark.parametrize("damage", ["another type", "another size", "no archive", "compressed"])
def test_values_are_where_they_are_described(tmp_path: Path, damage: str) -> None:
    save_tensors(tmp_path, {"weight": VALUES["weight"]})
    items = json.loads((tmp_path / ITEMS).read_text())
    [(offsets, _, file, start, length, total)] = items["weight"]["pieces"]
    content = bytearray((tmp_path / file).read_bytes())
    if damage == "another type":
        items["weight"]["type"] = "float64"
    elif damage == "another size":
        items["weight"].update(size=[2, 2], pieces=[[offsets, [2, 2], file, start, length, total]])
    elif damage == "no archive":
        content[start : start + length] = bytes(length)
    else:
        entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data/0"))  # of the list at the end
        content[entry + 10] = 8
    (tmp_path / ITEMS).write_text(json.dumps(items))
    (tmp_path / file).write_bytes(content)
    reader = CheckpointReader(tmp_path)
    with pytest.raises(UserError, match=r"^\S+ is damaged \([^\n]*\): use another checkpoint$"):
        reader.read("weight", 0, 2)


def test_each_record_is_read_and_verified_by_itself(tmp_path: Path) -> None:
    """Also where it ends within a block, and where the file does too early."""
    parts = [bytes([number]) * length for number, length in enumerate((1, BLOCK - 1, 2 * BLOCK + 5, BLOCK))]
    starts = [sum(map(len, parts[:number])) for number in range(len(parts))]
    file = tmp_path / "a.distcp"
    file.write_bytes(b"".join(parts))
    records = [
        Record(file, start, len(part), folded(part), (0,), (len(part),), torch.uint8)
        for part, start in zip(parts, starts, strict=True)
    ]

    def read(record: Record) -> bytes:
        into = bytearray(record.length)
        record.read(memoryview(into))
        record.read()
        return bytes(into)

    assert list(map(read, records)) == parts
    content = bytearray(file.read_bytes())
    content[starts[2] + BLOCK] ^= 1
    file.write_bytes(content[:-3])
    for record, problem in ((records[2], "the sum of bytes"), (records[3], "it ends too early")):
        with pytest.raises(Damaged, match=rf"a\.distcp is damaged: {problem}"):
            read(record)
    assert [read(each) for each in records[:2]] == parts[:2]


def test_the_state_of_all_ranks_comes_back_exactly(tmp_path: Path) -> None:
    state = {
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": [0.9, 0.95], "max": math.inf}]},
        "scale": torch.tensor([2.0**16], dtype=torch.float32),
        "step": torch.tensor(3),
        "position": {"iteration": 2**60, "none": None, "text": "ä", "yes": True},
    }
    (tmp_path / STATE).write_bytes(state_as_json(state))
    found = read_state(tmp_path)
    for name in ("scale", "step"):
        tensor = found.pop(name)
        assert tensor.dtype == state[name].dtype  # type: ignore[union-attr]
        assert torch.equal(tensor, state.pop(name))  # type: ignore[arg-type]
    assert found == state


@pytest.mark.parametrize(
    "content",
    [
        "7",
        "[]",
        '{"a": {"tensor": 1, "dtype": "load"}}',
        '{"a": {"tensor": "x", "dtype": "float32"}}',
        '{"a": {"tensor": [[1], 2], "dtype": "float32"}}',
    ],
)
def test_a_state_of_any_other_kind_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / STATE).write_text(content)
    with pytest.raises(UserError, match=r"^\S+state\.json [^\n]*$"):
        read_state(tmp_path)


RANKS = 1024
COUNTED = ("listdir", "scandir", "stat", "lstat", "fsync", "open")


def waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports_at: Callable[[int], float]) -> Any:
    """Wait for ranks that report when a fake clock says so, commit, and return the calls of each kind and the seconds.

    Each rank has two files of tensors. A rank that reports at infinity writes nothing, ever.
    """
    folder, reports = tmp_path / "tmp-1", writer.Reports(tmp_path / "reports")
    folder.mkdir()
    sums = {rank: {f"__{rank}_{number}.distcp": FileSum(0, 0) for number in range(2)} for rank in range(RANKS)}
    for name in (name for of_rank in sums.values() for name in of_rank):
        (folder / name).touch()
    now, counts, open_now = [0.0], Counter[str](), list[bool]()
    waiting = sorted((reports_at(rank), rank) for rank in range(RANKS))

    def pass_by(seconds: float) -> None:
        now[0] += seconds
        open_now.append(True)  # what the others do is not counted
        while waiting and waiting[0][0] <= now[0]:
            rank = waiting.pop(0)[1]
            reports.leave(rank, Written([], sums[rank]), None)
        open_now.pop()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += not open_now
            return function(*args, **kwargs)

        return counting

    pass_by(0.0)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: now[0])
        patched.setattr(time, "sleep", pass_by)
        for name in COUNTED:
            patched.setattr(os, name, counted(name))
        written = reports.of_all(RANKS, folder, lambda: None)
        while_waiting, seconds = counts.copy(), now[0]
        all_sums = {name: each for of_rank in written for name, each in of_rank.sums.items()}
        folders.commit(folder, folders.folder_for(tmp_path, 1), all_sums, attempt="a")
    return while_waiting, counts - while_waiting, seconds


def test_a_save_of_many_ranks_takes_few_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing a second, a look at what is silent each 30 s; the commit flushes what it writes, and two folders."""
    waiting, commit, seconds = waited(tmp_path, monkeypatch, lambda rank: 100.0 if rank % 64 == 1 else rank / 100)
    assert seconds <= 102
    assert waiting["listdir"] <= seconds + 5
    assert waiting["stat"] + waiting["lstat"] <= 3 * 2 * 16, "only files of the 16 ranks that are late"
    assert commit["fsync"] <= 3
    assert (waiting + commit).total() <= 0.3 * RANKS, "beside one read of each report"


def test_ranks_that_write_nothing_more_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = {7, 900}
    with pytest.raises(SaveError, match=r"the writers of ranks \[7, 900\] wrote nothing for 120 s"):
        waited(tmp_path, monkeypatch, lambda rank: float("inf") if rank in late else 0.0)


def test_another_vocabulary_does_not_fit(tmp_path: Path) -> None:
    other = json.loads(json.dumps({"model": asdict(parse(["--set", "model.language.vocab_size=99"]).model)}))
    with pytest.raises(UserError, match=r"model\.language\.vocab_size = 99, but this run has 160"):
        check_model(other, resolve(parse([]), vocab_size=160), Path("run"))
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=f"--config {tmp_path}/config.yaml has all"):
        check_model(other, resolve(parse([]), vocab_size=160), tmp_path / "checkpoints/iter_0000005")
