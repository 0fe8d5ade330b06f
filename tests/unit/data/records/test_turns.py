"""Every spelling of a conversation that data sets use becomes the same `Conversation`; everything else has a reason."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megavlm.config.schema import DatasetConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.records import shapes
from megavlm.data.records.media import file_below, image_of, video_below, video_of
from megavlm.data.records.shapes import SHAPES, shape_of
from megavlm.data.records.tar_sample import conversation_of_parts
from megavlm.data.records.writing import parts_of
from megavlm.data.types import Conversation, ImageRef, Segment, SoundRef, Turn, VideoRef
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.processor import Whole
from megavlm.paths import FileRange
from tests.support.data_files import write_llava, write_pairs, write_tokenizer
from tests.support.flags import resolved
from tests.support.hostile import reason_of


def find(name: str) -> ImageRef:
    return ImageRef(name.encode())


record_of = partial(shapes.record_of, find_video=lambda name: VideoRef(name.encode()))

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
UNTYPED = [{"image": "a.jpg", "text": None}, {"text": "\nWhat is this?"}]


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        (llava(QUESTION, ANSWER, image="a.jpg"), "llava"),
        (llava(QUESTION, ANSWER, image=None, images=["a.jpg"]), "llava"),
        (llava(QUESTION, ANSWER, images=[{"bytes": None, "path": None}, None, "a.jpg"]), "llava"),
        (llava(QUESTION, ANSWER, image={"bytes": b"a.jpg", "path": None}), "llava"),
        (llava(said("user", "<image>\nWhat is this?"), said("assistant", "A cat."), image="a.jpg"), "llava"),
        (llava(human("What is this?"), ANSWER, image="a.jpg"), "llava"),  # no tag: images come first
        (llava({"from": "user", "text": "What is this?"}, {"from": "gpt", "text": "A cat."}, image="a.jpg"), "llava"),
        (llava({**QUESTION, "role": None, "content": None}, ANSWER, image="a.jpg"), "llava"),  # columns of other rows
        ({"conversations": json.dumps([QUESTION, ANSWER]), "image": "a.jpg"}, "llava"),
        ({"messages": [said("user", PARTS), said("assistant", "A cat.")]}, "messages"),
        ({"messages": [{**said("user", "What is this?"), "image": "a.jpg"}, said("assistant", "A cat.")]}, "messages"),
        ({"messages": [said("user", UNTYPED), said("assistant", [{"text": "A cat."}])]}, "messages"),  # Qwen's
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
        (
            {"prompt": [said("user", "What is this?")], "completion": [said("assistant", "A cat.")], "image": "a.jpg"},
            "query",
        ),
        (llava(human(QUESTION["value"], "USER"), human("A cat.", "GPT"), image="a.jpg"), "llava"),
        ({"instruction": "<image>", "input": "What is this?", "output": "A cat.", "images": ["a.jpg"]}, "alpaca"),
        ({"instruction": "", "input": "What is this?", "output": "A cat.", "images": ["a.jpg"]}, "alpaca"),
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


@pytest.mark.parametrize(
    "answer", ['[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]', '[{"from": "Rome", "to": "Bern"}, {"user": "x"}]', "[]"]
)
def test_an_answer_may_be_json(answer: str) -> None:
    assert record_of({"query": "Where?", "response": answer}, "query", find).turns[1].parts == (answer,)
    pair = record_of({"query": "Where?", "chosen": answer, "rejected": "x"}, "preferences", find).turns
    assert [pair[1].parts, pair[3].parts] == [(answer,), ("x",)]


def test_a_prompt_may_begin_with_a_greeting() -> None:
    """A conversation that the assistant begins and the user ends has its roles exchanged, and is refused."""
    prompt = [said("assistant", "Hello"), said("user", "What?")]
    turns = record_of({"prompt": prompt, "completion": "A cat."}, "query", find).turns
    assert [turn.role for turn in turns] == ["assistant", "user", "assistant"]


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


@pytest.mark.parametrize("whole", [False, True])
def test_answers_of_a_preference_may_be_json_and_follow_a_system_prompt(whole: bool) -> None:
    answers = {
        "chosen": '[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}]',
        "rejected": '[{"from": "left", "user": "none"}]',
    }
    turns = {name: [said("user", "Where?"), said("assistant", text)] for name, text in answers.items()}
    record = {"system": "Be brief.", **(turns if whole else {"prompt": "Where?", **answers})}
    expected = [[("Be brief.",), ("Where?",), (text,)] for text in answers.values()]
    found = record_of(record, "preferences", find)
    assert [[turn.parts for turn in one.turns] for one in found.conversations()] == expected


@pytest.mark.parametrize("field", ["reasoning_content", "thinking"])
def test_thoughts_come_before_the_answer(field: str) -> None:
    answers = [{**said("assistant", text), field: "A greeting."} for text in ("Hello", None)]
    record = {"messages": [said("user", "Hi"), answers[0], {**said("user", "So?"), field: "not read"}, answers[1]]}
    turns = record_of(record, "messages", find).turns
    assert [turn.parts for turn in turns[1:]] == [("<think>\nA greeting.\n</think>\n\nHello",), ("So?",), ()]


@pytest.mark.parametrize(
    ("fields", "role"),
    [({"loss": False}, "untrained"), ({"weight": 0}, "untrained"), ({"loss": None, "weight": 1}, "assistant")],
)
def test_an_answer_may_have_no_loss(fields: dict[str, Any], role: str) -> None:
    turns = [said("user", "Hi"), {**said("assistant", "Hello"), **fields}, said("user", "So?"), ANSWER]
    made = record_of({"messages": turns}, "messages", find)
    assert [turn.role for turn in made.turns] == ["user", role, "user", "assistant"]
    assert conversation_of_parts(parts_of(made, "1")) == made  # as `megavlm prepare` writes it


def test_a_tar_keeps_the_bounds_of_its_images() -> None:
    made = Conversation((Turn("user", (ImageRef(b"a", 4, 9), "?")), Turn("assistant", ("A cat.",))))
    assert conversation_of_parts(parts_of(made, "1", look=len)) == made


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
        (llava(human("Hi"), {**said("assistant", "I look."), "tool_calls": [{}]}), "llava", Reason.ROLE),
        (llava(human("<img>a.png</img>What?"), ANSWER), "llava", Reason.NOT_A_RECORD),  # would be trained blind
        (llava(human("What?"), ANSWER, image=""), "llava", Reason.NOT_A_RECORD),  # would be trained blind
        ({"question": "?", "answer": 3, "choices": ["a", "b"]}, "vqa", Reason.UNSUPPORTED),
        ({"question": "?", "answer": float("nan")}, "vqa", Reason.NOT_A_RECORD),
        ({"question": "?", "answers": []}, "vqa", Reason.EMPTY),
        ({"query": "?", "response": "x", "history": [["one"]]}, "query", Reason.NOT_A_RECORD),
        ({"image": "a.jpg", "caption": ["A cat.", "A pet."]}, "text", Reason.NOT_A_RECORD),  # would be trained as one
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
        (llava(human("<image>"), ANSWER, image="https://example.com/a.jpg"), "llava", Reason.UNSUPPORTED),
        (llava(human("<audio> <audio>"), ANSWER, audios=["a.wav"]), "llava", Reason.IMAGE_COUNT),
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


def read(said: Any, **fields: Any) -> Conversation:
    turns = [{"role": "user", "content": said}, {"role": "assistant", "content": "Yes."}]
    return record_of({"messages": turns, **fields}, "messages", find)


FILM = {"type": "video", "video": "a.mp4"}


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
        ("<video>", {"video": ["1.jpg", "2.jpg"]}, (VideoRef((ImageRef(b"1.jpg"), ImageRef(b"2.jpg"))),)),
        ("<video>", {"video": {"bytes": b"clip"}}, (VideoRef(b"clip"),)),
        ([{**FILM, "fps": None, "sample_fps": 4}], {"fps": 2}, (VideoRef(b"a.mp4", 4.0),)),
        ([{"image": "a.jpg", "min_pixels": 4, "max_pixels": 9}], {}, (ImageRef(b"a.jpg", 4, 9),)),
        ("<image>", {"images": [{"path": "a.jpg", "max_pixels": 9}]}, (ImageRef(b"a.jpg", None, 9),)),
        ([{**FILM, "video_start": 1, "video_end": 2.5}], {"fps": 2}, (VideoRef(b"a.mp4", None, 1, 2.5),)),
        ([{**FILM, "fps": 1, "max_pixels": 9}], {}, (VideoRef(b"a.mp4", 1.0, max_pixels=9),)),
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
        ([{**FILM, "video_end": "2 s"}], {}, Reason.NOT_A_RECORD),
        ([{"image": "a.jpg", "min_pixels": -1}], {}, Reason.NOT_A_RECORD),
        ([{"image": "a.jpg", "resized_height": 28}], {}, Reason.UNSUPPORTED),
        ([{**FILM, "nframes": 8}], {}, Reason.UNSUPPORTED),
        ([{"type": "image", "max_pixels": 9}], {"image": "a.jpg"}, Reason.UNSUPPORTED),  # would not be bounded
    ],
)
def test_what_is_wrong_with_a_record(said: Any, fields: dict[str, Any], reason: Reason) -> None:
    assert reason_of(read, said, **fields) is reason


def test_files_and_folders_of_frames(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"a")
    (tmp_path / "frames").mkdir()
    for name in ("f10.jpg", "f2.jpg", "f1.jpg", "notes.txt", "._f1.jpg"):  # as macOS has it
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
    for name, count in (("in", 1), ("out", 3)):  # links are whoever's who may write there
        assert len(video_of(name, partial(video_below, tmp_path / "root")).source) == count
    assert reason_of(video_of, "../frames", partial(video_below, tmp_path / "root")) is Reason.OUTSIDE
    for name, reason in (("b.mp4", Reason.MISSING), ("nothing", Reason.NO_FRAMES), ("../b", Reason.OUTSIDE)):
        assert reason_of(video_of, name, look) == reason
    assert reason_of(video_of, [["frames"]][0], look) is Reason.NOT_AN_IMAGE


FIRST, SECOND = ImageRef(b"first"), ImageRef(b"second")


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
    assert conversation_of_parts(parts).turns[0] == Turn("user", (FIRST, SECOND, "?"))


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
    assert found.turns == (Turn("user", (FIRST, "\n?")), Turn("assistant", ("answer",)))


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
    assert conversation_of_parts(parts).turns == (Turn("text", (FIRST, "a cat")),)


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
def test_reasons_of_parts(parts: dict[str, bytes], reason: Reason) -> None:
    assert reason_of(conversation_of_parts, parts) == reason


def test_frames_of_a_video_are_none_of_the_images() -> None:
    record = turns("<image><video><video>?", videos=[{"frames": ["1.0.jpg", "1.1.jpg"], "fps": 2}, {"video": "2.mp4"}])
    parts = {"json": record, "0.jpg": b"first", "1.1.jpg": b"b", "1.0.jpg": b"a", "2.mp4": b"clip"}
    frames = VideoRef((ImageRef(b"a"), ImageRef(b"b")), fps=2.0)
    assert conversation_of_parts(parts).turns[0] == Turn("user", (FIRST, frames, VideoRef(b"clip"), "?"))


def test_a_clip_stays_where_it_is() -> None:
    place = FileRange(Path("a.tar"), 512, 40)
    found = conversation_of_parts({"json": turns("<video>?"), "mp4": place})
    assert found.turns[0] == Turn("user", (VideoRef(place), "?"))
    for record in (turns("<image>?", image="mp4"), turns("<video>?", videos=[["mp4"]])):
        assert reason_of(conversation_of_parts, {"json": record, "mp4": place}) is Reason.NOT_AN_IMAGE


@pytest.mark.parametrize(
    ("parts", "heard"),
    [
        ({"json": turns("<audio><image>?"), "wav": b"sound", "jpg": b"first"}, (SoundRef(b"sound"), FIRST, "?")),
        ({"json": turns("?"), "2.mp3": b"other", "1.flac": b"sound"}, "sound other"),
        ({"json": turns("<audio>?", audio="talks/7.wav"), "jpg": b"first", "wav": b"sound"}, Reason.IMAGE_COUNT),
        ({"json": turns("<audio><image>?", audio="7.wav"), "jpg": b"first", "mp3": b"s"}, (SoundRef(b"s"), FIRST, "?")),
        ({"json": turns("?"), "mp4": b"clip", "m4a": b"its sound"}, (VideoRef(b"clip"), "\n?")),
        ({"json": turns("<audio>?", audios=["m4a"]), "mp4": b"clip", "m4a": b"sound"}, Reason.IMAGE_COUNT),
        ({"json": turns("<audio><video>?"), "mp4": b"clip", "wav": b"s"}, (SoundRef(b"s"), VideoRef(b"clip"), "?")),
        ({"json": turns("<audio>?", audio="8.wav")}, Reason.MISSING),
    ],
)
def test_sounds_are_the_sound_files_in_order(parts: dict[str, bytes], heard: Any) -> None:
    if isinstance(heard, Reason):
        assert reason_of(conversation_of_parts, parts) is heard
    elif isinstance(heard, str):
        first, second = (SoundRef(each.encode()) for each in heard.split())
        assert conversation_of_parts(parts).turns[0].parts == (first, "\n", second, "\n?")
    else:
        assert conversation_of_parts(parts).turns[0].parts == heard


def read_pairs(record: Any):
    return record_of(record, "pairs", find)


def test_a_text_is_a_text_parts_or_an_object_with_images() -> None:
    found = read_pairs(
        {
            "query": "what?",
            "positives": [
                {"image": "a"},
                {"text": "see <image> and <image>", "images": ["b", "c"]},
                [{"type": "image", "image": "d"}, {"type": "text", "text": "that"}],
            ],
            "negative": {"type": "text", "text": "no"},
        }
    )
    a, b, c, d = (find(name) for name in "abcd")
    assert [turn.parts for turn in found.turns] == [("what?",), (a,), ("see ", b, " and ", c), (d, "that"), ("no",)]
    assert [turn.role for turn in found.turns] == ["query", *["positive"] * 3, "negative"]


def test_a_text_may_have_videos() -> None:
    record = {
        "query": {"text": "like <video>?", "video": "a"},
        "positives": [{"videos": ["b", "c"], "text": "both"}, {"video": "d"}, {"video": "d"}],
    }
    found = record_of(record, "pairs", find)
    a, b, c, d = (VideoRef(name.encode()) for name in "abcd")
    assert [turn.parts for turn in found.turns] == [("like ", a, "?"), (b, c, "both"), (d,), (d,)]
    assert found.identities[2] == found.identities[3] != found.identities[1]


def test_documents_of_one_id_or_of_equal_content_are_the_same() -> None:
    plain = {"query": "q", "positives": ["a", "b"], "negatives": ["a", "c"]}
    _, a, b, again, c = read_pairs(plain).identities
    assert a == again
    assert len({a, b, c}) == 3
    _, first, second, _, _ = read_pairs({**plain, "id": 7}).identities
    assert first == second != a
    assert first == read_pairs({"query": "q", "positive": "z", "id": "7"}).identities[1]
    _, *ids = read_pairs({**plain, "ids": [1, 2, 2, None]}).identities
    assert ids[1] == ids[2] != ids[0]
    assert ids[3] == c
    pictures = [read_pairs({"query": "q", "positives": [{"image": name}]}).identities[1] for name in ("x", "y", "x")]
    assert pictures[0] == pictures[2] != pictures[1]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"positives": ["a"]}, "no field `query`"),
        ({"query": "q"}, "no positives"),
        ({"query": " ", "positives": ["a"]}, "its query has neither a text nor an image"),
        ({"query": "q", "positives": [""]}, "its positive has neither a text nor an image"),
        ({"query": "q", "positives": ["a"], "ids": [1, 2]}, "not a list of 1, one per document"),
        ({"query": "q", "positives": ["a"], "id": {}}, "neither a text nor a number"),
        ({"query": "q", "positives": [{"text": "<image>"}]}, "1 <image> for 0 images"),
        ({"query": 5, "positives": ["a"]}, "neither a text nor a list of parts"),
        ("q", "an object with fields"),
    ],
)
def test_a_wrong_record_is_told_in_one_line(record: Any, told: str) -> None:
    with pytest.raises(BadSample) as caught:
        read_pairs(record)
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_tar_has_the_images_that_a_record_names() -> None:
    record = {"query": "q", "positives": [{"image": "b.png"}], "negatives": [{"image": "a.png"}], "id": 3}
    found = conversation_of_parts({"json": json.dumps(record).encode(), "a.png": b"A", "b.png": b"B"})
    assert [turn.parts for turn in found.turns] == [("q",), (ImageRef(b"B"),), (ImageRef(b"A"),)]
    assert found.identities[1] == read_pairs({"query": "z", "positive": "y", "id": 3}).identities[1]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    write_tokenizer(tmp_path / "tokenizer")
    path = write_pairs(tmp_path, records=12)
    small = (
        "--set model.vision.image_size=16 model.vision.patch_size=4 model.projector.pixel_shuffle=2 --seq-length 64 "
        "--no-packing"
    )
    data = f"--datasets {path},image_root={tmp_path / 'images'} --tokenizer {tmp_path / 'tokenizer'}"
    return f"--objective contrastive {small} {data} --pooling mean --no-shuffle".split()


def test_texts_are_embedded_one_by_one_behind_their_instruction(flags: list[str]) -> None:
    """A micro-batch pools each text over its own tokens, however records and sequences lie."""
    config = resolved([*flags, "--query-prefix", "find ", "--document-prefix", "see "])
    source = FilesSource(config)
    encoded = [source.encode(number).samples[0] for number in range(12)]
    samples = [source.load(Segment(number, each)) for number, each in enumerate(encoded)]
    batch = collate([samples[:1], samples[1:2]], CollateSpec.of(config, source)).text
    texts = [text for sample in samples[:2] for text in sample.texts()]
    tokens, eos = batch.tokens.flatten(), source.tokenizer.eos
    for number, text in enumerate(texts):
        chosen = batch.pool[0][batch.pool[1] == number]
        assert tokens[chosen].tolist() == text.tokens.tolist()
        first = source.tokenizer.encode("find" if text.members[0].role == 0 else "see").ids[0]
        assert text.tokens[0] == first
        assert text.tokens[-1] == eos
        np.testing.assert_allclose(batch.pool_weights[batch.pool[1] == number].sum(), 1, rtol=1e-6)
    assert batch.members[:, 0].tolist() == [0] * len(samples[0].members) + [1] * len(samples[1].members)


def test_a_text_may_be_a_turn_of_a_chat(flags: list[str]) -> None:
    """As in Qwen3-VL-Embedding: its instruction is the system's, and what precedes an answer ends it."""
    chat = "--pooling chat --chat-template vicuna --query-prefix find: --seq-length 512".split()
    source = FilesSource(resolved([*flags, *chat]))
    query, *_ = source.load(Segment(0, source.encode(0).samples[0])).texts()
    asked = source.conversation(0)[0].turns[0]
    prompts = [layout.prompt for layout in source.visuals.layouts(asked.images)]
    chatted = Conversation((Turn("system", ("find:",)), Turn("user", asked.parts)))
    assert query.tokens.tolist() == source.chat.prompt(chatted, prompts).tolist()
    assert query.tokens[-1] != source.tokenizer.eos


