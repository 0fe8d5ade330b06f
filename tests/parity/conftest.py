"""One process as a world of its own, with megatron-core on CPU, for every parity test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from megavlm.backend import activate

BACKEND = activate()  # before any test module imports megatron-core


@pytest.fixture(scope="module")
def single() -> Iterator[Any]:
    """The backend and the groups of a world of one."""
    from megavlm.arch.dims import Dims
    from megavlm.parallel.groups import build_groups, destroy_groups
    from megavlm.parallel.rendezvous import start
    from tests.support.harness import Single

    start(BACKEND, timeout_minutes=1)
    destroy_groups()  # of a conversion that a test ran before
    found = Single(BACKEND, build_groups(Dims(), tied_owners=(0, 0), seed=1, timeout_minutes=1))
    yield found
    for engine in found.engines:
        engine.close()  # what it holds would keep the groups' threads
    destroy_groups()
    dist.destroy_process_group()
