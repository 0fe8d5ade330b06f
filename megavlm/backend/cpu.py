"""Patches that let megatron-core run on CPU.

megatron-core names its device literally ("cuda", `torch.cuda.current_device()`). Rather than intercept every torch
call at run time, we give each of its modules another `torch`: a proxy with the same names, whose tensor factories
treat "cuda" as "cpu" and whose `torch.cuda` describes the CPU. A hot path never passes through the proxy's
`__getattr__` twice (attributes are cached on first use), so the cost of the interception is too small to measure
(`benchmarks/cpu_step.py` prints it).

Patched outside megatron-core: `Tensor.type()` without arguments (the optimizers compare its result with
"torch.cuda.FloatTensor") and `Tensor.cuda()` (identity).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from megavlm.backend import gloo, installed, patches

# All modules of megatron-core that a run uses, imported here so that none of them binds the real torch later.
_MODULES = (
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.transformer_layer",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.extensions.transformer_engine",
)
_FACTORIES = "arange empty empty_like full ones ones_like rand randn tensor zeros zeros_like".split()


def install() -> None:
    """Make megatron-core importable and runnable without CUDA. Idempotent."""
    if isinstance(getattr(sys.modules.get("megatron.core.parallel_state"), "torch", None), _CpuTorch):
        return
    assert "megatron.core" not in sys.modules, "activate the backend before anything imports megatron-core"
    # Warnings that do not matter on a CPU: "Transformer Engine and Apex are not installed", "set
    # CUDA_DEVICE_MAX_CONNECTIONS".
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    installed.hide()  # on CPU-only torch its import fails; else megatron-core would use layers that need CUDA
    installed.import_without_triton()
    with _without_compilation(), installed.without(*installed.UNUSED_BY_MEGATRON_CORE):
        for name in _MODULES:
            importlib.import_module(name)
    proxy = _CpuTorch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = proxy  # type: ignore[attr-defined]
    _patch_tensor_methods()
    _patch_rng()
    _patch_gradient_passes()
    gloo.install_gathers()
    patches.install()


class _CpuTorch(types.ModuleType):
    """Proxy for `torch` in megatron-core on CPU: tensor factories create CPU tensors, and `cuda` is `_CpuCuda`."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCuda()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        setattr(self, name, value)
        return value


class _CpuCuda(types.ModuleType):
    """Stand-in for `torch.cuda` on CPU: one device, synchronous operations, the default random generator."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        for name in ("current_device", "device_count", "set_device", "synchronize", "stream"):
            setattr(self, name, getattr(torch.cpu, name))
        self.empty_cache = torch.cpu.synchronize
        self.current_stream = self.default_stream = self.Stream = self.Event = _InOrder
        self.nvtx = _InOrder()
        self.get_rng_state = lambda device=None: torch.get_rng_state()
        self.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        # Not torch.manual_seed: that calls torch.cuda.manual_seed, which megatron-core may have routed here.
        self.manual_seed = torch.default_generator.manual_seed

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _InOrder:
    """Stand-in for a stream or an event. CPU work runs in order, so methods do nothing, and every event has passed."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or str(device).startswith("cuda")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


@contextlib.contextmanager
def _without_compilation() -> Any:
    # `megatron.core.jit.jit_fuser` is torch.compile, bound at import: inductor would compile small helpers with
    # the C++ compiler at first use. Plain Python is faster to start and as fast to run at these sizes.
    def identity(function: Any = None, **kwargs: Any) -> Any:
        return function if function is not None else identity

    original = torch.compile
    torch.compile = identity  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def _patch_tensor_methods() -> None:
    original = torch.Tensor.type

    @functools.wraps(original)
    def typed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = typed  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _patch_rng() -> None:
    # megatron-core keeps a "CUDA" generator state in addition to the CPU's and swaps states in it. Its setter is a lazy
    # no-op without CUDA: dropout and recomputation would silently use wrong numbers. The "CUDA" state of a CPU run
    # is the default generator's.
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random.CudaRNGStatesTracker.fork = _fork


@contextlib.contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Any:
    """`CudaRNGStatesTracker.fork` without its check that the CPU generator is unused, since both are the same here."""
    if name not in tracker.states_:
        raise KeyError(f"random state {name} was never added")
    outer = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outer)


def _patch_gradient_passes() -> None:
    # Passes over all gradients that change nothing: gloo's reduce-scatter and all-gather copy their buffers even in a
    # group of one, where the shard that they fill is the buffer itself.
    buffers: Any = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    buffers.dist_reduce_scatter_func = _unless_alone(buffers.dist_reduce_scatter_func)
    buffers.dist_all_gather_func = _unless_alone(buffers.dist_all_gather_func)


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def communicate(output: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs["group"].size() == 1 and output.data_ptr() == source.data_ptr():
            return None
        return collective(output, source, *args, **kwargs)

    return communicate
