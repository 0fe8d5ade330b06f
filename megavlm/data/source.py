"""Where samples come from: a pure function from a global index to a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megavlm.config.resolve import data_kind
from megavlm.config.schema import Config
from megavlm.data.bad import BadSample
from megavlm.data.batch import MicroBatch
from megavlm.data.batch_sampler import Measured, Skipped
from megavlm.data.digits import DigitsSource
from megavlm.data.files import FilesSource
from megavlm.data.sample import Row, Sample, collate
from megavlm.data.synthetic import SyntheticSource


class Source(Protocol):
    """An endless stream of samples that a model takes.

    What an `item` stands for depends on the seed alone: any rank of any layout can make any sample. Where samples are
    numbered, items are their numbers.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The data sets whose losses are told apart; empty where there is but one."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def image_token(self) -> int: ...

    @property
    def pad_token(self) -> int: ...

    @property
    def pixel_shuffle(self) -> int: ...

    @property
    def patch_dim(self) -> int:
        """Values of one patch: channels × patch side²."""
        ...

    @property
    def mrope(self) -> bool:
        """Whether the model takes three positions per token."""
        ...

    @property
    def anyres_max_tiles(self) -> int | None:
        """Tiles' worth of features that an image may have, for models of tiled images (`anyres.py`)."""
        ...

    def pieces(self, item: Any) -> tuple[Sample, ...]:
        """A sample as the sequences that it is cut into, one as a rule. Raises BadSample for one that is left out."""
        ...

    def measure(self, item: Any) -> Measured:
        """What its pieces cost, without pixels. Never raises for what is wrong with a sample."""
        ...

    def skipped(self, item: Any, error: BadSample) -> Skipped:
        """How to report that a sample is left out."""
        ...


def build_source(
    config: Config, *, run_dir: Path, rank: int = 0, barrier: Callable[[], None] = lambda: None
) -> SyntheticSource | DigitsSource | FilesSource:
    """The source that `--data` names.

    Rank 0 writes what the source stores in `run_dir` (the tokenizer); the others call `barrier` to wait for it.
    """
    if data_kind(config) == "digits":
        return DigitsSource.build(config, run_dir=run_dir, rank=rank, barrier=barrier)
    if data_kind(config) == "files":
        return FilesSource(config)
    return SyntheticSource(config)


def batch_of(source: Source, samples: Sequence[Sample], *, seq_length: int, with_patches: bool) -> MicroBatch:
    """A micro-batch of samples, each in a row of its own."""
    return batch_of_rows(source, [[sample] for sample in samples], seq_length=seq_length, with_patches=with_patches)


def batch_of_rows(source: Source, rows: Sequence[Row], *, seq_length: int, with_patches: bool) -> MicroBatch:
    """`collate` with the constants of the source."""
    return collate(
        rows,
        seq_length=seq_length,
        image_token=source.image_token,
        pad_token=source.pad_token,
        pixel_shuffle=source.pixel_shuffle,
        patch_dim=source.patch_dim,
        with_patches=with_patches,
        mrope=source.mrope,
        with_sources=len(source.names) > 1,
        anyres_max_tiles=source.anyres_max_tiles,
    )
