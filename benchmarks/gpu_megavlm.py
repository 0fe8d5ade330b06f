"""Run megavlm's side of `gpu_vlm.py`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpu_model
import torch
from gpu_files import flags_of
from gpu_side import MODEL_FILE, Side, Watch, pinned
from torch import Tensor

from megavlm.config.derived import overlapped
from megavlm.rules.defaults import resolve, with_device_defaults


class Ours(Side):
    """Build the parts of a run as `train/build.py` does, with weights drawn on the device."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        from megavlm import backend

        self.backend = backend.activate()
        assert self.backend.is_cpu != self.on_gpu, "hide the GPUs with CUDA_VISIBLE_DEVICES= to measure on a CPU"
        self.engine: Any = None
        self.data_loader: Any = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def build(self, shape: gpu_model.Shape, task: dict[str, Any], watch: Watch) -> Callable[[], float]:
        from megavlm.arch.dims import dims_of
        from megavlm.arch.plan import make_plan
        from megavlm.parallel.groups import build_groups, destroy_groups
        from megavlm.parallel.rendezvous import start
        from megavlm.precision.device import check_device, implementation
        from megavlm.train.build_engine import build_engine

        flags = task["flags"]
        if task["files"]:
            self.folder = tempfile.TemporaryDirectory()
            flags += " " + flags_of(shape, Path(self.folder.name)) + f" --run-dir {self.folder.name}/run"
            shape = shape.without_image_token()
        count = task["micro_batches"]
        config = gpu_model.run_config(shape, precision=task["precision"], flags=flags, micro_batches=count)
        check_device(config)
        if self.on_gpu and config.precision.fp8 != "none" and implementation(config) == "torch":
            raise RuntimeError("without Transformer Engine FP8 would be emulated")
        start(self.backend, timeout_minutes=5)
        destroy_groups()
        dims = dims_of(config, world=1)
        config = overlapped(with_device_defaults(resolve(config), on_gpu=self.on_gpu), dp=dims.dp)
        plan = make_plan(config, dims)
        groups = build_groups(plan.dims, tied_owners=(), seed=1, timeout_minutes=5)
        weights = _random if task["weights"] is None else _loading(config, shape, task["weights"])
        self.engine = build_engine(
            config, plan, groups, vocab_size=shape.vocabulary, backend=self.backend, weights=weights
        )
        first = self.engine.chunks[0].module.parts["language.layers.0"]
        first.register_forward_pre_hook(watch.begin, with_kwargs=True)
        self.attention = type(getattr(first.self_attention, "core_attention", first.self_attention)).__name__
        if task["files"]:
            return self._on_files(config, groups)
        batch = gpu_model.batch_of(shape, packed=True)
        given = batch.with_tensors(pinned(batch.host_tensors(), pin=self.on_gpu))

        def step() -> float:
            loss: float = self.engine.train_step([given] * count).loss
            self.tally.tokens += count * shape.seq_length
            self.tally.positions += count * shape.seq_length
            return loss

        return step

    def _on_files(self, config: Any, groups: Any) -> Callable[[], float]:
        """Return a step on batches of the data loader, as `train/loop.py` runs it."""
        from megavlm.data.loaders import build_loaders
        from megavlm.model.specs import DTYPES
        from megavlm.train.build_source import build_source

        source = build_source(config, run_dir=Path(config.run.run_dir), rank=0, barrier=lambda: None)
        loaders = build_loaders(
            config,
            source,
            groups,
            device=self.backend.device,
            dtype=DTYPES[config.precision.dtype],
            vision_group=groups.tp,
        )
        self.data_loader = loaders.training

        def step() -> float:
            began = time.perf_counter()
            read = self.data_loader.next_step()
            self.tally.waited.append(time.perf_counter() - began)
            self.tally.tokens += sum(batch.text.num_tokens for batch in read.batches)
            self.tally.positions += sum(batch.text.tokens.numel() for batch in read.batches)
            loss: float = self.engine.train_step(read.batches).loss
            return loss

        return step

    def parameters(self) -> int:
        return sum(param.numel() for param in self.engine.chunks[0].parameters())

    def standing(self) -> list[Tensor]:
        from tests.support.live_bytes import standing_tensors

        return standing_tensors(self.engine)

    def release(self) -> None:
        data_loader, engine, folder = self.data_loader, self.engine, self.folder
        self.data_loader = self.engine = self.folder = None
        if data_loader is not None:
            data_loader.close()
        if engine is not None:
            engine.close()
        if folder is not None:
            folder.cleanup()


@torch.no_grad()
def _random(chunks: Any) -> None:
    """Draw initial weights on the device, because drawing billions of them by name takes minutes."""
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            if name.endswith("bias"):
                param.zero_()
            elif param.dim() == 1:
                param.fill_(1.0)
            else:
                param.normal_(0.0, 0.02)


def _loading(config: Any, shape: gpu_model.Shape, folder: str) -> Callable[[Any], None]:
    """Return a function that loads the weights that the other side wrote."""
    from megavlm.checkpoint.hf.importing import load_weights
    from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained

    pretrained = Pretrained.of(Path(folder) / MODEL_FILE, *ALL_PARTS)
    return partial(load_weights, pretrained_list=[pretrained], config=config, vocab_size=shape.vocabulary)
