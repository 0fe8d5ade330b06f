"""Records of pairs: what may stand where a text stands, what documents are, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.records.shapes import record_of
from megavlm.data.records.tar_sample import conversation_of_parts
from megavlm.data.types import ImageRef, Segment, VideoRef
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample
from tests.support.data_files import write_llava, write_pairs, write_tokenizer
from tests.support.flags import resolved


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
