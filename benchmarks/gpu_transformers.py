"""Run Transformers' side of `gpu_vlm.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_model
import torch
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
            model = self.auto.from_config(shape.theirs(shape), attn_implementation=self.attention, dtype=torch.float32)
        if task["weights"] is not None:
            model.save_pretrained(Path(task["weights"]) / MODEL_FILE)
        self.model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = their_optimizer(self.model)
        if task["compiled"]:
            compile_layers(self.model, on_gpu=self.on_gpu)
        self.model.model.language_model.layers[0].register_forward_pre_hook(watch.begin, with_kwargs=True)
        inputs = pinned(gpu_model.their_inputs(shape), pin=self.on_gpu)
        casts, count = precision == "autocast", task["micro_batches"]

        def step() -> Tensor:
            for _ in range(count):
                given = {name: value.to(self.device, non_blocking=True) for name, value in inputs.items()}
                if precision == "bf16":
                    given["pixel_values"] = given["pixel_values"].bfloat16()
                with torch.autocast(self.device.type, torch.bfloat16) if casts else nullcontext():
                    loss = self.model(**given, use_cache=False).loss
                (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(params, OPTIMIZER.clip_grad, foreach=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.tally.tokens += count * shape.seq_length
            self.tally.positions += count * shape.seq_length
            return loss.detach()  # nobody waits for it

        return step

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
