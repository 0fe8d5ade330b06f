"""One side of `gpu_vlm.py` in a process of its own: builds a model, makes steps, lets it go, as often as it is told.

Reads a task as a line of JSON on its standard input and writes what it measured to the file that the task names. A side
that runs out of memory, or fails, answers so: the others are measured all the same.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_model
import torch
from theirs import OPTIMIZER, their_optimizer
from torch import Tensor

from megavlm.data.batch import PackedBatch

MODEL_FILE = "theirs"  # folder of the weights that both sides start from, in a task's `weights`


def main() -> None:
    sides: dict[str, type[_Side]] = {"megavlm": _Ours, "transformers": _Theirs}
    side = sides[sys.argv[1]](device=sys.argv[2])
    print(json.dumps(side.machine()), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = run(side, task)
        except torch.OutOfMemoryError:
            answer = {"error": "out of memory"}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        side.release()
        gc.collect()
        if side.on_gpu:
            torch.cuda.empty_cache()
            answer["left_bytes"] = torch.cuda.memory_allocated()
        Path(task["answer"]).write_text(json.dumps(answer))
        print(json.dumps("done"), flush=True)


@dataclass
class Watch:
    """When the language model's forward pass began and its backward pass ended: CUDA events, or seconds on a CPU."""

    on_gpu: bool
    began: Any = None
    ended: Any = None
    seconds: list[float] = field(default_factory=list)

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        """A forward pre-hook of the first layer: its input's gradient is the last thing that backward makes there."""
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self.began = self._now()
        if hidden.requires_grad:
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


def run(side: _Side, task: dict[str, Any]) -> dict[str, Any]:
    """Build, warm up, measure."""
    shape = next(shape for shape in gpu_model.shapes(small=task["small"]) if shape.name == task["shape"])
    shape = shape.with_layers(task["layers"])
    began = time.perf_counter()
    watch = Watch(side.on_gpu)
    step = side.build(shape, task, watch)
    settle: Callable[[], None] = torch.cuda.synchronize if side.on_gpu else lambda: None
    losses, seconds = [step() for _ in range(task["warm_up"])], []
    settle()
    built = time.perf_counter() - began
    if side.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    watch.seconds.clear()
    for _ in range(task["steps"]):
        settle()
        start = time.perf_counter()
        losses.append(step())
        settle()
        seconds.append(time.perf_counter() - start)
        watch.note()
    return {
        "step_seconds": seconds,
        "language_seconds": watch.seconds,
        "losses": losses,
        "peak_bytes": side.peak_bytes(step),
        "parameters": side.parameters(),
        "attention": side.attention,
        "build_seconds": built,
    }


class _Side(ABC):
    """What both sides are asked for."""

    attention = ""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    @abstractmethod
    def build(self, shape: gpu_model.Shape, task: dict[str, Any], watch: Watch) -> Callable[[], float]:
        """A new model; returns its step, which gives the loss."""

    @abstractmethod
    def parameters(self) -> int:
        """How many numbers the model has."""

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

    @abstractmethod
    def standing(self) -> list[Tensor]:
        """What lives from step to step."""

    @abstractmethod
    def release(self) -> None:
        """Let the model go."""


