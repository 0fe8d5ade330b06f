"""Items of a file are verified while they are read, each by its own part of the file's checksum."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megavlm.checkpoint.manifest import BLOCK, Damaged, FileSum, FoldedSum, SummingFile, VerifiedItems

ITEMS = [bytes([number]) * length for number, length in enumerate((1, BLOCK - 1, 2 * BLOCK + 5, BLOCK))]
STARTS = [sum(map(len, ITEMS[:number])) for number in range(len(ITEMS))]


@pytest.fixture
def total(tmp_path: Path) -> FileSum:
    with (tmp_path / "a.distcp").open("wb") as file:
        stream = SummingFile(file)
        for item in ITEMS:
            stream.write(item)
            stream.end_item()
    return stream.sum


def read(folder: Path, items: VerifiedItems, number: int) -> bytes:
    into = bytearray(len(ITEMS[number]))
    with (folder / "a.distcp").open("rb") as file:
        items.read(file, "a.distcp", STARTS[number], memoryview(into))
        items.verify(file, "a.distcp", STARTS[number], len(into))
    return bytes(into)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_each_item_is_read_and_verified_by_itself(tmp_path: Path, total: FileSum) -> None:
    items = VerifiedItems({"a.distcp": total})
    assert [read(tmp_path, items, number) for number in range(len(ITEMS))] == ITEMS
    flip(tmp_path / "a.distcp", STARTS[2] + BLOCK)
    with pytest.raises(Damaged, match=r"a\.distcp is damaged: the sum of bytes"):
        read(tmp_path, items, 2)
    assert [read(tmp_path, items, number) for number in (0, 1, 3)] == [ITEMS[0], ITEMS[1], ITEMS[3]]


@pytest.mark.parametrize(("start", "length"), [(0, 2), (1, 1), (5, 5)])
def test_what_is_no_item_is_refused(tmp_path: Path, total: FileSum, start: int, length: int) -> None:
    """As where the descriptions of tensors belong to other files."""
    with (tmp_path / "a.distcp").open("rb") as file, pytest.raises(Damaged, match="no item of it"):
        VerifiedItems({"a.distcp": total}).verify(file, "a.distcp", start, length)


def test_a_file_that_ends_too_early_is_damaged(tmp_path: Path, total: FileSum) -> None:
    with (tmp_path / "a.distcp").open("r+b") as file:
        file.truncate(total.bytes - 3)
    with pytest.raises(Damaged, match="3 bytes too early"):
        read(tmp_path, VerifiedItems({"a.distcp": total}), 3)


def test_a_file_without_sums_of_items_is_refused(tmp_path: Path, total: FileSum) -> None:
    items = VerifiedItems({"a.distcp": FileSum(total.bytes, total.crc32)})
    with pytest.raises(Damaged, match=r"no sums of what is in a\.distcp"):
        read(tmp_path, items, 0)


def folded(data: bytes, *, pieces: int = BLOCK) -> int:
    total = FoldedSum()
    for at in range(0, len(data), pieces):
        total.update(memoryview(data)[at : at + pieces])
    return total.value


RANDOM = random.Random(1).randbytes(2 * BLOCK + 12_345)


@pytest.mark.parametrize("pieces", [7, 4096, BLOCK - 1, BLOCK + 1, len(RANDOM)])
def test_the_sum_does_not_depend_on_the_pieces(pieces: int) -> None:
    assert folded(RANDOM, pieces=pieces) == folded(RANDOM)


def zeroed(data: bytearray) -> None:
    data[8192:12288] = bytes(4096)


def swapped(data: bytearray) -> None:
    data[4096:8192], data[12288:16384] = data[12288:16384], data[4096:8192]


def shifted(data: bytearray) -> None:
    data[:] = data[1:] + data[:1]


def one_bit_of_every_line(data: bytearray) -> None:
    """As a broken cell of memory does it."""
    for at in range(13, len(data), 64):
        data[at] |= 0x80


def of_another_block(data: bytearray) -> None:
    data[:BLOCK] = data[BLOCK : 2 * BLOCK]


def exchanged_blocks(data: bytearray) -> None:
    data[:] = data[BLOCK : 2 * BLOCK] + data[:BLOCK] + data[2 * BLOCK :]


@pytest.mark.parametrize(
    "damage", [zeroed, swapped, shifted, one_bit_of_every_line, of_another_block, exchanged_blocks]
)
def test_the_sum_finds_what_storage_does_to_bytes(damage: Callable[[bytearray], None]) -> None:
    data = bytearray(RANDOM)
    damage(data)
    assert folded(bytes(data)) != folded(RANDOM)


def test_the_sum_finds_each_flipped_bit() -> None:
    for place in random.Random(2).sample(range(8 * len(RANDOM)), 200):
        data = bytearray(RANDOM)
        data[place // 8] ^= 1 << place % 8
        assert folded(bytes(data)) != folded(RANDOM), place
