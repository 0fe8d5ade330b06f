"""The C-Abstractor against its paper (Cha et al. 2024) in torch's own layers: Transformers has no such model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavlm.arch.layers import PROJECTOR
from megavlm.model.vision import VisionLayout
from tests.support.flags import resolved
from tests.support.harness import (
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    Single,
    assert_same,
    assert_same_gradients,
    gradients_of,
    randomize,
)

GRIDS = ((2, 3), (4, 4), (4, 4), (5, 1), (6, 6))
WIDTH, CHANNELS, SQUEEZE, OUTPUTS, SIDE, DEPTH = 20, 12, 5, 24, 3, 2
ARGV = (
    f"--set model.vision.hidden_size={WIDTH} model.vision.num_attention_heads=2 model.vision.patch_size=4 "
    f"model.vision.image_size=16 model.language.hidden_size={OUTPUTS} model.language.num_attention_heads=2 "
    "model.language.vocab_size=97 --projector-kind c_abstractor --set "
    f"model.projector.connectors.c_abstractor.side={SIDE} model.projector.connectors.c_abstractor.depth={DEPTH} "
    f"model.projector.connectors.c_abstractor.squeeze_size={SQUEEZE} "
    "model.projector.connectors.c_abstractor.ffn_hidden_size=14"
).split()


class ChannelNorm(nn.LayerNorm):
    """Layer norm of the channels of [N, C, rows, columns]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class RegNetBlock(nn.Module):
    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.conv3 = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = (ChannelNorm(channels) for _ in range(3))
        self.squeeze, self.excite = nn.Conv2d(channels, SQUEEZE, 1), nn.Conv2d(SQUEEZE, channels, 1)
        self.shortcut: nn.Module = nn.Identity()
        self.shortcut_norm: nn.Module = nn.Identity()
        if inputs != channels:
            self.shortcut, self.shortcut_norm = nn.Conv2d(inputs, channels, 1, bias=False), ChannelNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return F.silu(self.norm3(self.conv3(y)) + self.shortcut_norm(self.shortcut(x)))


class Honeybee(nn.Module):
    """[C, rows, columns] of an image → [side², outputs]."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(16, width))
        self.before = nn.Sequential(*(RegNetBlock(channels if n else width, channels) for n in range(DEPTH)))
        self.after = nn.Sequential(*(RegNetBlock(channels, channels) for _ in range(DEPTH)))
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(channels, 14), "fc2": nn.Linear(14, OUTPUTS)})

    def forward(self, image: Tensor) -> Tensor:
        table = self.positions.T.unflatten(1, (4, 4))[None]
        x = image[None] + F.interpolate(table, size=image.shape[1:], mode="bicubic")
        y = self.after(F.adaptive_avg_pool2d(self.before(x), (SIDE, SIDE)))
        return self.mlp["fc2"](F.silu(self.mlp["fc1"](y.flatten(2)[0].T)))


@pytest.mark.parametrize("channels", [CHANNELS, WIDTH], ids=["projected", "as-wide-as-the-tower"])
def test_features_and_gradients_are_those_of_the_paper(single: Single, channels: int) -> None:
    theirs = randomize(Honeybee(WIDTH, channels), seed=1)
    config = resolved([*ARGV, "--set", f"model.projector.connectors.c_abstractor.hidden_size={channels}"])
    part: Any = single.chunk(config, (PROJECTOR,), vocab_size=97).parts[PROJECTOR]
    weights = dict(theirs.named_parameters())
    ours = dict(part.named_parameters())
    assert ours.keys() == weights.keys()
    with torch.no_grad():
        for name, param in ours.items():
            param.copy_(weights[name].view_as(param))  # a 1 × 1 convolution is a matrix here
    lengths = [rows * columns for rows, columns in GRIDS]
    patches = torch.randn(sum(lengths), WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)
    layout = VisionLayout.of(GRIDS, class_token=False, multiple=1, blank=(1, 1))
    mine = part(patches[:, None], layout, tile_groups=(), sequence_parallel=False)[:, 0]
    images = [each.T.unflatten(1, grid) for each, grid in zip(patches.split(lengths), GRIDS, strict=True)]
    wanted = torch.cat([theirs(image) for image in images])
    assert_same(mine, wanted, tolerance=OUTPUT_TOLERANCE, what="features")
    toward = torch.randn(mine.shape, generator=torch.Generator().manual_seed(3))
    gradients = []
    for out in (mine, wanted):
        (out * toward).sum().backward()
        gradients.append(patches.grad)
        patches.grad = None
    assert_same(gradients[0], gradients[1], tolerance=GRADIENT_TOLERANCE, what="gradient of the patches")
    of_theirs = {name: each.view_as(ours[name]) for name, each in gradients_of(theirs).items()}
    assert_same_gradients(gradients_of(part), of_theirs)
