from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megavlm.backend import activate
from tests.support.flags import MODELS
from tests.support.pool import Pools
from tests.support.training import SMALL, THREE, metrics, train

activate()  # before any test module imports megatron-core


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    started = Pools()
    yield started
    started.close()


@pytest.fixture(scope="session")
def run_once(pools: Pools, tmp_path_factory: pytest.TempPathFactory):
    """Return the folder of a run, which is made when it is first asked for."""
    made: dict[Any, Path] = {}

    def folder(world: int, argv: Sequence[str], run: Callable[..., Any] = train) -> Path:
        if (key := (world, run, *argv)) not in made:
            run_dir = tmp_path_factory.mktemp("once")
            pools(world).run(run, list(argv), str(run_dir))
            made[key] = run_dir
        return made[key]

    return folder


@pytest.fixture(scope="session")
def alone(run_once):
    """Return the metrics of a run on one process."""
    return lambda argv, run=train: metrics(run_once(1, [*argv, "--no-save"], run))


@pytest.fixture(scope="session")
def one_process(alone):
    """Return the metrics of one of the models on one process."""
    return lambda model, steps=THREE: alone([*SMALL, *MODELS[model].split(), *steps])
