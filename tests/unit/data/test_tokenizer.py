"""The run's own SentencePiece model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.data.tokenizers.sentence_piece import (
    IMAGE,
    SentencePieceTokenizer,
    ensure_tokenizer,
    train_tokenizer,
)
from megavlm.errors import UserError

TEXTS = ["How many digits? two", "Which is the largest? seven", "three seven one two", "Which digits? nine two"] * 50


def trained(path: Path) -> SentencePieceTokenizer:
    train_tokenizer(TEXTS, path, vocab_size=120)
    return SentencePieceTokenizer(path)


def test_training_is_deterministic_and_words_are_pieces(tmp_path: Path) -> None:
    first, second = (trained(tmp_path / name / "tokenizer.model") for name in "ab")
    text = " ".join(TEXTS[:4])
    assert first.encode(text).ids.tolist() == second.encode(text).ids.tolist()
    assert first.decode(first.encode(text).ids.tolist()) == text
    assert len(first.encode("three seven one")) == 3
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["tokenizer.model"]
    special = {first.pad, first.begin, first.eos, first.image}
    assert len(special) == 4
    assert first.vocab_size <= 120
    assert first.encode(f"seven{IMAGE}two").ids.tolist().count(first.image) == 1


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


@pytest.mark.parametrize("content", [b"no model", b""])
def test_a_broken_model_is_the_users_to_repair(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match="--run-dir"):
        ensure_tokenizer(TEXTS, path, vocab_size=120, rank=0, barrier=lambda: None)
