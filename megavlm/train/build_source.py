"""Build the source of a run's samples and find the vocabulary size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megavlm.arch.objectives import objective_of
from megavlm.config.messages import described
from megavlm.config.option import data_kind
from megavlm.config.registry import registered
from megavlm.config.schema import Config
from megavlm.data.file_source import FilesSource
from megavlm.data.source import Source
from megavlm.data.synthetic import SyntheticPairs, SyntheticSource
from megavlm.demo.digits import VOCABULARY as DIGITS
from megavlm.demo.digits import DigitPairs, DigitsSource
from megavlm.errors import UserError
from megavlm.rules.defaults import is_set, resolve


def build_source(config: Config, *, run_dir: Path, rank: int = 0, barrier: Callable[[], None] = lambda: None) -> Source:
    """Return the source that `--data` names.

    Rank 0 writes the tokenizer of the demo to `run_dir`; the other ranks call `barrier` to wait for it.
    """
    config = resolve(config)
    if data_kind(config) == "digits":
        digits = DigitPairs if objective_of(config.model).embeds else DigitsSource
        return digits.build(config, run_dir=run_dir, rank=rank, barrier=barrier)
    if data_kind(config) == "files":
        return FilesSource(config)
    return _synthetic(config) if data_kind(config) == "synthetic" else _of_extension(config)


def _synthetic(config: Config) -> SyntheticSource | SyntheticPairs:
    return SyntheticPairs(config) if objective_of(config.model).embeds else SyntheticSource(config)


def _of_extension(config: Config) -> Source:
    """Return the source that an extension adds. Raises UserError if its code fails."""
    kind = data_kind(config)
    try:
        source = registered("sources")[kind].load()(config)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--data {kind} cannot be made: {described(error)}") from error
    if not isinstance(source, Source):
        raise UserError(
            f"--data {kind} makes a {type(source).__name__}: derive it from megavlm.data.source.ComputedSource"
        )
    return source


def vocab_size_of(config: Config) -> int:
    """Return the model's vocabulary size: as configured, or the tokenizer's.

    Raises UserError if there is no tokenizer, if its tokens are more than the model has, or if synthetic samples are
    longer than a sequence.
    """
    kind = data_kind(config)
    if kind == "synthetic":
        return _synthetic(config).vocab_size
    if is_set(config.model.language, "vocab_size"):
        return config.model.language.vocab_size
    if kind in registered("sources"):
        return _of_extension(resolve(config)).vocab_size
    return DIGITS if kind == "digits" else FilesSource(config).vocab_size
