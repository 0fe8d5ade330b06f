"""What sources of computed samples have in common: one piece per number, and nothing that could be bad."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn

from megavlm.data.sample import Sample


class ComputedSource(ABC):
    """A source whose samples are a pure function of their number."""

    names: tuple[str, ...] = ()

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """Sample `index` of the stream."""

    def pieces(self, item: int) -> tuple[Sample, ...]:
        return (self.sample(item),)

    def measure(self, item: int) -> NoReturn:
        raise AssertionError("samples of one length need not be measured")

    def skipped(self, item: int, error: Any) -> NoReturn:
        raise AssertionError("nothing is wrong with a computed sample")
