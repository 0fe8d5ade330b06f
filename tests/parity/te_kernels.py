"""Transformer Engine's kernels as its modules offer them (2.11), computed by torch: what they ask of their arguments,
the precision that they compute in, and which tensors come back. A call is counted by its name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

calls: Counter[str] = Counter()


def swiglu(input: Tensor, quantizer: Any) -> Tensor:
    return _activation("swiglu", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], input, quantizer)


def qgelu(input: Tensor, quantizer: Any) -> Tensor:
    return _activation("qgelu", lambda x: x * torch.sigmoid(1.702 * x), input, quantizer)


def dswiglu(grad: Tensor, input: Tensor, quantizer: Any) -> Tensor:
    gate, up = input.float().chunk(2, -1)
    parts = torch.ops.aten.silu_backward(grad.float() * up, gate), grad.float() * F.silu(gate)
    return _rounded("dswiglu", torch.cat(parts, -1), input, quantizer)


def dqgelu(grad: Tensor, input: Tensor, quantizer: Any) -> Tensor:
    return _rounded("dqgelu", torch.ops.aten.silu_backward(grad.float(), 1.702 * input.float()), input, quantizer)


def _activation(name: str, function: Any, x: Tensor, quantizer: Any) -> Tensor:
    return _rounded(name, function(x.float()), x, quantizer)


def _rounded(name: str, exact: Tensor, like: Tensor, quantizer: Any) -> Tensor:
    assert quantizer is None, "would come back as a tensor of FP8"
    assert not torch.is_grad_enabled(), "kernels know no autograd"
    calls[name] += 1
    return exact.to(like.dtype).contiguous()


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


_MODULES = {
    "transformer_engine_torch": _module(
        "transformer_engine_torch", swiglu=swiglu, dswiglu=dswiglu, qgelu=qgelu, dqgelu=dqgelu
    )
}


@contextmanager
def importable() -> Iterator[None]:
    """In it megavlm imports these where it asks for Transformer Engine's."""
    before = {name: sys.modules.get(name) for name in _MODULES}
    sys.modules.update(_MODULES)
    yield
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module
