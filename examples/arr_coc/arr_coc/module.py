"""The torch half of `arr_coc`: three scorers find where an image is relevant, and regions get tokens accordingly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from arr_coc.allocation import allocate
from arr_coc.options import ArrCoc
from megavlm.arch.image_tokens import Grid, TileGroup
from megavlm.model.connector import ConnectorModule


class ArrCocConnector(ConnectorModule):
    """Patches [P, Hv] of images → `budget` features of each, [images · budget, 1, Hl].

    Scorers and pooling are replicated on tensor-parallel ranks; the MLP after them, which has most of the weights, is
    sharded. Gradients reach the scorers through the weights of patches in a token, because the number of tokens of a
    region is an integer and has no gradient.
    """

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self.options: ArrCoc = self.model.projector.connectors.arr_coc
        width, outputs = self.model.vision.hidden_size, self.model.language.hidden_size
        dtype = self.config.params_dtype
        # Propositional knowing: how much information a patch has by itself.
        self.information = nn.Linear(width, self.options.scorer_size, dtype=dtype)
        self.information_out = nn.Linear(self.options.scorer_size, 1, dtype=dtype)
        # Perspectival knowing: how far it stands out from its image.
        self.salience = nn.Linear(width, self.options.scorer_size, dtype=dtype)
        self.salience_out = nn.Linear(self.options.scorer_size, 1, dtype=dtype)
        # Participatory knowing: how well it answers one of the questions that the connector has learned to ask.
        self.queries = nn.Linear(width, self.options.queries, bias=False, dtype=dtype)
        common: Any = {"config": self.config, "init_method": self.config.init_method, "tp_group": self.tp_group}
        hidden = self.options.hidden_size
        self.linear_fc1 = ColumnParallelLinear(width, hidden, bias=True, gather_output=False, **common)
        self.linear_fc2 = RowParallelLinear(
            hidden, outputs, bias=True, input_is_parallel=True, skip_bias_add=False, is_expert=False, **common
        )

    def features(self, patches: Tensor, grids: tuple[Grid, ...], tile_groups: Sequence[TileGroup]) -> Tensor:
        images = patches.split([rows * columns for rows, columns in grids])
        pooled = torch.cat([self.pooled(image, grid) for image, grid in zip(images, grids, strict=True)])
        hidden, _ = self.linear_fc1(pooled[:, None])
        out, _ = self.linear_fc2(F.gelu(hidden))
        return out  # type: ignore[no-any-return]

    def relevance(self, patches: Tensor) -> Tensor:
        """Return how relevant each patch of an image is, fp32 [P] > 0."""
        unlike = patches - patches.mean(0, keepdim=True)
        information = self.information_out(F.gelu(self.information(patches)))[:, 0]
        salience = self.salience_out(F.gelu(self.salience(unlike)))[:, 0]
        answers = self.queries(patches).logsumexp(-1)
        return F.softplus((information + salience + answers).float()) + 1e-3

    def pooled(self, patches: Tensor, grid: Grid) -> Tensor:
        """Return the tokens [budget, Hv] of one image, region by region."""
        relevance, options = self.relevance(patches), self.options
        region = regions(grid, options.regions, device=patches.device)
        count = options.regions**2
        sizes = torch.bincount(region, minlength=count)
        sums = torch.zeros(count, device=patches.device).index_add(0, region, relevance.detach())
        tokens = allocate(sums / sizes, budget=options.budget, fewest=options.fewest, most=options.most)
        order = region.argsort(stable=True)
        weights = members(sizes, tokens) * relevance[order]
        return (weights / weights.sum(1, keepdim=True)).to(patches.dtype) @ patches[order]


def regions(grid: Grid, side: int, *, device: torch.device) -> Tensor:
    """Return the number of the region, of side × side, that each patch of a grid is in, int64 [P]."""
    rows, columns = (torch.arange(count, device=device) * side // count for count in grid)
    return (rows[:, None] * side + columns).flatten()


def members(sizes: Tensor, tokens: Tensor) -> Tensor:
    """Return which patches each token consists of, [T, P]: 1 or 0, with patches and tokens sorted by region.

    Token i of n divides its region's P patches as adaptive pooling does: from ⌊i·P/n⌋ up to ⌈(i+1)·P/n⌉.
    """
    region = torch.repeat_interleave(tokens)
    number = torch.arange(len(region), device=region.device) - (tokens.cumsum(0) - tokens)[region]
    held, n, first = sizes[region], tokens[region], (sizes.cumsum(0) - sizes)[region]
    start, end = first + number * held // n, first - (-(number + 1) * held // n)
    place = torch.arange(int(sizes.sum()), device=region.device)
    return ((place >= start[:, None]) & (place < end[:, None])).float()
