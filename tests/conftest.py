"""Settings that every test and its processes inherit, set before torch is imported; what runs beside what."""

import gc
import os
import sys
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # distributed tests run several processes on few cores
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # megatron-core compiles at import otherwise

# What is imported and collected stays until the end, and passes over it find nothing: a fifth of the time it takes.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give tiny models the same weights in each run: with others, two of them might answer alike by chance."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(2)


# No property is about time, and on a busy machine an example may take longer than hypothesis's 200 ms.
settings.register_profile("megavlm", deadline=None)
settings.load_profile("megavlm")


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal tests/dist in two halves, whose process groups stay from file to file, and the others file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if not file.startswith("tests/dist/"):
                return file
            return "tests/dist a-h" if file < "tests/dist/test_i" else "tests/dist i-z"  # as dear as each other

    return Scheduling(config, log)
