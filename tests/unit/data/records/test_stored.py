"""Records and images that URLs name: as on a disk, within their folder, never skipped for a failure of the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megavlm.config.schema import DatasetConfig
from megavlm.data import decode as decode_module
from megavlm.data.decode import decode, size_of
from megavlm.data.records import open_records
from megavlm.data.records.identity import _of_dataset
from megavlm.data.records.media import stored_below
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.storage import transfer
from megavlm.storage.store import Store, StoreError
from megavlm.storage.transfer import StoredFile
from tests.support.data_files import write_llava
from tests.support.hostile import reason_of


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
