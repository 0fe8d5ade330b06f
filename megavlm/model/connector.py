"""`ConnectorModule`: the torch half of a connector. The other half is `megavlm/arch/connector.py`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megavlm.arch.anyres import TileGroup
from megavlm.arch.image_tokens import Grid
from megavlm.model.vision import VisionLayout

if TYPE_CHECKING:
    from megavlm.model.layer_kinds import LayerBuilder


class ConnectorModule(MegatronModule):
    """[V(/TP), 1, Hv] → [F, 1, Hl], whole on every tensor-parallel rank.

    All ranks have the same patches and make the same features of them, which are merged into whole text embeddings
    before those are scattered. So weights that are whole on each rank get equal gradients. Matrices may be divided by
    megatron-core's parallel layers, made with `self.config` (which has no sequence parallelism) and `self.tp_group`.
    A container of such layers is a MegatronModule as well, as a ModuleList would be saved as if it were whole.
    """

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__(config=builder.connector)
        assert not self.config.sequence_parallel
        self.model = builder.config.model
        self.tp_group = builder.groups.collection.tp

    def forward(
        self, hidden: Tensor, layout: VisionLayout, *, tile_groups: Sequence[TileGroup], sequence_parallel: bool
    ) -> Tensor:
        """`tile_groups` say which tiles are one image, in models of tiled images."""
        if sequence_parallel:
            # What follows is computed alike on every rank: its gradient is whole, so backward takes a slice.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        patches = hidden[:, 0].index_select(0, layout.patch_index(hidden.device))
        return self.features(patches, layout.grids, tile_groups)

    @abstractmethod
    def features(self, patches: Tensor, grids: tuple[Grid, ...], tile_groups: Sequence[TileGroup]) -> Tensor:
        """Return the features [F, 1, Hl] of images, one after the other, whose patches [P, Hv] are row-major."""
