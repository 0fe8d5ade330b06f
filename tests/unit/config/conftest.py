from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from megavlm.command_line import parsing


@pytest.fixture(scope="module")
def one_parser() -> Iterator[None]:
    """Build the parser of all options once, for modules that ask it a thousand times and load no extension."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "_parser", functools.cache(parsing._parser))
        yield
