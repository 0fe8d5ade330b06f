"""Define the interface of both sides of `gpu_vlm.py`, and the instruments that both use."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gpu_model
import torch
from torch import Tensor

MODEL_FILE = "theirs"  # folder of the weights that both sides start from, in a task's `weights`
_ATTENTION = re.compile(r"scaled_dot_product\w*attention\w*|sdpa\w*?fprop|flash\w*?fprop|flash_fwd\w*|fmha\w*")


@dataclass
class Watch:
    """Measures from the language model's first forward to its last backward: CUDA events, or seconds on a CPU."""

    on_gpu: bool
    began: Any = None
    ended: Any = None
    seconds: list[float] = field(default_factory=list)

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        """A forward pre-hook of the first layer: its input's gradient is the last thing that backward makes there.

        A layer that is computed again during the backward pass begins nothing.
        """
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if self.began is not None and self.ended is None:
            return
        self.began, self.ended = self._now(), None
        hidden.register_hook(self._end)

    def _end(self, gradient: Tensor) -> None:
        self.ended = self._now()

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self) -> None:
        """After a step, when the device is idle."""
        took = self.began.elapsed_time(self.ended) / 1e3 if self.on_gpu else self.ended - self.began
        self.seconds.append(took)


@dataclass
class Tally:
    """Counts the tokens that steps trained on, and the time that each waited for data."""

    tokens: int = 0
    positions: int = 0  # that a sequence has, filled or not
    waited: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """Reset after the warm-up."""
        self.tokens = self.positions = 0
        self.waited.clear()


class Side(ABC):
    """A program that trains."""

    attention = ""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.tally = Tally()

    @abstractmethod
    def build(self, shape: gpu_model.Shape, task: dict[str, Any], watch: Watch) -> Callable[[], float | Tensor]:
        """Build a new model; return its step, which returns the loss."""

    @abstractmethod
    def parameters(self) -> int:
        """Return the number of parameters."""

    @abstractmethod
    def standing(self) -> list[Tensor]:
        """Return the tensors that persist between steps."""

    @abstractmethod
    def release(self) -> None:
        """Free the model."""

    def machine(self) -> dict[str, Any]:
        """Return the device and its memory."""
        if not self.on_gpu:
            return {"device": "CPU", "memory": 0}
        known = torch.cuda.get_device_properties(0)
        return {"device": known.name, "memory": known.total_memory}

    def peak_bytes(self, step: Callable[[], float | Tensor]) -> int:
        """Return the peak bytes of tensors during a step."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated()
        from tests.support.live_bytes import LiveBytes

        with LiveBytes(self.standing()) as counter:
            step()
        return counter.peak


def pinned(values: dict[str, Any], *, pin: bool) -> dict[str, Any]:
    """Return the tensors in page-locked memory, from which a GPU copies while it computes."""
    return {k: v.contiguous().pin_memory() if pin and torch.is_tensor(v) else v for k, v in values.items()}


def attention_of(step: Callable[[], float | Tensor], *, on_gpu: bool) -> list[str]:
    """Return the names of the attention operators and kernels of one forward pass, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as trace:
        step()
    return attention_names(event.key for event in trace.key_averages())


def attention_names(names: Any) -> list[str]:
    """Return the parts of operators' and kernels' names that identify the attention."""
    found = {match[0] for name in names if "backward" not in name.lower() and (match := _ATTENTION.search(name))}
    return sorted(found - {"scaled_dot_product_attention"})  # which only calls one of the others


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means too little device memory, for torch, cuBLAS, cuDNN, NCCL or CUDA."""
    said = str(error).lower()
    marks = ("out of memory", "status_alloc_failed", "allocation_failed", "cudaerrormemoryallocation")
    return isinstance(error, torch.OutOfMemoryError) or any(mark in said for mark in marks)
