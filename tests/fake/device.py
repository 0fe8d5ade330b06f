"""A CUDA device that is not there: tensors with `device="cuda"` and shapes, and no values.

torch's fake tensors know which operation wants which device and shape, and raise where tensors of two devices meet.
Tensors on the CPU stay real, so that data, files and arithmetic on the host go on as ever. What would make the host
wait for a device is written down, with the line of the program that asked.
"""

from __future__ import annotations

import ctypes
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[2]
PRODUCT = str(ROOT / "megavlm")
# The numbers that must not be one: failures of a save, and the scale of fp16, whose steps all overflow: 1 ends a run.
_NUMBERS = {"save_state_dict_async_finalize": 0, "build_optimizer.py loss_scale": 2}
_aten = torch.ops.aten


class NoDevice(FakeTensorMode):
    """Operations on tensors of the device that is not there; `waits` counts what a training step would wait for."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.waits: Counter[str] = Counter()
        self.pinned: set[int] = set()
        self.rows: set[int] = set()  # pinned where they were, as those of offloaded parameters are
        self.fetched = 0  # copies of rows to the device

    @property
    def avoid_device_init(self) -> bool:
        return True  # there is none, whatever `torch.cuda.is_available` says

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        fake = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        target = kwargs.get("device")
        pin = kwargs.pop("pin_memory", None)
        if not fake and func is _aten._pin_memory.default:
            result = args[0].clone()
            self.rows.add(result.untyped_storage()._cdata)
            return result
        if not fake and func is _aten.is_pinned.default:
            return args[0].untyped_storage()._cdata in self.rows | self.pinned
        if not fake and (target is None or torch.device(target).type != "cuda"):
            result = func(*args, **kwargs)
            if pin:
                self.pinned.add(result.untyped_storage()._cdata)
            return result
        if func is _aten.empty_like.default and target is not None and torch.device(target).type == "meta":
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="meta")  # not a fake
        assert not pin, f"{func} wants pinned memory on a device"
        if func.namespace == "c10d":
            return _communicated(func, args, leaves)
        if func is _aten._local_scalar_dense.default:
            where = self.wait_for(func.name())
            value = next((value for place, value in _NUMBERS.items() if where.endswith(place)), 1)
            return torch.full((), value, dtype=args[0].dtype).item()
        if func is _aten.nonzero.default:  # all of them
            self.wait_for(func.name())
            with self:
                return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=args[0].device)
        if func is _aten.is_pinned.default:
            return False
        self._look_at_copy(func, args, kwargs, leaves)
        return super().dispatch(func, types, args, kwargs)

    def _look_at_copy(self, func: Any, args: Any, kwargs: Any, leaves: list[torch.Tensor]) -> None:
        if func is _aten._to_copy.default:
            source, target = args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type
            waits = not kwargs.get("non_blocking")
            self.fetched += target == "cuda" and args[0].untyped_storage()._cdata in self.rows
        elif func is _aten.copy_.default:
            source, target = args[1].device.type, args[0].device.type
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        elif func in (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default):
            indices = [index for index in args[1] if index is not None]
            source, target, waits = args[0].device.type, args[0].device.type, False
            fills = func is not _aten.index.Tensor and args[2].numel() == 1  # becomes masked_fill
            asks = any((i.dtype is torch.bool and not fills) or i.device != args[0].device for i in indices)
            if asks:
                self.wait_for(func.name())
        else:
            return
        if source != target and waits:
            self.wait_for(func.name())

    def wait_for(self, what: str) -> str:
        """Write down what a training step waits for, with its place in the program and in megatron-core."""
        stack = traceback.extract_stack()
        frames = [frame for frame in stack if "/megatron/" in frame.filename or _ours(frame)]
        shown = frames[-1:] if not frames or _ours(frames[-1]) else [next(filter(_ours, frames[::-1])), frames[-1]]
        where = " > ".join(f"{Path(frame.filename).name} {frame.name}" for frame in shown)
        if any(frame.name == "train_step" for frame in stack):
            self.waits[f"{what} at {where}"] += 1
        return where


def _ours(frame: Any) -> bool:
    return bool(frame.filename.startswith(PRODUCT))


def _communicated(func: Any, args: Any, tensors: list[torch.Tensor]) -> Any:
    """A collective that moves nothing: NCCL takes contiguous tensors on the device, of sizes that fit each other."""
    name = func._schema.name.removeprefix("c10d::")
    for tensor in tensors:
        assert tensor.device.type == "cuda", f"NCCL is asked to {name} a tensor on the {tensor.device}"
        assert tensor.is_contiguous(), f"NCCL is asked to {name} a tensor that is not contiguous"
    if name in ("_allgather_base_", "_reduce_scatter_base_"):
        group = torch.distributed.ProcessGroup.unbox(args[2])
        whole, part = args[:2] if name == "_allgather_base_" else args[1::-1]
        assert whole.numel() == part.numel() * group.size(), (
            f"{name}: {whole.shape} is not {group.size()} × {part.shape}"
        )
    if name == "alltoall_base_":
        output, source, _, received, sent = args[:5]
        assert not received or sum(received) == len(output), f"{name}: {len(output)} rows for {received}"
        assert not sent or sum(sent) == len(source), f"{name}: {len(source)} rows for {sent}"
    work = FakeWork().boxed()
    return (args[0], work) if len(func._schema.returns) == 2 else work


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream = torch.device("cuda", 0), 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, _Stream)

    def wait_event(self, event: Any) -> None:
        assert isinstance(event, _Event)

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        return 1.0


class _Generator:
    """Stands for `torch.cuda.default_generators[i]`: a state of bytes on the host, as CUDA's is."""

    def __init__(self) -> None:
        self.state = torch.zeros(16, dtype=torch.uint8)

    def get_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        assert state.device.type == "cpu"
        assert state.dtype == torch.uint8
        self.state = state.clone()

    def manual_seed(self, seed: int) -> Any:
        self.state = torch.frombuffer(bytearray(seed.to_bytes(16, "little")), dtype=torch.uint8)
        return self


