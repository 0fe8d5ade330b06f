"""Every spelling of a conversation that data sets use becomes the same `Conversation`; everything else has a reason."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megavlm.config.schema import DatasetConfig
from megavlm.data.records.media import file_below, video_below, video_of
from megavlm.data.records.shapes import SHAPES, record_of, shape_of
from megavlm.data.types import Conversation, ImageRef, Turn, VideoRef
from megavlm.inputs.bad_sample import BadSample, Reason
from tests.support.hostile import reason_of


def find(name: str) -> ImageRef:
    return ImageRef(name.encode())


A, B = ImageRef(b"a.jpg"), ImageRef(b"b.jpg")
EXPECTED = Conversation((Turn("user", (A, "\nWhat is this?")), Turn("assistant", ("A cat.",))))


def human(text: Any, name: str = "human") -> dict[str, Any]:
    return {"from": name, "value": text}


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def llava(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": 1, "conversations": list(turns), **fields}


QUESTION, ANSWER = human("<image>\nWhat is this?"), human("A cat.", "gpt")
PARTS = [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "\nWhat is this?"}]


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        (llava(QUESTION, ANSWER, image="a.jpg"), "llava"),
        (llava(QUESTION, ANSWER, image=None, images=["a.jpg"]), "llava"),
        (llava(QUESTION, ANSWER, image={"bytes": b"a.jpg", "path": None}), "llava"),
        (llava(said("user", "<image>\nWhat is this?"), said("assistant", "A cat."), image="a.jpg"), "llava"),
        (llava(human("What is this?"), ANSWER, image="a.jpg"), "llava"),  # no tag: images come first
        (llava({"from": "user", "text": "What is this?"}, {"from": "gpt", "text": "A cat."}, image="a.jpg"), "llava"),
        (llava({**QUESTION, "role": None, "content": None}, ANSWER, image="a.jpg"), "llava"),  # columns of other rows
        ({"conversations": json.dumps([QUESTION, ANSWER]), "image": "a.jpg"}, "llava"),
        ({"messages": [said("user", PARTS), said("assistant", "A cat.")]}, "messages"),
        (
            {
                "messages": [
                    said("user", [{"type": "image", "text": None}, {"type": "text", "text": "\nWhat is this?"}]),
                    said("assistant", [{"type": "text", "text": "A cat.", "image": None}]),
                ],
                "images": [{"bytes": b"a.jpg", "path": "elsewhere.jpg"}],
            },
            "messages",
        ),
        ({"query": "<image>\nWhat is this?", "response": "A cat.", "images": ["a.jpg"]}, "query"),  # ms-swift
        ({"query": "What is this?", "response": "A cat.", "images": '["a.jpg"]', "history": []}, "query"),
        ({"prompt": "What is this?", "completion": "A cat.", "image": "a.jpg"}, "query"),  # TRL
        (llava(human(QUESTION["value"], "USER"), human("A cat.", "GPT"), image="a.jpg"), "llava"),
        ({"instruction": "<image>", "input": "What is this?", "output": "A cat.", "images": ["a.jpg"]}, "alpaca"),
        ({"question": "What is this?", "answer": "A cat.", "image": {"bytes": b"a.jpg"}}, "vqa"),
        ({"question": "What is this?", "answers": ["a", "A cat.", "A cat."], "image": "a.jpg"}, "vqa"),
        ({"question": "What is this?", "answers": [{"answer": "A cat."}, {"answer": "b"}], "image": "a.jpg"}, "vqa"),
        ({"question": "What is this?", "answers": {"text": ["A cat."], "start": [3]}, "image": "a.jpg"}, "vqa"),
        ({"texts": [{"user": "What is this?", "assistant": "A cat.", "source": "x"}], "images": ["a.jpg"]}, "cauldron"),
        ({"conversation": [{"human": "What is this?", "assistant": "A cat."}], "images": ["a.jpg"]}, "cauldron"),
        ({"texts": {"user": ["What is this?"], "assistant": ["A cat."]}, "images": ["a.jpg"]}, "cauldron"),
    ],
)
def test_spellings_of_one_conversation(record: dict[str, Any], shape: str) -> None:
    assert shape_of(record) == shape
    assert record_of(record, shape, find) == EXPECTED


def test_an_option_names_every_kind() -> None:
    assert set(get_args(get_type_hints(DatasetConfig)["kind"])) == {"auto", *SHAPES, "webdataset"}


def test_images_take_their_tags_in_order() -> None:
    said = human("<image> or <image>?"), ANSWER, human("And <image>"), ANSWER
    conversation = record_of(llava(*said, images=["a.jpg", "b.jpg", "a.jpg"]), "llava", find)
    assert conversation.turns[0].parts == (A, " or ", B, "?")
    assert conversation.turns[2].parts == ("And ", A)
    assert conversation.images == (A, B, A)


def test_a_system_prompt_may_be_a_turn_or_a_field() -> None:
    as_turn = llava(human("Be brief.", "system"), human("Hi"), ANSWER)
    as_field = llava(human("Hi"), ANSWER, system="Be brief.")
    expected = Turn("system", ("Be brief.",))
    assert record_of(as_turn, "llava", find) == record_of(as_field, "llava", find)
    assert record_of(as_turn, "llava", find).turns[0] == expected


def test_an_exchange_follows_its_system_prompt_and_history() -> None:
    record = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief.", "text": "all in one"}
    record |= {"history": [["Hi", "Hello"]]}
    assert shape_of(record) == "alpaca"
    said = [(turn.role, "".join(map(str, turn.parts))) for turn in record_of(record, "alpaca", find).turns]
    assert said == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]


@pytest.mark.parametrize(
    ("answers", "trained"),
    [(["b", "a", "a"], "a"), (["b", "a"], "b"), (3, "3"), (2.5, "2.5"), ("[1, 2]", "1"), ([{"answer": "x"}], "x")],
)
def test_of_several_answers_the_commonest_is_trained(answers: Any, trained: str) -> None:
    assert record_of({"question": "?", "answers": answers}, "vqa", find).turns[1].parts == (trained,)
    assert record_of({"question": "?", "answers": answers, "answer": "[1]"}, "vqa", find).turns[1].parts == ("[1]",)


def test_images_without_tags_come_before_the_first_user_turn() -> None:
    record = llava(human("Be brief.", "system"), human("Which?"), ANSWER, image=["a.jpg", "b.jpg"])
    assert record_of(record, "llava", find).turns[1].parts == (A, "\n", B, "\nWhich?")


def test_text_is_one_turn() -> None:
    assert record_of({"text": "Once upon a time"}, "text", find).turns == (Turn("text", ("Once upon a time",)),)
    captioned = record_of({"text": "<image> a cat", "image": "a.jpg"}, "text", find)
    assert captioned.turns == (Turn("text", (A, " a cat")),)


@pytest.mark.parametrize(
    ("record", "shape", "reason"),
    [
        ([1], "llava", Reason.NOT_A_RECORD),
        ("text", "text", Reason.NOT_A_RECORD),
        ({"messages": []}, "llava", Reason.NOT_A_RECORD),
        (llava(), "llava", Reason.EMPTY),
        ({"text": " \n"}, "text", Reason.EMPTY),
        (llava(human("Hi")), "llava", Reason.EMPTY),  # no assistant turn
        (llava(human("Hi"), human("", "gpt")), "llava", Reason.EMPTY),
        (llava(human("Hi"), human("x", "narrator")), "llava", Reason.ROLE),
        (llava(human("Hi"), {"value": "x"}), "llava", Reason.ROLE),
        (llava(human("Hi"), {"role": "assistant", "message": "x"}), "llava", Reason.NOT_A_RECORD),
        (llava(ANSWER, human("Hi")), "llava", Reason.ROLE),  # would train the answer before its question
        (llava(human("Hi"), said("tool", "x")), "llava", Reason.ROLE),
        (llava(human("<img>a.png</img>What?"), ANSWER), "llava", Reason.NOT_A_RECORD),  # would be trained blind
        (llava(human("What?"), ANSWER, image=""), "llava", Reason.NOT_A_RECORD),  # would be trained blind
        ({"question": "?", "answer": 3, "choices": ["a", "b"]}, "vqa", Reason.UNSUPPORTED),
        ({"question": "?", "answer": float("nan")}, "vqa", Reason.NOT_A_RECORD),
        ({"question": "?", "answers": []}, "vqa", Reason.EMPTY),
        ({"query": "?", "response": "x", "history": [["one"]]}, "query", Reason.NOT_A_RECORD),
        ({"texts": [{"source": "x"}]}, "cauldron", Reason.ROLE),
        (llava(human("Hi"), {"from": ["gpt"], "value": "x"}), "llava", Reason.ROLE),
        (llava(human("<image>"), ANSWER), "llava", Reason.IMAGE_COUNT),
        (llava(human("<image>"), ANSWER, images=["a.jpg", "b.jpg"]), "llava", Reason.IMAGE_COUNT),
        ({"messages": [said("user", [{"type": "image"}]), said("assistant", "x")]}, "messages", Reason.IMAGE_COUNT),
        ({"conversations": "[{"}, "llava", Reason.NOT_A_RECORD),
        ({"conversations": "[" * 100_000}, "llava", Reason.NOT_A_RECORD),
        ({"conversations": {"from": "human"}}, "llava", Reason.NOT_A_RECORD),
        (llava(human(7), ANSWER), "llava", Reason.NOT_A_RECORD),
        (llava(human("half \ud800 a pair"), ANSWER), "llava", Reason.NOT_A_RECORD),
        (llava(human([{"type": "text", "text": 3}]), ANSWER), "llava", Reason.NOT_A_RECORD),
        (llava(human([{"type": "video", "video": "a.mp4"}]), ANSWER), "llava", Reason.UNSUPPORTED),
        (llava(human("<image>"), ANSWER, image="https://example.com/a.jpg"), "llava", Reason.UNSUPPORTED),
        (llava(human("<audio>"), ANSWER, audios=["a.wav"]), "llava", Reason.UNSUPPORTED),  # would be trained deaf
        (llava(human("Where?"), said("gpt", "<bbox>"), objects={"bbox": [[1]]}), "llava", Reason.UNSUPPORTED),
    ],
)
def test_reasons(record: Any, shape: str, reason: Reason) -> None:
    with pytest.raises(BadSample) as caught:
        record_of(record, shape, find)
    assert caught.value.reason == reason
    assert len(str(caught.value).splitlines()) == 1


FIELDS = (
    *(name for shape in SHAPES.values() for name in shape.fields),
    *("image", "images", "role", "from", "content", "value", "type", "url", "bytes", "path", "base64", "source"),
    *("user", "assistant", "chosen", "rejected", "data"),
)
NAMES = st.sampled_from(sorted(set(FIELDS)))
WORDS = st.sampled_from(
    ["user", "gpt", "assistant", "text", "image", "<image>", "data:;base64,x", "a.jpg", "\ud800", "\0", "[1", "[1]"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5)
ANYTHING = st.recursive(
    SCALARS | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(record=ANYTHING, fields=st.dictionaries(NAMES, ANYTHING, max_size=4), kind=st.sampled_from(sorted(SHAPES)))
@example(record="[1", fields={}, kind="vqa")
@example(record=[["a", float("inf")]], fields={"history": {"a": [1], "b": []}}, kind="alpaca")
def test_whatever_a_record_is_it_stops_nothing(record: Any, fields: dict[str, Any], kind: str) -> None:
    needed = {group[-1]: record for group in SHAPES[kind].needs}
    for candidate in (record, fields, needed | fields, fields | needed, llava(human(record), ANSWER, **fields)):
        with suppress(BadSample):
            assert record_of(candidate, kind, partial(file_below, Path(__file__).parent)).turns


@pytest.mark.parametrize("name", ["content", "image"])
def test_deep_nesting_stops_nothing(name: str) -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested] if name == "content" else {"image": nested}
    record = llava(said("user", nested if name == "content" else "x"), ANSWER, image=nested)
    assert reason_of(record_of, record, "llava", find) is Reason.NOT_A_RECORD


CLIP, OTHER, PICTURE = VideoRef(b"a.mp4"), VideoRef(b"b.mp4"), ImageRef(b"a.jpg")


def find_video(name: str) -> VideoRef:
    return VideoRef(name.encode())


def read(said: Any, **fields: Any) -> Conversation:
    turns = [{"role": "user", "content": said}, {"role": "assistant", "content": "Yes."}]
    return record_of({"messages": turns, **fields}, "messages", find, find_video)


@pytest.mark.parametrize(
    ("said", "fields", "expected"),
    [
        ("<video>\nWhat?", {"video": "a.mp4"}, (CLIP, "\nWhat?")),
        ("<image>\nWhat?", {"video": "a.mp4"}, (CLIP, "\nWhat?")),  # LLaVA-Video
        ("What?", {"videos": ["a.mp4", "b.mp4"]}, (CLIP, "\n", OTHER, "\nWhat?")),
        ("<video> or <image>", {"video": "a.mp4", "image": "a.jpg"}, (CLIP, " or ", PICTURE)),
        ("What?", {"video": "a.mp4", "image": "a.jpg"}, (PICTURE, "\n", CLIP, "\nWhat?")),
        ("a <video> tag", {}, ("a <video> tag",)),
        ([{"type": "video", "video": "a.mp4"}, "What?"], {}, (CLIP, "What?")),
        ([{"type": "video"}, "What?"], {"video": "a.mp4"}, (CLIP, "What?")),
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
