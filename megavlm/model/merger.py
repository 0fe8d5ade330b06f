"""`WindowMerger`: the merger inside a vision tower (MiniCPM-V 4.6), which makes one patch of each 2×2 neighbours.

Legend: V vision tokens, H width. The tower's patches are in the order of their blocks (`model/vision.py`), so that four
tokens that follow one another are one block, also where sequence parallelism has sharded them.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megavlm.arch.layers import VISION_MERGER
from megavlm.arch.tensor_split import merger_width, mlp_share, vision_split
from megavlm.config.derived import tower_merge
from megavlm.config.schema import Config
from megavlm.model.layer_modules import modules_of
from megavlm.model.packing import Packing
from megavlm.model.specs import layer_submodules
from megavlm.parallel.groups import Groups


class WindowMerger(MegatronModule):
    """Attention within each block of neighbouring patches, then an MLP of the block: [V(/TP), 1, H] → [V/4(/TP), 1, H].

    With y = x + attention(norm(x)), a block of y₁ … y₄ becomes (y₁ + … + y₄)/4 + MLP(norm(y₁ ‖ … ‖ y₄)), as in
    Transformers' MiniCPMV4_6ViTWindowAttentionMerger.
    """

    def __init__(self, config: Config, layer_config: TransformerConfig, groups: Groups) -> None:
        vision, tp = config.model.vision, groups.dims.tp
        # Weights are drawn or loaded later; rows that pad them stay zero.
        layer_config = replace(
            layer_config,
            ffn_hidden_size=mlp_share(merger_width(vision), tp) * tp,
            init_method=nn.init.zeros_,
            output_layer_init_method=nn.init.zeros_,
        )
        super().__init__(config=layer_config)
        self.block = tower_merge(vision) ** 2
        modules = modules_of(VISION_MERGER, config, groups)
        parts = layer_submodules(
            replace(modules, column_linear=modules.column_linear_alone),  # without a norm inside
            AttnMaskType.no_mask,
            split=vision_split(vision, tp),
            qk_norm=None,
            branch=None,
            qkv_bias=vision.add_qkv_bias,
            activation=vision.activation,
        )
        inputs = vision.hidden_size * self.block
        norm = {"config": layer_config, "eps": vision.norm_epsilon}
        self.input_layernorm = build_module(modules.norm_alone, hidden_size=vision.hidden_size, **norm)
        self.self_attention = build_module(
            parts.self_attention, config=layer_config, layer_number=1, pg_collection=groups.collection
        )
        self.pre_mlp_layernorm = build_module(modules.norm_alone, hidden_size=inputs, **norm)
        self.mlp = build_module(parts.mlp, config=layer_config, input_size=inputs, tp_group=groups.collection.tp)

    def forward(self, hidden: Tensor, packing: Packing) -> Tensor:
        """Return the merged patches; each sequence of `packing` is a block."""
        normed = self.input_layernorm(hidden)
        attended, _ = self.self_attention(normed, attention_mask=None, packed_seq_params=packing)
        blocks = (hidden + attended).unflatten(0, (-1, self.block))  # [V/4(/TP), 4, 1, H]
        joined, _ = self.mlp(self.pre_mlp_layernorm(blocks.transpose(1, 2).flatten(2)))
        merged: Tensor = blocks.mean(1) + joined
        return merged
