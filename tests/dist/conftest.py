from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.support.flags import MODELS
from tests.support.pool import Pools
from tests.support.training import SMALL, THREE, metrics, train


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    started = Pools()
    yield started
    started.close()


@pytest.fixture(scope="session")
def one_process(pools: Pools, tmp_path_factory: pytest.TempPathFactory):
    """Curve of a model on one process, computed once."""
    curves = {}

    def curve(model: str, steps: Sequence[str] = THREE):
        if (model, *steps) not in curves:
            run_dir = str(tmp_path_factory.mktemp("one"))
            pools(1).run(train, [*SMALL, "--no-save", *MODELS[model].split(), *steps], run_dir)
            curves[model, *steps] = metrics(run_dir)
        return curves[model, *steps]

    return curve
