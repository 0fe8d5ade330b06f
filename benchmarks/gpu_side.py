"""What `gpu_worker.py` asks of both sides, and what both measure with."""

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
    """When the language model's forward pass began and its backward pass ended: CUDA events, or seconds on a CPU."""

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
    """What steps trained on, and how long each waited for it."""

    tokens: int = 0
    places: int = 0  # that a sequence has, filled or not
    waited: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """Begin again, after the warm-up."""
        self.tokens = self.places = 0
        self.waited.clear()


class Side(ABC):
    """A program that trains."""

    attention = ""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.tally = Tally()

    @abstractmethod
    def build(self, shape: gpu_model.Shape, task: dict[str, Any], watch: Watch) -> Callable[[], float]:
        """A new model; returns its step, which gives the loss."""

    @abstractmethod
    def parameters(self) -> int:
        """How many numbers the model has."""

    @abstractmethod
    def standing(self) -> list[Tensor]:
        """What lives from step to step."""

    @abstractmethod
    def release(self) -> None:
        """Let the model go."""

    def machine(self) -> dict[str, Any]:
        """What is measured on."""
        if not self.on_gpu:
            return {"device": "CPU", "memory": 0}
        known = torch.cuda.get_device_properties(0)
        return {"device": known.name, "memory": known.total_memory}

    def peak_bytes(self, step: Callable[[], float]) -> int:
        """Most bytes of tensors alive during a step."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated()
        from megavlm.metrics.memory import LiveBytes

        with LiveBytes(self.standing()) as counter:
            step()
        return counter.peak


def pinned(values: dict[str, Any], *, pin: bool) -> dict[str, Any]:
    """Tensors in page-locked memory, where a GPU reads them while it computes."""
    return {k: v.contiguous().pin_memory() if pin and torch.is_tensor(v) else v for k, v in values.items()}


def attention_of(step: Callable[[], float], *, on_gpu: bool) -> list[str]:
    """The attention that one step runs, by the names that torch's profiler sees: operators and kernels, forward."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as trace:
        step()
    return attention_names(event.key for event in trace.key_averages())


def attention_names(names: Any) -> list[str]:
    """The parts of operators' and kernels' names that say which attention it is."""
    found = {match[0] for name in names if "backward" not in name.lower() and (match := _ATTENTION.search(name))}
    return sorted(found - {"scaled_dot_product_attention"})  # which only calls one of the others


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is for lack of device memory, whoever was refused it: torch, cuBLAS, cuDNN, NCCL or CUDA."""
    said = str(error).lower()
    marks = ("out of memory", "status_alloc_failed", "allocation_failed", "cudaerrormemoryallocation")
    return isinstance(error, torch.OutOfMemoryError) or any(mark in said for mark in marks)
