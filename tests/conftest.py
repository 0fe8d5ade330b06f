"""Settings that every test and its processes inherit, set before torch is imported; what runs beside what."""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # distributed tests run several processes on few cores
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # megatron-core compiles at import otherwise

# No property is about time, and on a busy machine an example may take longer than hypothesis's 200 ms.
settings.register_profile("megavlm", deadline=None)
settings.load_profile("megavlm")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let one worker run all tests that share process groups, which are dear to start, and the others file by file."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            shares = "pools" in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("process groups" if shares else item.path.name))
