"""Tokenizers of SentencePiece: a user's model, and one that is trained on the texts of a run."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece

from megavlm.config.schema import CheckpointConfig, Config, DataConfig, LanguageConfig, ModelConfig
from megavlm.data.chat import ChatFormat
from megavlm.data.preprocessors import tokenizer_for
from megavlm.data.tokenizers import MOST_GROWTH
from megavlm.data.tokenizers.hugging_face import _growth
from megavlm.data.tokenizers.sentence_piece import (
    IMAGE,
    SentencePieceTokenizer,
    _fields,
    ensure_tokenizer,
    train_tokenizer,
)
from megavlm.data.types import Conversation, ImageRef, Turn
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample
from megavlm.inputs.layout import Prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    train_tokenizer(["what is in the picture", "the cat sat é", "USER: ASSISTANT: yes"] * 5, path, vocab_size=90)
    return path


def test_control_pieces_in_a_text_are_tokens_and_places_are_characters(model: Path) -> None:
    tokenizer = SentencePieceTokenizer(model)
    text = "<s>é the <image>\ncat</s>"
    tokens = tokenizer.encode(text)
    assert tokens.ids[0] == tokenizer.begin
    assert tokens.ids[-1] == tokenizer.eos
    assert (tokens.ids == tokenizer.image).sum() == 1
    for number, start, end in zip(tokens.ids, tokens.starts, tokens.ends, strict=True):
        if number in (tokenizer.begin, tokenizer.eos, tokenizer.image):
            assert text[start:end] == tokenizer.decode([number])
    assert tokens.starts[0] == 0
    assert tokens.ends[-1] == len(text)
    assert tokenizer.decode(tokens.ids.tolist()).replace(" ", "") == "<s>éthe<image>cat</s>"


def test_it_travels_to_other_processes(model: Path) -> None:
    tokenizer = SentencePieceTokenizer(model)
    moved = pickle.loads(pickle.dumps(tokenizer))
    assert moved.encode("the cat</s>").ids.tolist() == tokenizer.encode("the cat</s>").ids.tolist()


@pytest.mark.parametrize(("letters", "refused"), [(60, False), (70, True)])
def test_a_normalizer_that_multiplies_texts_is_refused(tmp_path: Path, letters: int, refused: bool) -> None:
    """Of a model, and of a tokenizer.json that has its table."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install tokenizers (the extra `hf`)")
    (tmp_path / "rules.tsv").write_text(f"61\t{' '.join(['62'] * letters)}\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["b c d e f", "b d c"] * 50),
        model_prefix=str(tmp_path / "m"),
        vocab_size=20,
        user_defined_symbols=["<image>"],
        normalization_rule_tsv=str(tmp_path / "rules.tsv"),
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (normalizer,) = _fields((tmp_path / "m.model").read_bytes(), 3)
    (table,) = _fields(normalizer, 2)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"b": 0}, merges=[]))
    tokenizer.normalizer = tokenizers.normalizers.Precompiled(table)
    assert tokenizer.normalizer.normalize_str("a") == "b" * letters
    growth = _growth(json.loads(tokenizer.to_str())["normalizer"])
    if not refused:
        assert growth == letters / 4
        assert len(SentencePieceTokenizer(tmp_path / "m.model").encode("a")) > letters / 2
        return
    assert growth > MOST_GROWTH
    with pytest.raises(UserError, match="its normalizer makes texts 18 times as long"):
        SentencePieceTokenizer(tmp_path / "m.model")


def test_a_chat_with_it(model: Path) -> None:
    tokenizer = SentencePieceTokenizer(model)
    chat = ChatFormat.of(tokenizer, template="vicuna")
    turns = (
        Turn("user", (ImageRef(b""), "\nwhat is in the picture")),
        Turn("assistant", ("the cat",)),
        Turn("user", ("yes",)),
        Turn("assistant", ("the picture",)),
    )
    encoded = chat.encode(Conversation(turns), [Prompt("<image>", ("", ""), (3,))])
    assert encoded.tokens[0] == tokenizer.begin
    assert (encoded.tokens == tokenizer.begin).sum() == 1
    assert (encoded.tokens == tokenizer.image).sum() == 3
    assert tokenizer.decode(encoded.tokens[encoded.trained].tolist()) == "the cat</s>the picture</s>"
    long = Conversation((Turn("user", ("a" * 2**22,)), Turn("assistant", ("b",))))
    many = Conversation((Turn("user", ("a",)), Turn("assistant", ("b",))) * 1025)
    for use in (chat.encode, chat.prompt):
        for refused, told in ((long, "4194305 letters, more than 4194304"), (many, "2050 turns, more than 2048")):
            with pytest.raises(BadSample, match=f"{told}: divide it"):
                use(refused, [])
    assert [turn.images for turn in encoded.turns] == [1, 0]
    with pytest.raises(BadSample, match="<image>"):
        chat.encode(Conversation((Turn("user", ("<image>",)), Turn("assistant", ("x",)))), [])


def with_tokenizer(path: Path | None, **model: object) -> Config:
    language = LanguageConfig(vocab_size=model.pop("vocab_size", None))  # type: ignore[arg-type]
    made = replace(ModelConfig(language=language), **model)  # type: ignore[arg-type]
    return Config(model=made, data=DataConfig(tokenizer=None if path is None else str(path)))


def test_the_tokenizer_of_a_run(model: Path) -> None:
    tokenizer = tokenizer_for(with_tokenizer(model))
    assert tokenizer.encode("the cat").ids.tolist() == SentencePieceTokenizer(model).encode("the cat").ids.tolist()
    assert tokenizer_for(with_tokenizer(model, vocab_size=1000)).vocab_size == tokenizer.vocab_size
    assert tokenizer_for(with_tokenizer(model, image_token=5)).image == 5


@pytest.mark.parametrize(
    ("options", "message"), [({"vocab_size": 20}, "--tokenizer"), ({"image_token": 5000}, "--image-token 5000")]
)
def test_a_tokenizer_that_does_not_fit_the_model(model: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        tokenizer_for(with_tokenizer(model, **options))
    assert "\n" not in str(caught.value)


def test_where_there_is_none(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--tokenizer"):
        tokenizer_for(with_tokenizer(None))
    with pytest.raises(UserError, match="is not there"):
        tokenizer_for(with_tokenizer(tmp_path / "none"))
    garbage = tmp_path / "garbage.model"
    garbage.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="SentencePiece"):
        tokenizer_for(with_tokenizer(garbage))
    with pytest.raises(UserError, match=r"has no tokenizer\.json") as caught:
        tokenizer_for(Config(checkpoint=CheckpointConfig(init_from=str(tmp_path))))
    assert "\n" not in str(caught.value)


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
    assert len({first.pad, first.begin, first.eos, first.image}) == 4
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


def test_a_broken_model_is_the_users_to_repair(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"no model")
    with pytest.raises(UserError, match="--run-dir"):
        ensure_tokenizer(TEXTS, path, vocab_size=120, rank=0, barrier=lambda: None)
