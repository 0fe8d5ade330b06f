"""The size of a run's vocabulary, known before anything is built: plans, memory and FLOPs count with it."""

from __future__ import annotations

from megavlm.config.resolve import data_kind, is_set
from megavlm.config.schema import Config
from megavlm.data.digits import VOCABULARY as DIGITS
from megavlm.data.files import FilesSource
from megavlm.data.synthetic import VOCABULARY as SYNTHETIC


def vocab_size_of(config: Config) -> int:
    """Return the number of tokens of the model: as given, or the tokenizer's.

    Raises UserError if there is no tokenizer, or if its tokens are more than the model has.
    """
    if is_set(config.model.language, "vocab_size"):
        return config.model.language.vocab_size
    kind = data_kind(config)
    if kind == "files":
        return FilesSource(config).vocab_size
    return DIGITS if kind == "digits" else SYNTHETIC
