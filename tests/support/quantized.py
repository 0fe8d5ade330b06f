"""What Transformer Engine's FP8 tensors are to megatron-core, in plain torch: for tests of weights kept in FP8.

One scale per tensor from its present values, as `--fp8-recipe tensorwise`; layers multiply in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

E4M3 = torch.float8_e4m3fn


class Quantized(Tensor):
    """Looks like a bf16 tensor; holds e4m3 numbers as bytes, and what they are to be divided by."""

    _data: Tensor
    _scale: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Quantized:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self._data, self._scale = data, scale

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0]._data, args[0]._scale)
        plain = tree_map(lambda x: x.dequantize() if isinstance(x, cls) else x, (args, kwargs or {}))
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].round_from(plain[0][1])
            return args[0]
        assert not func._schema.is_mutable, f"{func} would change a copy"
        return func(*plain[0], **plain[1])

    def dequantize(self) -> Tensor:
        return (self._data.view(E4M3).float() / self._scale).bfloat16()

    def round_from(self, plain: Tensor) -> None:
        self._scale.copy_(448 / plain.abs().max().float())
        self._data.copy_((plain.bfloat16().float() * self._scale).to(E4M3).view(torch.uint8))


def _moved(tensor: Quantized, storage: Tensor) -> None:
    storage.copy_(tensor._data)
    tensor._data = storage


def _rounded_shards(params: Any, mains: Any, starts: Any, group: Any, _: Any = None) -> None:
    """Each rank rounds its part of a weight; ranks agree on the scale first."""
    for param, main, start in zip(params, mains, starts, strict=True):
        largest = torch.zeros(()) if main is None else main.bfloat16().float().abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        param._scale.copy_(448 / largest)
        if main is not None:
            numbers = (main.bfloat16().float() * param._scale).to(E4M3).view(torch.uint8)
            param._data.view(-1)[start : start + main.numel()] = numbers


class _Done:
    """The handle of communication that is over."""

    def wait(self) -> None: ...


def at_once(communicate: Any) -> Any:
    """A collective that nobody needs to wait for."""
    return lambda *args, **kwargs: communicate(*args, **{**kwargs, "async_op": False})


@contextmanager
def transformer_engine() -> Iterator[None]:
    """In it this process believes that Transformer Engine is there."""
    import megatron.core.extensions
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer

    from megavlm.model import layer_modules
    from megavlm.train import build
    from tests.support import stand_ins, te_kernels

    kept: list[bool] = [False]

    @contextmanager
    def making() -> Iterator[None]:
        kept[0] = True
        yield
        kept[0] = False

    def in_fp8(linear: Any) -> type:
        class Linear(linear):
            weight: Any

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                if kept[0]:
                    noted = vars(self.weight)
                    # Transformer Engine allocates, calls the initialiser, and rounds what it finds then.
                    begun = kwargs["init_method"](torch.full_like(self.weight, torch.nan))
                    assert begun.isfinite().all(), "what memory held by chance was rounded"
                    storage = torch.zeros(self.weight.shape, dtype=torch.uint8)
                    self.weight = nn.Parameter(Quantized(storage, torch.ones(())))
                    vars(self.weight).update(noted)

        return Linear

    names = ("TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear")
    linears = {name: in_fp8(getattr(stand_ins.EXTENSION, name)) for name in names}
    extension = SimpleNamespace(**{**vars(stand_ins.EXTENSION), **linears})
    with ExitStack() as stack:
        stack.enter_context(te_kernels.importable())
        for owner, name, value in (
            (layer_modules, "implementation", lambda config: "te"),
            (build, "check_device", lambda config: None),
            (megatron.core.extensions, "transformer_engine", extension),
            (fp8_utils, "get_fp8_context", lambda config, is_init=False: making() if is_init else nullcontext()),
            # gloo gathers what is coalesced as one type: bytes and bf16 numbers come out mixed up. So one after the
            # other, at once; who asked for a handle gets one.
            (param_and_grad_buffer, "_coalescing_manager", lambda group, async_ops: nullcontext(_Done())),
            (param_and_grad_buffer, "dist_all_gather_func", at_once(param_and_grad_buffer.dist_all_gather_func)),
            (
                param_and_grad_buffer,
                "dist_reduce_scatter_func",
                at_once(param_and_grad_buffer.dist_reduce_scatter_func),
            ),
            (fp8_utils, "is_te_min_version", lambda version: True),
            (fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True),
            (fp8_utils, "FP8_TENSOR_CLASS", Quantized),
            (fp8_utils, "_modify_underlying_storage_impl", _moved),
            (fp8_utils, "_quantize_param_shard_impl", _rounded_shards),
        ):
            stack.enter_context(patch.object(owner, name, value, create=True))
        yield
