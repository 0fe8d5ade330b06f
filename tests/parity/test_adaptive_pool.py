"""Adaptive pooling against its definition: means over rectangles of patches, written out, and an MLP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megavlm.arch.layers import PROJECTOR
from megavlm.model.vision import VisionLayout
from tests.support.flags import resolved
from tests.support.harness import OUTPUT_TOLERANCE, Single, assert_same

# Smaller than the square, equal neighbours, and sides that nothing divides.
GRIDS = ((2, 3), (4, 4), (4, 4), (5, 1), (7, 6))
WIDTH, OUTPUTS = 20, 24
ARGV = (
    f"--set model.vision.hidden_size={WIDTH} model.vision.num_attention_heads=2 model.vision.patch_size=4 "
    f"model.vision.image_size=16 model.language.hidden_size={OUTPUTS} model.language.num_attention_heads=2 "
    "model.language.vocab_size=97 --projector-kind adaptive_pool --set "
    "model.projector.connectors.adaptive_pool.hidden_size=14"
).split()


def spans(patches: int, tokens: int) -> list[slice]:
    """Return the patches of each token along a side: from ⌊i·n/t⌋ to ⌈(i+1)·n/t⌉."""
    return [slice(i * patches // tokens, -(-(i + 1) * patches // tokens)) for i in range(tokens)]


@pytest.mark.parametrize("how", ["side 3", "factor 2"])
def test_tokens_are_means_over_rectangles_row_by_row(single: Single, how: str) -> None:
    name, number = how.split()
    config = resolved([*ARGV, "--set", f"model.projector.connectors.adaptive_pool.{name}={number}"])
    part: Any = single.chunk(config, (PROJECTOR,), vocab_size=97).parts[PROJECTOR]
    with torch.no_grad():
        for seed, param in enumerate(part.parameters()):
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))
    lengths = [rows * columns for rows, columns in GRIDS]
    patches = torch.randn(sum(lengths), WIDTH, generator=torch.Generator().manual_seed(2))
    layout = VisionLayout.of(GRIDS, class_token=False, multiple=1, blank=(1, 1))
    mine = part(patches[:, None], layout, tile_groups=(), sequence_parallel=False)[:, 0]
    means: list[Tensor] = []
    for image, (rows, columns) in zip(patches.split(lengths), GRIDS, strict=True):
        down, right = (3, 3) if name == "side" else (-(-rows // 2), -(-columns // 2))
        grid = image.view(rows, columns, WIDTH)
        means += [grid[y, x].flatten(0, 1).mean(0) for y in spans(rows, down) for x in spans(columns, right)]
    weights = dict(part.named_parameters())
    inner = F.gelu(F.linear(torch.stack(means), weights["mlp.fc1.weight"], weights["mlp.fc1.bias"]))
    wanted = F.linear(inner, weights["mlp.fc2.weight"], weights["mlp.fc2.bias"])
    assert_same(mine, wanted, tolerance=OUTPUT_TOLERANCE, what="features")
