"""Counts what a training step asks of a GPU, on a device that is not there: operations, bytes, Python calls, by layer.

An operation counts where it would launch kernels: views and allocations do not. Some launch several (a fused Adam one
for each few hundred tensors), none less than one. A layer's backward begins where the gradient of its output is ready,
and holds all that happens until the next one's is: gradients of weights, and adding them up, included.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.fake.device import NoDevice

_aten = torch.ops.aten
# Neither launch anything: memory, questions, marks. A scalar that is read is a wait, which `NoDevice` counts.
_MEMORY = ("empty", "new_empty", "detach", "lift_fresh", "_unsafe_view")
_NO_KERNEL = (*_MEMORY, "_local_scalar_dense", "_reshape_alias", "alias")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
_HOST_CODE = ("/megavlm/", "/megatron/", "/transformers/", "/torch/nn/", "/torch/autograd/", "/benchmarks/")


@dataclass
class Count:
    """Of one stretch of a step."""

    operations: Counter[str] = field(default_factory=Counter)
    moved_bytes: int = 0  # read and written by operations that are neither products nor attention
    python_calls: int = 0  # of functions of ours, megatron-core, Transformers and torch.nn

    @property
    def launches(self) -> int:
        return self.operations.total()

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "launches": self.launches}


class Counting(NoDevice):
    """A device that is not there, which writes down what each stretch of a step asks of it; `enter` begins one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Count] = {}
        self._inside = 0
        self.enter("before")

    def enter(self, name: str) -> None:
        self._now = self.counts.setdefault(name, Count())

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._pin_memory.default:  # needs the driver
            return args[0]
        self._inside += 1
        try:
            result = super().dispatch(func, types, args, kwargs)
        finally:
            self._inside -= 1
        if not self._inside:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        outputs = {argument.name for argument in func._schema.arguments if argument.is_out}
        inputs = {name: value for name, value in (kwargs or {}).items() if name not in outputs}
        read, written = _on_device((args, inputs)), _on_device(result)
        name = func._schema.name.partition("::")[2]
        if not (read or written) or func.is_view or func.namespace == "prim" or name.startswith(_NO_KERNEL):
            return
        self._now.operations[name] += 1
        if func.namespace != "c10d" and name not in _PRODUCTS and "attention" not in name and "attn" not in name:
            overwritten = {id(args[0])} if name in ("copy_", "fill_", "zero_") else set()
            self._now.moved_bytes += sum(size for key, size in read.items() if key not in overwritten)
            self._now.moved_bytes += sum((written or {0: 0}).values()) if written else _size(args[0])

    def profile(self, frame: Any, event: str, arg: Any) -> None:
        """For `sys.setprofile`: counts calls of Python functions, but for those of this device's own making."""
        if event == "call" and not self._inside and any(part in frame.f_code.co_filename for part in _HOST_CODE):
            self._now.python_calls += 1


def _on_device(values: Any) -> dict[int, int]:
    """Bytes of each tensor on the device, once."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {id(leaf): _size(leaf) for leaf in leaves if leaf.device.type == "cuda"}


def _size(tensor: Any) -> int:
    """Bytes that a pass over a tensor touches: an expanded one is as large as its memory."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def counted(mode: Counting, step: Callable[[], object]) -> dict[str, Count]:
    """What a step asks for, by stretch; the step before it has made what only a first one makes."""
    step()
    mode.counts.clear()
    mode.waits.clear()
    mode.enter("before")
    sys.setprofile(mode.profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return mode.counts


class _SiluBackward:
    """The operation where it is called by name; its overloads are torch's."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, grad: Any, x: Any) -> torch.Tensor:
        return _aten.hardswish_backward(grad, x)


def like_a_cuda_build() -> None:
    """Three functions that a CPU build of torch takes apart are single kernels each way in one for CUDA."""
    functional = torch.nn.functional

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
        return functional.layer_norm(x, shape, weight, None, eps or 1e-6)  # passes over memory as often

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        assert attn_mask is None, "flash attention takes no mask"
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]

    functional.rms_norm, functional.scaled_dot_product_attention = rms_norm, attention
    functional.silu = lambda x, inplace=False: functional.hardswish(x)  # one kernel each way, of as many bytes
    torch.ops.aten.silu_backward = _SiluBackward(_aten.silu_backward)
    original = torch.nn.Module.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A module without values takes another type parameter by parameter."""
        if not (args and isinstance(args[0], torch.dtype)):
            return original(self, *args, **kwargs)
        for module in self.modules():
            for name, param in module._parameters.items():
                if param is not None and param.is_floating_point():
                    module._parameters[name] = torch.nn.Parameter(param.detach().to(args[0]), param.requires_grad)
        return self

    torch.nn.Module.to = to