class _Ours(_Side):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        from megavlm import backend

        self.backend = backend.activate()
        assert self.backend.is_cpu != self.on_gpu, "hide the GPUs with CUDA_VISIBLE_DEVICES= to measure on a CPU"
        self.engine: Any = None

    def build(self, shape: gpu_model.Shape, task: dict[str, Any], watch: Watch) -> Callable[[], float]:
        from megavlm.parallel.groups import build_groups, destroy_groups, start
        from megavlm.planner.plan import dims_of, make_plan
        from megavlm.precision.device import check_device, emulates_fp8
        from megavlm.train.engine import build_engine

        config = gpu_model.run_config(shape, precision=task["precision"])
        check_device(config)
        if self.on_gpu and emulates_fp8(config):
            raise RuntimeError("without Transformer Engine FP8 would be emulated")
        start(self.backend, timeout_minutes=5)
        destroy_groups()
        plan = make_plan(config, dims_of(config, world=1))
        groups = build_groups(plan.dims, tied_owners=(), seed=1, timeout_minutes=5)
        fill = _random if task["weights"] is None else _loading(config, shape, task["weights"])
        self.engine = build_engine(config, plan, groups, vocab_size=shape.vocabulary, backend=self.backend, fill=fill)
        first = self.engine.chunks[0].module.parts["language.layers.0"]
        first.register_forward_pre_hook(watch.begin, with_kwargs=True)
        self.attention = type(first.self_attention.core_attention).__name__
        batch = PackedBatch(**_pinned(vars(gpu_model.batch_of(shape, packed=True)), pin=self.on_gpu))
        return lambda: self.engine.train_step([batch]).loss

    def parameters(self) -> int:
        return sum(param.numel() for param in self.engine.chunks[0].parameters())

    def standing(self) -> list[Tensor]:
        from megavlm.metrics.memory import standing_tensors

        return standing_tensors(self.engine)

    def release(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None


@torch.no_grad()
def _random(chunks: Any) -> None:
    """Weights as a new model has them, drawn on the device: drawing billions by name takes minutes."""
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if name.endswith("bias"):
                param.zero_()
            elif param.dim() == 1:
                param.fill_(1.0)
            else:
                param.normal_(0.0, 0.02)


def _loading(config: Any, shape: gpu_model.Shape, folder: str) -> Callable[[Any], None]:
    """The weights that the other side wrote."""
    from functools import partial

    from megavlm.checkpoint.hf.load import load_weights
    from megavlm.checkpoint.hf.source import ALL_PARTS, Origin

    origin = Origin.of(Path(folder) / MODEL_FILE, *ALL_PARTS)
    return partial(load_weights, origins=[origin], config=config, vocab_size=shape.vocabulary)


class _Theirs(_Side):
    """Transformers as its users train with it: fused AdamW, clipping, the fastest attention that is installed.

    Precision `autocast` is the `bf16=True` of its Trainer: fp32 weights and moments, products in bf16, which is the
    arithmetic of ours. `bf16` has nothing in fp32: less memory, and updates that bf16 rounds away.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        from importlib.util import find_spec

        import transformers

        self.device = torch.device(device)
        self.fastest = "flash_attention_2" if self.on_gpu and find_spec("flash_attn") else "sdpa"
        self.auto = transformers.AutoModelForImageTextToText
        self.model: Any = None
        self.optimizer: Any = None

    def build(self, shape: gpu_model.Shape, task: dict[str, Any], watch: Watch) -> Callable[[], float]:
        precision = task["precision"]
        self.attention = self.fastest
        torch.manual_seed(1)
        with self.device:
            model = self.auto.from_config(shape.theirs(shape), attn_implementation=self.attention, dtype=torch.float32)
        if task["weights"] is not None:
            model.save_pretrained(Path(task["weights"]) / MODEL_FILE)
        self.model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = their_optimizer(self.model)
        self.model.model.language_model.layers[0].register_forward_pre_hook(watch.begin, with_kwargs=True)
        inputs = _pinned(gpu_model.their_inputs(shape), pin=self.on_gpu)
        casts = precision == "autocast"

        def step() -> float:
            given = {name: value.to(self.device, non_blocking=True) for name, value in inputs.items()}
            if precision == "bf16":
                given["pixel_values"] = given["pixel_values"].bfloat16()
            with torch.autocast(self.device.type, torch.bfloat16) if casts else nullcontext():
                loss = self.model(**given, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, OPTIMIZER.clip_grad, foreach=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return float(loss)

        return step

    def parameters(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    def standing(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *(value for value in states if torch.is_tensor(value))]

    def release(self) -> None:
        self.model = self.optimizer = None


def _pinned(values: dict[str, Any], *, pin: bool) -> dict[str, Any]:
    """Tensors in page-locked memory, where a GPU reads them while it computes."""
    return {k: v.contiguous().pin_memory() if pin and torch.is_tensor(v) else v for k, v in values.items()}


if __name__ == "__main__":
    main()
