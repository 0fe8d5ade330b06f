"""Tests that need a GPU. Elsewhere each is skipped and says why; MEGAVLM_GPU_TESTS=cpu runs what can run on a CPU.

The latter is a rehearsal: the same code with CPU kernels, to find mistakes in the tests before there is a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
REHEARSED = os.environ.get("MEGAVLM_GPU_TESTS") == "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not (torch.cuda.is_available() or REHEARSED):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def world() -> Iterator[Any]:
    """The backend, in a world of one process."""
    from megavlm.backend import activate

    backend = activate()  # before anything imports megatron-core
    from megavlm.parallel.groups import destroy_groups
    from megavlm.parallel.rendezvous import start

    start(backend, timeout_minutes=2)
    yield backend
    destroy_groups()


@pytest.fixture(scope="session")
def transformer_engine(world: Any) -> Any:
    """Transformer Engine's torch module, where there is one for this device."""
    if world.is_cpu:
        pytest.skip("Transformer Engine needs a CUDA device")
    if find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed: pip install --no-build-isolation -e '.[gpu]'")
    import transformer_engine.pytorch as module

    return module
