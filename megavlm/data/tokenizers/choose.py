"""Which tokenizer a run has."""

from __future__ import annotations

import json
from pathlib import Path

from megavlm.config.schema import Config
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.data.tokenizers.sentence_piece import SentencePieceTokenizer
from megavlm.data.tokenizers.text import TextTokenizer
from megavlm.data.tokenizers.training import IMAGE
from megavlm.errors import UserError


def tokenizer_for(config: Config, *, image_text: str = IMAGE) -> TextTokenizer:
    """The tokenizer of a run: `--tokenizer`, else that of the folder that the language model comes from.

    `image_text` is what the image processor calls the image token; `--image-token`, or the model's own, goes before.
    Raises UserError where there is none, or where the model has no place for its tokens.
    """
    path = tokenizer_path(config)
    image = config.model.image_token
    if path.is_dir():
        tokenizer: TextTokenizer = HuggingFaceTokenizer.of(path, image=image, image_text=image_text)
    elif path.is_file():
        tokenizer = SentencePieceTokenizer(path, image=image, image_text=image_text)
    else:
        raise UserError(f"--tokenizer {path} is not there: give a Hugging Face folder or a SentencePiece model")
    vocabulary = config.model.language.vocab_size
    if image is not None and image != tokenizer.image:
        raise UserError(f"--image-token {image} is not in {path}, where it is {tokenizer.image}: leave it out")
    if vocabulary is not None and vocabulary < tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer {path} has {tokenizer.vocab_size} tokens, and the model {vocabulary}: give the model's own "
            "to --tokenizer"
        )
    return tokenizer


def tokenizer_path(config: Config) -> Path:
    """Where the tokenizer is. Raises UserError where no option says so."""
    given = config.data.tokenizer or config.checkpoint.init_from or config.checkpoint.language_from
    if given is None:
        raise UserError(
            "--datasets need a tokenizer: give --tokenizer a Hugging Face folder or a SentencePiece model, or a "
            "model to --init-from"
        )
    return Path(given)


def model_type(path: Path) -> str | None:
    """The architecture that a tokenizer's folder belongs to, where config.json says so."""
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None
