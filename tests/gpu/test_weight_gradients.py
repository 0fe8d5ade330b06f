"""Transformer Engine's own layers leave their weight gradients, and make the same ones as in one backward pass."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_transformer_engine_leaves_the_gradients_of_its_weights(transformer_engine: Any, kind: str) -> None:
    from megavlm.model.weight_gradients import WeightGradients, leave_weight_gradients

    options = {"bias": True, "params_dtype": torch.bfloat16, "device": "cuda"}
    plain: Any = getattr(transformer_engine, kind)(64, 96, **options)
    split: Any = deepcopy(plain)
    split.config = SimpleNamespace(fp8=None)
    gradients = WeightGradients()
    leave_weight_gradients(nn.ModuleList([split]), gradients)
    for micro_batch in range(2):  # weight passes lag behind
        x = torch.randn(32, 2, 64, device="cuda", dtype=torch.bfloat16)
        output = []
        for layer in (plain, split):
            given = x.clone().requires_grad_()
            with gradients.left_by(1, micro_batch):
                layer(given).square().sum().backward()
            output.append(given.grad)
        assert torch.equal(*output)
    assert split.weight.grad is None
    assert split.bias.grad is None
    for micro_batch in range(2):
        gradients.compute(1, micro_batch)
    for (name, ours), theirs in zip(split.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
