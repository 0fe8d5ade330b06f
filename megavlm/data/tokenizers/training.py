"""SentencePiece: a model trained on the run's own texts, stored in the run folder."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import sentencepiece

from megavlm.errors import UserError
from megavlm.files import replace_file

IMAGE = "<image>"


def train_tokenizer(texts: Iterable[str], path: Path, *, vocab_size: int) -> None:
    """Train a BPE model on `texts` and write it to `path` in one step (a reader never sees half a file).

    Deterministic: one thread, all texts in the given order. `vocab_size` is an upper limit; words that are frequent
    in the texts become single pieces. `<image>` is a piece of its own wherever it stands.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        pad_piece="<pad>",
        user_defined_symbols=[IMAGE],
        num_threads=1,
        minloglevel=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, model.getvalue())


def ensure_tokenizer(
    texts: Iterable[str], path: Path, *, vocab_size: int, rank: int, barrier: Callable[[], None]
) -> Tokenizer:
    """Return the tokenizer stored at `path`; where there is none, rank 0 trains it while the others wait in `barrier`.

    Every rank calls `barrier` once, whether or not the file was there, so the ranks need not agree on what they saw.
    """
    if rank == 0 and not path.exists():
        train_tokenizer(texts, path, vocab_size=vocab_size)
    barrier()
    return Tokenizer(path)


class Tokenizer:
    """Text ↔ token ids of a stored SentencePiece model.

    Raises UserError when the file is missing, is not a SentencePiece model, or lacks `<image>`, `<pad>` or the
    sentence marks.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"{path} is not a readable SentencePiece model ({error}): delete it so that the next run trains it "
                "again, or choose another --run-dir"
            ) from error
        self.vocab_size: int = self._model.get_piece_size()
        self.pad: int = self._model.pad_id()
        self.bos: int = self._model.bos_id()
        self.eos: int = self._model.eos_id()
        self.image: int = self._model.piece_to_id(IMAGE)
        if min(self.pad, self.bos, self.eos) < 0 or self.image == self._model.unk_id():
            raise UserError(f"{path} has no {IMAGE}, padding or sentence marks: choose another --run-dir")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without sentence marks."""
        ids: list[int] = self._model.encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids up to the first end mark; padding and the begin mark leave no trace."""
        kept: list[int] = []
        for token in ids:
            if token == self.eos:
                break
            kept.append(int(token))
        text: str = self._model.decode(kept)
        return text
