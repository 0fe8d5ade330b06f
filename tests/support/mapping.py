"""Turn tensors of Transformers, weights or gradients, into megatron-core's by the tables that read checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megavlm.families.shared.table import Rule, Shape, Table, Transpose

Tensors = Mapping[str, Tensor]


def to_ours(tensors: Tensors, table: Table, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return megatron-core tensors of these `shapes`; what depends on nothing (and has no gradient) is left out."""
    found = {}
    for key, rule in table.items():
        present = [name in tensors for name in rule.hf_names]
        assert all(present) or not any(present), f"only some of {rule.hf_names} exist"
        if all(present):
            found[key] = _joined(tensors, rule, shapes[key])
    return found


def _joined(tensors: Tensors, rule: Rule, shape: Shape) -> Tensor:
    """Return the rows that a rule names, joined to a megatron-core tensor of this shape."""
    if isinstance(rule, Transpose):
        return tensors[rule.hf_name].T
    flat = {name: tensors[name].reshape(-1, *shape[1:]) for name in rule.hf_names}
    return torch.cat([flat[rows.name][rows.start : rows.start + rows.count] for rows in rule.hf_rows(shape)])


def shapes_of(model: torch.nn.Module) -> dict[str, Shape]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}
