"""The output layer of a model that embeds texts: hidden states pooled into one vector for each text.

Legend: B rows, S positions of a row, H width, R texts of a micro-batch, K positions that are pooled.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megavlm.inputs.batch import TextBatch
from megavlm.parallel.groups import Groups


class Representation(MegatronModule):
    """Pools hidden states, [S(/TP), B, H] → fp32 [R·H + learned scalars], and holds the scalars that the loss learns.

    The scalars follow the vectors, so that a gradient of this output is all that the loss hands back. Vectors are not
    normalised: the loss does that, for each of the widths that it is applied to.
    """

    def __init__(self, learned: tuple[str, ...], *, layer_config: TransformerConfig, groups: Groups) -> None:
        """`learned` are the names of the scalars."""
        super().__init__(config=layer_config)
        self.groups = groups
        self.sharded = layer_config.sequence_parallel
        self.learned = learned
        for name in learned:
            self.register_parameter(name, nn.Parameter(torch.empty(1, dtype=layer_config.params_dtype)))

    def forward(self, hidden: Tensor, text: TextBatch) -> Tensor:
        """Return the vectors of all texts of a micro-batch, whole and alike on tensor- and context-parallel ranks.

        A rank pools the positions that it holds, and the sums over ranks are the vectors. Each rank computes the same
        loss from them, so their gradient is whole on each rank, too, and belongs to the rank's own positions as it is.
        """
        assert text.pool is not None, "the data loader says which positions are pooled"
        assert text.pool_weights is not None
        positions, owners = text.pool
        length, samples, width = hidden.shape
        # This rank's part of the rows; positions of other parts count zero times.
        row, place = positions // text.tokens.shape[1], positions % text.tokens.shape[1]
        place = place - length * self.groups.coords.tp if self.sharded else place
        here = (place >= 0) & (place < length)
        rows = hidden.flatten(0, 1).index_select(0, place.clamp(0, length - 1) * samples + row).float()
        weights = text.pool_weights * here
        pooled = rows.new_zeros(len(text.lengths), width).index_add(0, owners, rows * weights[:, None])
        if self.sharded:
            pooled = reduce_from_tensor_model_parallel_region(pooled, group=self.groups.tp)
        if self.groups.dims.cp > 1:
            pooled = reduce_from_tensor_model_parallel_region(pooled, group=self.groups.collection.cp)
        return torch.cat([pooled.flatten(), *(getattr(self, name).float() for name in self.learned)])
