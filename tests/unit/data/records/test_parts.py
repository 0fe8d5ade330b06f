"""The files of a WebDataset sample become one conversation."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.records.tar_sample import conversation_of_parts
from megavlm.data.types import ImageRef, Turn, VideoRef
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import FileRange
from tests.support.hostile import reason_of

A, B = ImageRef(b"first"), ImageRef(b"second")


def as_json(record: Any) -> bytes:
    return json.dumps(record).encode()


def turns(question: str, **fields: Any) -> bytes:
    spoken = [{"from": "human", "value": question}, {"from": "gpt", "value": "answer"}]
    return as_json({"conversations": spoken, **fields})


@pytest.mark.parametrize(
    "parts",
    [
        {"json": turns("<image><image>?"), "0.jpg": b"first", "1.png": b"second"},
        {"json": turns("<image><image>?"), "10.jpg": b"second", "2.jpg": b"first"},
        {"json": turns("<image><image>?", images=["1.jpg", "0.jpg"]), "0.jpg": b"second", "1.jpg": b"first"},
        {"json": turns("<image><image>?", image=["coco/7.jpg", "coco/8.jpg"]), "0.jpg": b"first", "1.jpg": b"second"},
        {"json": turns("<image><image>?"), "0.npy": b"first", "1.npz": b"second"},
        {"json": turns("<image><image>?"), "0.jpg": b"first", "1.tif": b"second", "0.npy": b"features of it"},
        {"json": turns("<image><image>?", images=["a.npy", "0.png"]), "0.png": b"second", "a.npy": b"first"},
    ],
)
def test_images_are_the_image_files_in_order(parts: dict[str, bytes]) -> None:
    assert conversation_of_parts(parts).turns[0] == Turn("user", (A, B, "?"))


@pytest.mark.parametrize(
    "record",
    [
        {"question": "?", "answer": "answer", "image": "7.jpg"},
        {"query": "<image>\n?", "response": "answer"},
        {"texts": [{"user": "?", "assistant": "answer"}], "caption": "a cat"},
    ],
)
def test_records_of_other_kinds(record: Any) -> None:
    found = conversation_of_parts({"json": as_json(record), "jpg": b"first", "txt": b"a caption"})
    assert found.turns == (Turn("user", (A, "\n?")), Turn("assistant", ("answer",)))


@pytest.mark.parametrize(
    "parts",
    [
        {"jpg": b"first", "txt": b"a cat"},
        {"jpg": b"first", "txt": b"a cat", "json": as_json({"url": "http://example.com", "width": 3})},
        {"jpg": b"first", "json": as_json({"caption": "a cat", "key": "000"})},
        {"jpg": b"first", "json": as_json({"text": "a cat"}), "npy": b"ignored"},
    ],
)
def test_captions(parts: dict[str, bytes]) -> None:
    assert conversation_of_parts(parts).turns == (Turn("text", (A, "a cat")),)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"jpg": b"first"}, Reason.NOT_A_RECORD),
        ({"json": b"\x00\xff", "jpg": b"first"}, Reason.NOT_A_RECORD),
        ({"json": b"[1]", "jpg": b"first"}, Reason.NOT_A_RECORD),
        ({"json": b"[" * 100_000, "jpg": b"first"}, Reason.NOT_A_RECORD),
        ({"txt": b"\xff\xfe", "jpg": b"first"}, Reason.NOT_A_RECORD),
        ({"txt": b"", "jpg": b"first"}, Reason.EMPTY),
        ({"json": turns("<image>?")}, Reason.IMAGE_COUNT),
        ({"json": turns("<image>?"), "0.jpg": b"first", "1.jpg": b"second"}, Reason.IMAGE_COUNT),
        ({"json": turns("<image>?", image="coco/7.jpg")}, Reason.MISSING),
    ],
)
def test_reasons(parts: dict[str, bytes], reason: Reason) -> None:
    assert reason_of(conversation_of_parts, parts) == reason


NAMES = st.sampled_from(["json", "txt", "caption", "jpg", "0.jpg", "10.PNG", "²٣.webp", "cls", "a.b.c", ""])
TEXTS = st.sampled_from(
    ['{"text": "x"}', '{"caption": 3}', '{"text": ["x"]}', "null", '{"conversations": {}}', '{"image": 3}']
)
RECORDS = st.binary(max_size=30) | TEXTS.map(str.encode) | TEXTS.map(lambda text: text.encode("utf-16"))


@settings(deadline=None, max_examples=300)
@given(parts=st.dictionaries(NAMES, RECORDS, max_size=5))
def test_whatever_a_sample_holds_it_stops_nothing(parts: dict[str, bytes]) -> None:
    with suppress(BadSample):
        assert conversation_of_parts(parts).turns


def test_frames_of_a_video_are_none_of_the_images() -> None:
    record = turns("<image><video><video>?", videos=[{"frames": ["1.0.jpg", "1.1.jpg"], "fps": 2}, {"video": "2.mp4"}])
    parts = {"json": record, "0.jpg": b"first", "1.1.jpg": b"b", "1.0.jpg": b"a", "2.mp4": b"clip"}
    frames = VideoRef((ImageRef(b"a"), ImageRef(b"b")), fps=2.0)
    assert conversation_of_parts(parts).turns[0] == Turn("user", (A, frames, VideoRef(b"clip"), "?"))


def test_a_clip_stays_where_it_is() -> None:
    place = FileRange(Path("a.tar"), 512, 40)
    found = conversation_of_parts({"json": turns("<video>?"), "mp4": place})
    assert found.turns[0] == Turn("user", (VideoRef(place), "?"))
    for record in (turns("<image>?", image="mp4"), turns("<video>?", videos=[["mp4"]])):
        assert reason_of(conversation_of_parts, {"json": record, "mp4": place}) is Reason.NOT_AN_IMAGE
