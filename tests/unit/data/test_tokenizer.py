"""The run's own SentencePiece model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.data.tokenizers.sentence_piece import IMAGE, Tokenizer, ensure_tokenizer, train_tokenizer
from megavlm.errors import UserError

TEXTS = ["How many digits? two", "Which is the largest? seven", "three seven one two", "Which digits? nine two"] * 50


def trained(path: Path) -> Tokenizer:
    train_tokenizer(TEXTS, path, vocab_size=120)
    return Tokenizer(path)


def test_texts_survive_the_round_trip(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path / "tokenizer.model")
    for text in TEXTS[:4]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_frequent_words_are_one_piece(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path / "tokenizer.model")
    assert len(tokenizer.encode("three seven one")) == 3


def test_decoding_stops_at_the_end_mark(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path / "tokenizer.model")
    seven, two = tokenizer.encode("seven"), tokenizer.encode("two")
    assert tokenizer.decode([tokenizer.bos, *seven, tokenizer.eos, *two]) == "seven"
    assert tokenizer.decode([*seven, tokenizer.pad, tokenizer.pad]) == "seven"
    assert tokenizer.decode([]) == ""


def test_special_tokens_are_distinct_and_the_image_is_one_token(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path / "tokenizer.model")
    special = {tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.image}
    assert len(special) == 4
    assert max(special) < tokenizer.vocab_size <= 120
    assert tokenizer.encode(f"seven{IMAGE}two").count(tokenizer.image) == 1


def test_training_is_deterministic_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "tokenizer.model", tmp_path / "b" / "tokenizer.model"
    trained(first), trained(second)
    ids = [Tokenizer(path).encode(" ".join(TEXTS[:4])) for path in (first, second)]
    assert ids[0] == ids[1]
    assert [path.name for path in first.parent.iterdir()] == ["tokenizer.model"]


def test_the_first_rank_trains_before_the_barrier_and_the_others_read_after_it(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"

    def reach_barrier_as_first_rank() -> None:
        assert path.exists(), "the model is written before the barrier"

    def wait_for_first_rank() -> None:
        assert not path.exists(), "another rank writes nothing"
        ensure_tokenizer(TEXTS, path, vocab_size=120, rank=0, barrier=reach_barrier_as_first_rank)

    assert ensure_tokenizer(TEXTS, path, vocab_size=120, rank=1, barrier=wait_for_first_rank).encode("seven")


def test_a_stored_model_is_reused_and_the_barrier_still_called(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    trained(path)
    stored = path.read_bytes()
    calls: list[None] = []
    ensure_tokenizer(["other text"], path, vocab_size=99, rank=0, barrier=lambda: calls.append(None))
    assert path.read_bytes() == stored
    assert len(calls) == 1


@pytest.mark.parametrize("content", [None, b"no model", b""])
def test_a_missing_or_broken_model_is_the_users_to_repair(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="--run-dir"):
        Tokenizer(path)
