from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
def alone(pools: Pools, tmp_path_factory: pytest.TempPathFactory):
    """Return the metrics of a run on one process, which is computed once."""
    curves: dict[Any, list[dict[str, Any]]] = {}

    def curve(argv: Sequence[str], run: Callable[..., Any] = train) -> list[dict[str, Any]]:
        if (run, *argv) not in curves:
            run_dir = str(tmp_path_factory.mktemp("one"))
            pools(1).run(run, [*argv, "--no-save"], run_dir)
            curves[run, *argv] = metrics(run_dir)
        return curves[run, *argv]

    return curve


@pytest.fixture(scope="session")
def one_process(alone):
    """Return the metrics of one of the models on one process."""
    return lambda model, steps=THREE: alone([*SMALL, *MODELS[model].split(), *steps])
