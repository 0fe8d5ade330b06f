"""Two models with the same random weights: theirs from Transformers, ours a chunk of any named layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megavlm.arch.image_tokens import grid_of
from megavlm.arch.plan import Plan
from megavlm.backend import Backend
from megavlm.config.schema import Config
from megavlm.inputs.batch import ImageBatch, ImageSizes, MicroBatch, TextBatch
from megavlm.inputs.patches import patchify
from megavlm.model.vlm import VLMChunk
from megavlm.parallel.groups import Groups
from megavlm.pipeline.schedule import pipeline_config
from megavlm.rules.defaults import resolve
from megavlm.train.engine import Engine
from tests.support.gates import hold

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


@torch.no_grad()
def load(chunk: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Fill every parameter of ours; none may be left over on either side."""
    params = dict(chunk.named_parameters())
    assert params.keys() == weights.keys(), params.keys() ^ weights.keys()
    for name, param in params.items():
        assert param.shape == weights[name].shape, name
        param.copy_(weights[name])


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name; parameters that the output does not depend on have none and are left out."""
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def difference(ours: Tensor, theirs: Tensor, what: str) -> float:
    """Return the largest difference relative to the largest value."""
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)} against {tuple(theirs.shape)}"
    scale = theirs.abs().max().item()
    assert scale > 1e-6, f"{what}: nothing to compare"
    return (ours - theirs).abs().max().item() / scale


def assert_same(ours: Tensor, theirs: Tensor, *, tolerance: float, what: str) -> None:
    error = difference(ours, theirs, what)
    assert error < tolerance, f"{what}: differs by {error:.1e}"


def assert_same_gradients(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], *, family: str | None = None
) -> None:
    """All gradients are within the tolerance; the card of `family` notes the largest difference."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name, gradient in ours.items():
        assert_same(gradient, theirs[name], tolerance=GRADIENT_TOLERANCE, what=f"gradient of {name}")
        if family is not None:
            hold(family, "gradients", difference(gradient, theirs[name], name))


def random_image(height: int, width: int, *, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def pixel_values(images: list[NDArray[np.uint8]]) -> Tensor:
    """[N, 3, height, width], normalised as image processors of Transformers do with mean and deviation 0.5."""
    stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return (stacked.float() / 255 - 0.5) / 0.5


def image_batch(images: list[NDArray[np.uint8]], *, patch_size: int) -> MicroBatch:
    """A micro-batch for a chunk that only holds vision layers."""
    sizes = ImageSizes(tuple(grid_of(image.shape[0], image.shape[1], patch_size) for image in images))
    return MicroBatch.of_images(ImageBatch(sizes, torch.cat([patchify(image, patch_size) for image in images])))


def text_batch(tokens: Tensor) -> MicroBatch:
    """A micro-batch of text alone: [B, S] tokens."""
    text = TextBatch(
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.ones(tokens.shape),
        positions=torch.arange(tokens.shape[1]).expand_as(tokens),
        feature_positions=tokens.new_empty(0),
    )
    return MicroBatch(text, ImageSizes())
