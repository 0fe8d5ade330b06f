"""How many tokens a run's model knows, before anything is built: plans, memory and FLOPs count with it."""

from __future__ import annotations

from megavlm.config.data_source import data_source
from megavlm.config.derived import with_vocab_size
from megavlm.config.schema import Config
from megavlm.data.digits import VOCABULARY as DIGITS
from megavlm.data.files import FilesSource
from megavlm.data.synthetic import VOCABULARY as SYNTHETIC


def with_vocabulary(config: Config) -> Config:
    """Return the configuration with the model's vocabulary, from the tokenizer where no option gives it.

    Raises UserError where there is no tokenizer, or one that the model has no place for.
    """
    if config.model.language.vocab_size is not None:
        return config
    kind = data_source(config)
    if kind == "files":
        return with_vocab_size(config, FilesSource(config).vocab_size)
    return with_vocab_size(config, DIGITS if kind == "digits" else SYNTHETIC)
