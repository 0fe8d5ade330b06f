"""What an implementation of transformer layers says: which parts they have, and how they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from megatron.core.tensor_parallel.random import checkpoint
from torch import Tensor


@dataclass(frozen=True)
class Modules:
    """The parts of one transformer layer, each as megatron-core's specs take them."""

    norm: Any  # before attention and before the MLP
    column_linear: Any  # query, key and value; the MLP's first layer
    row_linear: Any  # attention's output; the MLP's second layer
    core_attention: Any
    keys: Mapping[str, str] = field(default_factory=dict)  # prefixes of local names → those of checkpoints


class Execution:
    """How layers run, around their parts. Here: as they are."""

    def chunk(self, layers: Sequence[tuple[str, Any]]) -> AbstractContextManager[Any]:
        """Around a pass through a chunk with these transformer layers."""
        return nullcontext()

    def layer(self, name: str, layer: Any) -> AbstractContextManager[Any]:
        """Around one of them."""
        return nullcontext()

    def recomputed(self, layer: Any, run: Any, hidden: Tensor) -> Tensor:
        """`run(hidden)` of a layer, of which nothing is kept: it is called again in the backward pass."""
        return checkpoint(run, False, hidden)