def pretend(library: str) -> None:
    """Let torch say that there are devices. `library` is the shim, loaded before torch."""
    ctypes.CDLL(library).install()
    torch.autograd.set_multithreading_enabled(False)
    generator, stream = _Generator(), _Stream()
    properties = SimpleNamespace(
        name="No device", total_memory=80 * 2**30, multi_processor_count=132, major=9, minor=0, uuid="none"
    )
    memory = {"allocated_bytes.all.current": 1, "allocated_bytes.all.peak": 1}
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "No device",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "Stream": _Stream,
        "Event": _Event,
        "ExternalStream": _Stream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "stream": lambda stream: stream or _Stream(),
        "memory_allocated": lambda device=None: 1,
        "max_memory_allocated": lambda device=None: 1,
        "memory_reserved": lambda device=None: 1,
        "max_memory_reserved": lambda device=None: 1,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: memory,
        "mem_get_info": lambda device=None: (79 * 2**30, 80 * 2**30),
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "default_generators": (generator,) * 8,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    for name, answer in answers.items():
        assert hasattr(torch.cuda, name), f"torch.cuda has no {name}"
        setattr(torch.cuda, name, answer)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda.random, name, answers[name])
    torch.cuda.nvtx = SimpleNamespace(range_push=lambda message: None, range_pop=lambda: None)
    torch.cuda.nccl.version = lambda: (2, 27, 5)
    torch.version.cuda = "12.9"
    _move_modules()
    _read_values()
    _pin_in_threads()


def _read_values() -> None:
    """Methods that look into a tensor's memory, below operations."""
    make = torch.tensor

    def tensor(data: Any, **kwargs: Any) -> torch.Tensor:
        return make(_as_numbers(data), **kwargs)

    def tolist(self: FakeTensor) -> Any:
        self.fake_mode.wait_for("tolist")
        return torch.zeros(self.shape, dtype=self.dtype).tolist()

    torch.tensor = tensor
    FakeTensor.tolist = tolist
    torch.Tensor.record_stream = lambda self, stream: None


def _pin_in_threads() -> None:
    """The mode is one thread's: in others, which read data, page-locked memory of the host is memory of the host."""
    make = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        watched = _get_current_dispatch_mode() is not None
        return make(*args, pin_memory=pin_memory and watched, **kwargs)

    torch.empty = empty


def _as_numbers(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_as_numbers(each) for each in data]
    return data.item() if isinstance(data, FakeTensor) else data


def _move_modules() -> None:
    """`Module.to(device)` keeps its parameter objects where it can; a real one cannot hold a tensor without values."""
    original = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        device = args[0] if args else kwargs.get("device")
        if not isinstance(device, torch.device | str) or torch.device(device).type != "cuda":
            return original(self, *args, **kwargs)
        for module in self.modules():
            for name, param in module._parameters.items():
                if param is not None and param.device.type != "cuda":
                    moved = torch.nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
                    vars(moved).update(vars(param))
                    module._parameters[name] = moved
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        return self

    torch.nn.Module.to = to
