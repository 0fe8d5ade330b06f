"""The files of a WebDataset sample become one conversation."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.records.shapes import record_of
from megavlm.data.records.tar_sample import conversation_of_parts
from megavlm.data.types import ImageRef, Segment, Turn, VideoRef
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import FileRange
from tests.support.data_files import write_llava, write_pairs, write_tokenizer
from tests.support.flags import resolved
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


def find(name: str) -> ImageRef:
    return ImageRef(name.encode())


def read(record: Any):
    return record_of(record, "pairs", find)


def test_a_text_is_a_text_parts_or_an_object_with_images() -> None:
    found = read(
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
    found = record_of(record, "pairs", find, find_video=lambda name: VideoRef(name.encode()))
    a, b, c, d = (VideoRef(name.encode()) for name in "abcd")
    assert [turn.parts for turn in found.turns] == [("like ", a, "?"), (b, c, "both"), (d,), (d,)]
    assert found.identities[2] == found.identities[3] != found.identities[1]


def test_documents_of_one_id_or_of_equal_content_are_the_same() -> None:
    plain = {"query": "q", "positives": ["a", "b"], "negatives": ["a", "c"]}
    _, a, b, again, c = read(plain).identities
    assert a == again
    assert len({a, b, c}) == 3
    _, first, second, _, _ = read({**plain, "id": 7}).identities
    assert first == second != a
    assert first == read({"query": "q", "positive": "z", "id": "7"}).identities[1]
    _, *ids = read({**plain, "ids": [1, 2, 2, None]}).identities
    assert ids[1] == ids[2] != ids[0]
    assert ids[3] == c
    pictures = [read({"query": "q", "positives": [{"image": name}]}).identities[1] for name in ("x", "y", "x")]
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
        read(record)
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_tar_has_the_images_that_a_record_names() -> None:
    record = {"query": "q", "positives": [{"image": "b.png"}], "negatives": [{"image": "a.png"}], "id": 3}
    found = conversation_of_parts({"json": json.dumps(record).encode(), "a.png": b"A", "b.png": b"B"})
    assert [turn.parts for turn in found.turns] == [("q",), (ImageRef(b"B"),), (ImageRef(b"A"),)]
    assert found.identities[1] == read({"query": "z", "positive": "y", "id": 3}).identities[1]


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
