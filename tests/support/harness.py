"""Two models with the same random weights: theirs from Transformers, ours a chunk of any named layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megavlm.arch.plan import Plan
from megavlm.backend import Backend
from megavlm.config.schema import Config
from megavlm.model.vlm import VLMChunk
from megavlm.parallel.groups import Groups
from megavlm.pipeline.schedule import pipeline_config
from megavlm.rules.defaults import resolve
from megavlm.train.engine import Engine

# fp32 carries 6e-8; sums of some hundred products through a few layers lose one to two digits of that, and backward
# as much again.
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Single:
    backend: Backend
    groups: Groups
    engines: list[Engine] = field(default_factory=list)  # what was built on these groups, to be closed with them

    def chunk(self, config: Config, names: tuple[str, ...], *, vocab_size: int) -> VLMChunk:
        """A chunk of just these layers, uninitialised."""
        config = resolve(config, vocab_size=vocab_size)
        plan = Plan(dims=self.groups.dims, chunks=(names,))
        pipeline = pipeline_config(config, plan.dims)
        return VLMChunk(config, plan, 0, vocab_size=vocab_size, groups=self.groups, pipeline=pipeline)


def randomize(model: Any, *, seed: int) -> Any:
    """Move every parameter away from its start, so that no bias is zero, no norm one, and no scale hides an error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.empty_like(param).normal_(0, 0.1, generator=generator))
    return model.eval()


def difference(ours: Tensor, theirs: Tensor, what: str) -> float:
    """Return the largest difference relative to the largest value."""
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} against {tuple(theirs.shape)}"
    scale = theirs.abs().max().item()
    assert scale > 1e-6, f"{what}: nothing to compare"
    return (ours - theirs).abs().max().item() / scale


def assert_same(ours: Tensor, theirs: Tensor, *, tolerance: float, what: str) -> None:
    error = difference(ours, theirs, what)
    assert error < tolerance, f"{what}: differs by {error:.1e}"


def random_image(height: int, width: int, *, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
