"""Give a run of `--epochs` its number of iterations, which follows from its data."""

from __future__ import annotations

from megavlm.config.run_rules import with_train_iters
from megavlm.config.schema import Config
from megavlm.data.epochs import RunLength, run_length, windows_of
from megavlm.data.files import FilesSource
from megavlm.data.source import ComputedSource
from megavlm.parallel.groups import from_rank_0


def with_length(config: Config, source: ComputedSource | FilesSource, epoch: int, *, told: bool) -> Config:
    """Return the configuration with the number of iterations that rank 0 counts; the rank that is `told` prints it.

    Every rank calls it. `epoch` is the number of samples of an epoch.
    """
    if config.train.epochs is None:
        return config
    assert isinstance(source, FilesSource), "the configuration rules refuse this"

    def count() -> RunLength:
        return source.reads.wait(lambda: run_length(config, source, windows_of(config, epoch)))

    length = from_rank_0(count, RunLength(0, 0, None))
    if told:
        print(length.line(config), flush=True)
    return with_train_iters(config, length.iterations)