def test_an_image_is_alone_where_its_text_has_no_other(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models cut an image into tiles if it is the only one."""
    source, counts = FilesSource(resolved(flags)), list[int]()
    for name in ("layout", "views"):
        whole = getattr(Whole, name)
        monkeypatch.setattr(
            Whole, name, lambda *args, images, whole=whole: counts.append(images) or whole(*args, images=images)
        )
    for number in range(12):
        texts = [len(text.images) for text in source.conversation(number)[0].turns]
        counts.clear()
        source.load(Segment(number, source.encode(number).samples[0]))
        assert counts == [count for count in texts for _ in range(count)] * 2


def test_negatives_that_do_not_fit_are_left_out_and_told(flags: list[str], tmp_path: Path) -> None:
    long = {"query": "a", "positives": ["cat"], "negatives": ["dog", "the " * 70, "mat"]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(long) + "\n" + json.dumps({**long, "positives": ["the " * 70]}))
    source = FilesSource(resolved(flags))
    cut, bad = source.encode(0), source.encode(1)
    assert [member.role for member in cut.samples[0].members] == [0, 1, 2]
    assert cut.skipped[0].partly
    assert "2 of its negatives" in cut.skipped[0].detail
    assert not bad.samples
    assert bad.skipped[0].label == "pairs.jsonl:2"
    assert "--seq-length 64" in bad.skipped[0].detail


def test_objective_and_records_belong_together(flags: list[str], tmp_path: Path) -> None:
    chats = write_llava(tmp_path / "chats", samples=2)
    with pytest.raises(UserError, match=r"train\.jsonl has records of conversations, but --objective"):
        _ = FilesSource(resolved([*flags, "--datasets", str(chats)])).records
    with pytest.raises(UserError, match=r"pairs\.jsonl has records of pairs, .*add --objective contrastive"):
        _ = FilesSource(resolved([*flags, "--objective", "next-token", "--pooling", "last"])).records


PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))
ENCODED = base64.b64encode(PNG).decode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    return tmp_path / "images"


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        {"bytes": PNG, "path": "not/looked/at.png"},
        ENCODED,
        f"data:image/png;base64,{ENCODED}",
        f"DATA:image/png;charset=x;BASE64,{ENCODED[:40]}\n{ENCODED[40:]}",
        {"url": f"data:image/png;base64,{ENCODED}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}},
        {"type": "image", "image": {"bytes": PNG, "path": None}},
    ],
)
def test_images_within_the_record(value: Any, root: Path) -> None:
    assert image_of(value, lambda name: file_below(root, name)) == ImageRef(PNG)


@pytest.mark.parametrize("value", ["a.png", {"path": "a.png", "bytes": None}, {"path": "./../images/a.png"}])
def test_images_by_path(value: Any, root: Path) -> None:
    assert image_of(value, lambda name: file_below(root, name)) == ImageRef((root / "a.png").resolve())


@pytest.mark.parametrize("spelling", ["{}", "file://{}", "file://localhost{}", "FILE:{}", "file://{}%20two.png"])
def test_absolute_paths_and_file_urls_inside_the_folder(spelling: str, root: Path) -> None:
    (root / "a.png two.png").write_bytes(PNG)
    name = spelling.format(root / "a.png")
    wanted = ImageRef((root / ("a.png two.png" if "%20" in spelling else "a.png")).resolve())
    assert image_of(name, lambda name: file_below(root, name)) == wanted
    assert image_of(name, lambda name: file_below(Path("/"), name)) == wanted


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("b.png", Reason.MISSING),
        ("", Reason.NOT_A_RECORD),
        ("../secret.png", Reason.OUTSIDE),
        ("\ud800.png", Reason.MISSING),
        ("https://example.com/a.png", Reason.UNSUPPORTED),
        ("s3://bucket/a.png", Reason.UNSUPPORTED),
        ("file:///etc/passwd", Reason.OUTSIDE),
        ("file://elsewhere/a.png", Reason.UNSUPPORTED),
        ({"url": "HTTPS://example.com/a.png"}, Reason.UNSUPPORTED),
        ("data:image/png,raw", Reason.CORRUPT),
        ("data:image/png;base64,%%%", Reason.CORRUPT),
        (ENCODED[:-1], Reason.CORRUPT),
        (3, Reason.NOT_A_RECORD),
    ],
)
def test_reasons_of_pictures(value: Any, reason: Reason, root: Path) -> None:
    assert reason_of(image_of, value, lambda name: file_below(root, name)) == reason
