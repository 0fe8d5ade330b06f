"""Language layers as CUDA graphs (`--cuda-graphs`): one launch in place of some fifty, where launching takes longer
than computing. Kernels, and so numbers, are the same.

Captured are shapes, not values: calls with the shapes of the first training call are replayed, all others (evaluation,
other lengths) run as ever. megatron-core's own capture (`cuda_graph_impl`) is not used: its random states are
nothing that checkpoints can save, and it ends the run at the first call with another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megavlm.model.rotary import Rotation

# Modules and sample arguments of each → modules that replay. `torch.cuda.make_graphed_callables`.
Capture = Callable[[tuple[nn.Module, ...], tuple[tuple[Tensor, ...], ...]], Sequence[Any]]


class LayerGraphs:
    """The language layers of a chunk, captured together at the first training call: they share one pool of memory."""

    def __init__(self, layers: Mapping[str, nn.Module], *, capture: Capture | None = None) -> None:
        """`layers` in the order in which they run."""
        self._layers = {name: _Plain(layer) for name, layer in layers.items()}
        self._capture: Capture = torch.cuda.make_graphed_callables if capture is None else capture
        self._captured: Mapping[str, Any] | None = None
        self._shapes: list[Any] = []

    def __call__(self, name: str, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Hidden states [S, B, H] after layer `name`."""
        given = (hidden, *rotation)
        plain = self._layers[name]
        if not (hidden.requires_grad and torch.is_grad_enabled() and plain.layer.training):
            return plain.layer_alone(*given)
        if self._captured is None:
            self._shapes = _shapes(given)
            samples = tuple(_samples(given) for _ in self._layers)
            found = self._capture(tuple(self._layers.values()), samples)
            self._captured = dict(zip(self._layers, found, strict=True))
        run = self._captured[name] if _shapes(given) == self._shapes else plain.layer_alone
        return run(*given)


class _Plain(nn.Module):
    """A layer as a function of tensors alone, which is what can be captured."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, *rotation: Tensor) -> Tensor:
        return self.layer_alone(hidden, *rotation)

    def layer_alone(self, hidden: Tensor, *rotation: Tensor) -> Tensor:
        """Return the layer itself, with no graph: capturing replaces `forward` in place, for evaluation as well."""
        turns = Rotation(*rotation)
        output: Tensor = self.layer(hidden, attention_mask=None, rotary_pos_emb=turns, packed_seq_params=None)[0]
        return output


def _shapes(given: Sequence[Tensor]) -> list[Any]:
    return [(value.shape, value.dtype) for value in given]


def _samples(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Memory of the same shapes: what a graph reads its inputs from."""
    return tuple(torch.zeros_like(value).requires_grad_(value.requires_grad) for value in given)
