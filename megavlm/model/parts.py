"""What an implementation of transformer layers says: which parts they have, and how they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatron.core.tensor_parallel.random import checkpoint
from torch import Tensor

from megavlm.model.activation import Activation
from megavlm.model.rotary import Rotary


@dataclass(frozen=True)
class Modules:
    """The parts of one transformer layer, each as megatron-core's specs take them."""

    norm: Any  # before attention and before the MLP
    column_linear: Any  # query, key and value; the MLP's first layer
    row_linear: Any  # attention's output; the MLP's second layer
    core_attention: Any
    activations: Mapping[str, Activation]  # of the MLP, by their names in the configuration
    rotary: Rotary = field(default_factory=Rotary)  # splits queries, keys and values, and turns them
    keys: Mapping[str, str] = field(default_factory=dict)  # prefixes of local names → those of checkpoints


@cache
def with_bias_inside(linear: type) -> type:
    """A parallel linear layer's class that adds its bias itself, where megatron-core's layers ask to be handed it.

    Transformer Engine then adds it where the product is written, and sums its gradient in the weight gradient's
    product: three passes less over the widest tensor.
    """

    def init(self: Any, *args: Any, skip_bias_add: bool, **kwargs: Any) -> None:
        linear.__init__(self, *args, skip_bias_add=False, **kwargs)  # type: ignore[misc]

    return type(linear.__name__, (linear,), {"__init__": init, "__module__": linear.__module__})


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
