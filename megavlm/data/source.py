"""Where samples come from: a pure function from a global index to a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from megavlm.config.data_source import data_source
from megavlm.config.schema import Config
from megavlm.data.batch import PackedBatch
from megavlm.data.digits import DigitsSource
from megavlm.data.sample import Row, Sample, collate
from megavlm.data.synthetic import SyntheticSource


class Source(Protocol):
    """An endless, randomly addressable stream of samples.

    `sample` depends on the seed and the index alone, so any rank of any layout can make any sample, and the position
    in the stream is one integer.
    """

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

    def sample(self, index: int) -> Sample: ...


def build_source(
    config: Config, *, run_dir: Path, rank: int = 0, barrier: Callable[[], None] = lambda: None
) -> SyntheticSource | DigitsSource:
    """The source that `--data` names.

    Rank 0 writes what the source stores in `run_dir` (the tokenizer); the others call `barrier` to wait for it.
    """
    if data_source(config) == "digits":
        return DigitsSource.build(config, run_dir=run_dir, rank=rank, barrier=barrier)
    return SyntheticSource(config)


def batch_of(source: Source, samples: Sequence[Sample], *, seq_length: int, with_patches: bool) -> PackedBatch:
    """A micro-batch of samples, each in a row of its own."""
    return batch_of_rows(source, [[sample] for sample in samples], seq_length=seq_length, with_patches=with_patches)


def batch_of_rows(source: Source, rows: Sequence[Row], *, seq_length: int, with_patches: bool) -> PackedBatch:
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
        anyres_max_tiles=source.anyres_max_tiles,
    )
