"""From names and shapes of Transformers to ours, by the tables that read checkpoints: weights and gradients alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megavlm.families.shared.table import Rule, Shape, Table, Transpose

Tensors = Mapping[str, Tensor]


def to_ours(tensors: Tensors, table: Table, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Our tensors, of our `shapes`; what depends on nothing (and has no gradient) is left out on both sides."""
    found = {}
    for key, rule in table.items():
        present = [name in tensors for name in rule.names]
        assert all(present) or not any(present), f"only some of {rule.names} exist"
        if all(present):
            found[key] = _joined(tensors, rule, shapes[key])
    return found


def _joined(tensors: Tensors, rule: Rule, shape: Shape) -> Tensor:
    """The rows that a rule names, of tensors flattened to rows of ours."""
    if isinstance(rule, Transpose):
        return tensors[rule.name].T
    rows = {name: tensors[name].reshape(-1, *shape[1:]) for name in rule.names}
    return torch.cat([rows[span.name][span.start : span.start + span.rows] for span in rule.spans(shape)])


def shapes_of(model: torch.nn.Module) -> dict[str, Shape]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}
