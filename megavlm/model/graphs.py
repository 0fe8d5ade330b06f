"""Language layers as CUDA graphs (`--cuda-graphs`): one launch in place of some fifty, where launching takes longer
than computing. Kernels, and so numbers, are the same.

Captured are shapes, not values: calls with the shapes of the first training call are replayed, all others (evaluation,
other lengths) run as ever. megatron-core's own capture (`cuda_graph_impl`) is not used: its random states are
nothing that checkpoints can save, and it ends the run at the first call with another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megavlm.model.rotary import Rotation

Function = Callable[..., Tensor]
# Functions and sample arguments of each → functions that replay. `torch.cuda.make_graphed_callables`.
Capture = Callable[[tuple[Function, ...], tuple[tuple[Tensor, ...], ...]], Sequence[Function]]


class LayerGraphs:
    """The language layers of a chunk, captured together at the first training call: they share one pool of memory."""

    def __init__(self, layers: Mapping[str, nn.Module], *, capture: Capture | None = None) -> None:
        """`layers` in the order in which they run."""
        self._layers = dict(layers)
        self._capture = capture or cast(Capture, torch.cuda.make_graphed_callables)
        self._captured: Mapping[str, Function] | None = None
        self._shapes: list[Any] = []

    @property
    def captured(self) -> bool:
        return self._captured is not None

    def __call__(self, name: str, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Hidden states [S, B, H] after layer `name`."""
        given = (hidden, *rotation)
        layer = self._layers[name]
        if not (hidden.requires_grad and torch.is_grad_enabled() and layer.training):
            return _run(layer, *given)
        if self._captured is None:
            self._shapes = _shapes(given)
            functions = tuple(_Function(each, len(given)) for each in self._layers.values())
            samples = tuple((*_samples(given), *_aliases(each)) for each in self._layers.values())
            self._captured = dict(zip(self._layers, self._capture(functions, samples), strict=True))
        if _shapes(given) != self._shapes:
            return _run(layer, *given)
        return self._captured[name](*given, *layer.parameters())


@dataclass(frozen=True)
class _Function:
    """A layer as a function of `inputs` tensors and of its parameters, which is what can be captured."""

    layer: nn.Module
    inputs: int

    def __call__(self, *given: Tensor) -> Tensor:
        names = [name for name, _ in self.layer.named_parameters()]
        return _run(self.layer, *given[: self.inputs], parameters=dict(zip(names, given[self.inputs :], strict=True)))


def _run(layer: nn.Module, hidden: Tensor, *rotation: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the output of a layer, with its own parameters or those given."""
    others = {"attention_mask": None, "rotary_pos_emb": Rotation(*rotation), "packed_seq_params": None}
    found = layer(hidden, **others) if parameters is None else functional_call(layer, dict(parameters), hidden, others)
    output: Tensor = found[0]
    return output


def _aliases(layer: nn.Module) -> tuple[Tensor, ...]:
    """Return tensors with the memory of a layer's parameters, which a graph reads where they are.

    The parameters themselves cannot be captured: megatron-core keeps the nodes that accumulate their gradients, which
    belong to the default stream, and a capture must not touch that.
    """
    return tuple(param.detach().requires_grad_(param.requires_grad) for param in layer.parameters())


def _shapes(given: Sequence[Tensor]) -> list[Any]:
    return [(value.shape, value.dtype) for value in given]


def _samples(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Memory of the same shapes: what a graph reads its inputs from."""
    return tuple(torch.zeros_like(value).requires_grad_(value.requires_grad) for value in given)
