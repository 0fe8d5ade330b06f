from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pool import Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    started = Pools()
    yield started
    started.close()
