"""Videos in records: where they may stand, and what may hold them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megavlm.data.records.media import video_below, video_of
from megavlm.data.records.shapes import record_of
from megavlm.data.types import Conversation, ImageRef, VideoRef
from megavlm.inputs.bad_sample import BadSample, Reason
from tests.support.hostile import reason_of

A, B, PICTURE = VideoRef(b"a.mp4"), VideoRef(b"b.mp4"), ImageRef(b"a.jpg")


def find(name: str) -> ImageRef:
    return ImageRef(name.encode())


def find_video(name: str) -> VideoRef:
    return VideoRef(name.encode())


def read(said: Any, **fields: Any) -> Conversation:
    turns = [{"role": "user", "content": said}, {"role": "assistant", "content": "Yes."}]
    return record_of({"messages": turns, **fields}, "messages", find, find_video)


@pytest.mark.parametrize(
    ("said", "fields", "expected"),
    [
        ("<video>\nWhat?", {"video": "a.mp4"}, (A, "\nWhat?")),
        ("<image>\nWhat?", {"video": "a.mp4"}, (A, "\nWhat?")),  # LLaVA-Video
        ("What?", {"videos": ["a.mp4", "b.mp4"]}, (A, "\n", B, "\nWhat?")),
        ("<video> or <image>", {"video": "a.mp4", "image": "a.jpg"}, (A, " or ", PICTURE)),
        ("What?", {"video": "a.mp4", "image": "a.jpg"}, (PICTURE, "\n", A, "\nWhat?")),
        ("a <video> tag", {}, ("a <video> tag",)),
        ([{"type": "video", "video": "a.mp4"}, "What?"], {}, (A, "What?")),
        ([{"type": "video"}, "What?"], {"video": "a.mp4"}, (A, "What?")),
        ([{"type": "video_url", "video_url": {"url": "a.mp4"}, "fps": 3}], {}, (VideoRef(b"a.mp4", 3.0),)),
        ("<video>", {"video": "a.mp4", "fps": 0.5}, (VideoRef(b"a.mp4", 0.5),)),
        ("<video>", {"video": [["1.jpg", "2.jpg"]]}, (VideoRef((ImageRef(b"1.jpg"), ImageRef(b"2.jpg"))),)),
        ("<video>", {"video": {"bytes": b"clip"}}, (VideoRef(b"clip"),)),
    ],
)
def test_where_videos_stand(said: Any, fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert read(said, **fields).turns[0].parts == expected


@pytest.mark.parametrize(
    ("said", "fields", "reason"),
    [
        ("<video> <video>", {"video": "a.mp4"}, Reason.IMAGE_COUNT),
        ("<video> <image>", {"video": ["a.mp4", "b.mp4"]}, Reason.IMAGE_COUNT),
        ("<image>", {"video": "a.mp4", "image": ["a.jpg", "b.jpg"]}, Reason.IMAGE_COUNT),
        ("<video>", {"video": "https://example.org/a.mp4"}, Reason.UNSUPPORTED),
        ("<video>", {"video": 7}, Reason.NOT_A_RECORD),
        ("<video>", {"video": {"start": 3}}, Reason.NOT_A_RECORD),
        ("<video>", {"video": "a.mp4", "fps": "fast"}, Reason.NOT_A_RECORD),
        ("<video>", {"video": "a.mp4", "fps": -1}, Reason.NOT_A_RECORD),
    ],
)
def test_what_is_wrong_with_a_record(said: Any, fields: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(BadSample) as raised:
        read(said, **fields)
    assert raised.value.reason is reason


def test_files_and_folders_of_frames(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"a")
    (tmp_path / "frames").mkdir()
    for name in ("f10.jpg", "f2.jpg", "f1.jpg", "notes.txt"):
        (tmp_path / "frames" / name).write_bytes(b"")
    (tmp_path / "nothing").mkdir()
    look = partial(video_below, tmp_path)
    assert video_of("a.mp4", look).source == tmp_path / "a.mp4"
    frames = video_of("frames", look).source
    assert isinstance(frames, tuple)
    assert [frame.source for frame in frames] == [tmp_path / "frames" / f"f{number}.jpg" for number in (1, 2, 10)]
    (tmp_path / "root/in").mkdir(parents=True)
    (tmp_path / "root/in/1.jpg").symlink_to(tmp_path / "a.mp4")
    (tmp_path / "root/out").symlink_to(tmp_path / "frames")
    for name in ("in", "out", "../frames"):
        assert reason_of(video_of, name, partial(video_below, tmp_path / "root")) is Reason.OUTSIDE
    for name, reason in (("b.mp4", Reason.MISSING), ("nothing", Reason.NO_FRAMES), ("../b", Reason.OUTSIDE)):
        assert reason_of(video_of, name, look) == reason
    assert reason_of(video_of, [["frames"]][0], look) is Reason.NOT_AN_IMAGE
