"""`megavlm prepare`: what goes in comes out of the tars, whole, in order, and the same each time."""

from __future__ import annotations

import json
import wave
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megavlm.config.schema import DatasetConfig
from megavlm.data.records import open_records, writing
from megavlm.data.types import Conversation, ImageRef, SoundRef, VideoRef
from megavlm.paths import FileRange
from megavlm.programs import channels
from megavlm.programs.prepare import main


def picture(colour: int, file_format: str = "PNG") -> bytes:
    file = BytesIO()
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(file, file_format)
    return file.getvalue()


def llava(number: int, *images: str) -> dict[str, Any]:
    human = {"from": "human", "value": "<image>\n" * len(images) + f"Frage {number}: größer?"}
    return {"image": list(images), "conversations": [human, {"from": "gpt", "value": f"answer {number}"}]}


RECORDS = [
    llava(0, "a.png"),
    llava(1),
    llava(2, "a.png", "b.jpg"),
    llava(3, "missing.png"),
    {"conversations": []},
    llava(5, "text.png"),
    llava(6, "../secret.png"),
    *(llava(number, "b.jpg") for number in range(7, 40)),
]
GOOD = [0, 1, 2, *range(7, 40)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(picture(1))
    (tmp_path / "images" / "b.jpg").write_bytes(picture(2, "JPEG"))
    (tmp_path / "images" / "text.png").write_bytes(b"no image")
    (tmp_path / "secret.png").write_bytes(picture(3))
    path = tmp_path / "train.json"
    path.write_text(json.dumps(RECORDS))
    return path


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mebibytes of a few kilobytes, so that few records make several shards."""
    real = writing.write_shards
    monkeypatch.setattr(writing, "write_shards", lambda *a, shard_bytes, **k: real(*a, shard_bytes=2**14, **k))


def prepare(source: Path, out: Path, *options: str) -> int:
    return main([f"{source},image_root={source.parent / 'images'}", str(out), *options])


def inlined(conversation: Conversation) -> list[Any]:
    """Turns with the bytes of their images and videos."""
    return [(turn.role, content(part)) for turn in conversation.turns for part in turn.parts]


def content(part: Any) -> Any:
    match part:
        case ImageRef() | SoundRef():
            return content(part.source)
        case VideoRef():
            return [content(each) for each in part.source] if isinstance(part.source, tuple) else content(
                part.source
            ), part.fps
        case Path():
            return part.read_bytes()
        case FileRange():
            with part.open() as file:
                return file.read()
    return part


def read_back(out: Path, count: int) -> list[Any]:
    records = open_records(DatasetConfig(path=str(out)))
    assert len(records) == count
    return [inlined(records.read(number)) for number in range(count)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_goes_in_comes_out(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert prepare(source, out) == 0
    told = capsys.readouterr().out
    assert "36 samples in" in told
    assert "4 records skipped" in told
    records = open_records(DatasetConfig(path=str(source), image_root=str(tmp_path / "images")))
    assert read_back(out, 36) == [inlined(records.read(index)) for index in GOOD]
    assert len(list(out.glob("*.tar"))) > 3
    skipped = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    assert [(line["record"], line["reason"]) for line in skipped] == [
        ("train.json[3]", "missing_file"),
        ("train.json[4]", "empty_conversation"),
        ("train.json[5]", "not_an_image"),
        ("train.json[6]", "path_outside_root"),
    ]


def test_the_bytes_are_the_same_each_time_and_after_a_stop(source, tmp_path, monkeypatch):
    assert prepare(source, tmp_path / "one") == 0
    assert prepare(source, tmp_path / "two") == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")

    add, calls = writing._Shard.add, iter(range(25))

    def stopping(self: Any, *args: Any) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        add(self, *args)

    monkeypatch.setattr(writing._Shard, "add", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "three")
    assert len(list((tmp_path / "three").glob("*.tar"))) > 1
    monkeypatch.setattr(writing._Shard, "add", add)
    assert prepare(source, tmp_path / "three") == 0
    assert files(tmp_path / "three") == files(tmp_path / "one")
    before = files(tmp_path / "three")
    assert prepare(source, tmp_path / "three") == 0  # nothing left to do
    assert files(tmp_path / "three") == before


def test_shuffled(source: Path, tmp_path: Path) -> None:
    assert prepare(source, tmp_path / "plain") == 0
    assert prepare(source, tmp_path / "shuffled", "--shuffle", "1") == 0
    plain, shuffled = read_back(tmp_path / "plain", 36), read_back(tmp_path / "shuffled", 36)
    assert plain != shuffled
    assert sorted(map(str, plain)) == sorted(map(str, shuffled))


def test_mistakes_are_one_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"conversations": [{"from": "human", "value": "x"}]}\n')
    assert prepare(source, tmp_path / "out") == 0
    capsys.readouterr()
    for arguments, message in [
        ((source, tmp_path / "full"), "holds something else already"),
        ((source, tmp_path / "out", "--shuffle", "1"), "holds something else already"),
        ((source, tmp_path / "new", "--shard-mib", "0"), "--shard-mib: 0 must"),
        ((tmp_path / "out", tmp_path / "new"), "contains tars"),
        ((tmp_path / "nowhere", tmp_path / "new"), "is not a file"),
        ((tmp_path / "bad.jsonl", tmp_path / "new"), "none of 1 records can be used: 1 × empty_conversation, as bad."),
    ]:
        assert prepare(*arguments) == 2
        told = capsys.readouterr().err
        assert message in told
        assert len(told.splitlines()) == 1


def test_videos_and_sounds_come_out_as_they_went_in(tmp_path: Path) -> None:
    """A clip at a rate of its own, a folder of frames, both beside an image, sounds between them, and no clips."""
    pytest.importorskip("av", reason="pip install av (the extra `video`)")
    from tests.support.clips import clip

    media = tmp_path / "images"
    (media / "frames").mkdir(parents=True)
    for number in (0, 1, 10):
        (media / f"frames/{number}.jpg").write_bytes(picture(number, "JPEG"))
    (media / "a.png").write_bytes(picture(1))
    (media / "it.mkv").write_bytes(clip(4, kind="mkv"))
    (media / "bad.mp4").write_bytes(b"no clip")
    for name in ("a.wav", "b.wav"):
        with wave.open(str(media / name), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(name.encode() * 8000)
    fields: list[dict[str, Any]] = [
        {"video": "it.mkv", "fps": 0.5},
        {"video": "frames"},
        {"image": "a.png", "video": ["frames", "it.mkv"], "fps": 3},
        {"audio": ["a.wav", "b.wav"], "image": "a.png"},
        {"audio": "a.wav", "video": "it.mkv"},
        {"video": "bad.mp4"},
        {"audio": "bad.mp4"},
    ]
    tags = ("<video>", "<image>", "<video>so<image><video>", "<audio>so<image><audio>", "<audio><video>")
    tags += ("<video>", "<audio>")
    said = [[{"from": "human", "value": f"{tag}?"}, {"from": "gpt", "value": "yes"}] for tag in tags]
    records = [{**each, "conversations": turns} for each, turns in zip(fields, said, strict=True)]
    (tmp_path / "train.json").write_text(json.dumps(records))
    assert prepare(tmp_path / "train.json", tmp_path / "out") == 0
    given = open_records(DatasetConfig(path=str(tmp_path / "train.json"), image_root=str(media)))
    assert read_back(tmp_path / "out", 5) == [inlined(given.read(index)) for index in range(5)]
    skipped = (tmp_path / "out/skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in skipped] == ["not_a_video", "corrupt"]


def array_files(folder: Path) -> dict[str, Path]:
    """Images of five channels in every kind of file, one of three, and a damaged one."""
    tifffile = pytest.importorskip("tifffile", reason="pip install 'megavlm[arrays]'")
    five = np.random.default_rng(0).normal(1000, 9, (6, 8, 5)).astype(np.float32)
    names = ("a.npy", "b.npz", "c.tif", "three.npy", "damaged.npy")
    files = {name: folder / name for name in names}
    np.save(files["a.npy"], five)
    np.savez(files["b.npz"], image=five + 1, mask=np.zeros(3))
    tifffile.imwrite(files["c.tif"], five + 2, photometric="minisblack", planarconfig="contig")
    np.save(files["three.npy"], five[..., :3])
    files["damaged.npy"].write_bytes(b"\x93NUMPY" + bytes(20))
    return files


def test_arrays_are_written_as_they_are_and_read_like_loose_files(source: Path, capsys: Any) -> None:
    """A sample's images come in the order of its record, whatever their formats; others are left out."""
    images, out = source.parent / "images", source.parent / "out"
    files = array_files(images)
    records = [llava(0, "a.npy"), llava(1, "c.tif", "b.npz", "a.npy"), llava(2, "three.npy"), llava(3, "damaged.npy")]
    source.write_text(json.dumps(records))
    assert prepare(source, out, "--vision-input", "array", "--vision-in-channels", "5") == 0
    assert "2 samples in 1 tar, 2 records skipped" in capsys.readouterr().out
    loose = open_records(DatasetConfig(path=str(source), image_root=str(images)))
    found = open_records(DatasetConfig(path=str(out)))
    assert [inlined(found.read(number)) for number in range(2)] == [inlined(loose.read(number)) for number in range(2)]
    assert [part.source for part in found.read(1).images] == [
        files[name].read_bytes() for name in ("c.tif", "b.npz", "a.npy")
    ]

    tarred, apart = source.parent / "tarred.json", source.parent / "apart.json"
    source.write_text(json.dumps(records[:2]))
    assert channels.main([str(out), "--out", str(tarred)]) == 0
    assert channels.main([f"{source},image_root={images}", "--out", str(apart)]) == 0
    assert tarred.read_text() == apart.read_text()
    assert len(json.loads(tarred.read_text())["mean"]) == 5


def test_without_the_option_arrays_are_left_out(source: Path, capsys: Any) -> None:
    array_files(source.parent / "images")
    source.write_text(json.dumps([llava(0, "a.png"), llava(1, "a.npy"), llava(2, "b.npz")]))
    assert prepare(source, source.parent / "out") == 0
    assert "2 not_an_image" in capsys.readouterr().out
