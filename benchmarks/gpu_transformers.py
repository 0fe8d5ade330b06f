"""Run Transformers' side of `gpu_vlm.py`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any

import gpu_model
import torch
from gpu_files import IMAGE_TOKEN, their_loader
from gpu_side import MODEL_FILE, Side, Watch, pinned
from torch import Tensor, nn
from transformers_models import OPTIMIZER, their_optimizer


class Theirs(Side):
    """Transformers as its users train with it: fused AdamW, clipping, the fastest attention that is installed.

    Precision `autocast` is the `bf16=True` of its Trainer: fp32 weights and moments, products in bf16, which is the
    arithmetic of ours. `bf16` has nothing in fp32: less memory, and updates that bf16 rounds away.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        import transformers

        self.device = torch.device(device)
        self.attention = "flash_attention_2" if self.on_gpu and find_spec("flash_attn") else "sdpa"
        self.auto = transformers.AutoModelForImageTextToText
        self.model: Any = None
        self.optimizer: Any = None

    def build(self, shape: gpu_model.Shape, task: dict[str, Any], watch: Watch) -> Callable[[], Tensor]:
        precision = task["precision"]
        torch.manual_seed(1)
        with self.device:
            sizes = shape.theirs(shape)
            if task["files"]:
                sizes.image_token_index = IMAGE_TOKEN
            model = self.auto.from_config(sizes, attn_implementation=self.attention, dtype=torch.float32)
        if task["weights"] is not None:
            model.save_pretrained(Path(task["weights"]) / MODEL_FILE)
        self.model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = their_optimizer(self.model)
        if task["compiled"]:
            compile_layers(self.model, on_gpu=self.on_gpu)
        self.model.model.language_model.layers[0].register_forward_pre_hook(watch.begin, with_kwargs=True)
        batches = self._batches(shape, files=task["files"])
        casts, count = precision == "autocast", task["micro_batches"]

        def step() -> Tensor:
            for _ in range(count):
                began = time.perf_counter()
                inputs = next(batches)
                self.tally.waited.append(time.perf_counter() - began)
                given = {name: value.to(self.device, non_blocking=True) for name, value in inputs.items()}
                if precision == "bf16":
                    given["pixel_values"] = given["pixel_values"].bfloat16()
                with torch.autocast(self.device.type, torch.bfloat16) if casts else nullcontext():
                    loss = self.model(**given, use_cache=False).loss
                (loss / count).backward()
                filled = inputs.get("attention_mask", inputs["input_ids"])
                self.tally.tokens += int(filled.sum()) if task["files"] else filled.numel()
                self.tally.positions += filled.numel()
            torch.nn.utils.clip_grad_norm_(params, OPTIMIZER.clip_grad, foreach=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()  # nobody waits for it

        return step

    def _batches(self, shape: gpu_model.Shape, *, files: bool) -> Iterator[dict[str, Tensor]]:
        """Yield micro-batches without end: the same tensors each time, or what is read from files."""
        if not files:
            yield from repeat(pinned(gpu_model.their_inputs(shape), pin=self.on_gpu))
        with tempfile.TemporaryDirectory() as folder:
            yield from their_loader(shape, Path(folder), pin=self.on_gpu)

    def parameters(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    def standing(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *(value for value in states if torch.is_tensor(value))]

    def release(self) -> None:
        self.model = self.optimizer = None


def compile_layers(model: nn.Module, *, on_gpu: bool) -> None:
    """torch.compile of each layer by itself: one compilation serves all that are alike, and takes seconds, not minutes.

    What is compiled is `forward`, so that the hooks which take the time stay outside. On a CPU layers are traced, and
    no code is made of them.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.forward = torch.compile(layer.forward, backend="inductor" if on_gpu else "aot_eager")
