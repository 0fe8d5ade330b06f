"""BLIP-2's Q-Former (Li et al. 2023): learned queries attend to one another and to the patches of their image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megavlm.arch.connector import Block, Connector, HfNames
from megavlm.arch.image_tokens import Grid
from megavlm.arch.kind import Communication, HiddenWeight, LayerCost, Stream, hidden_weight, stream_bytes
from megavlm.arch.resampler import AttentionBlock, MlpBlock, norm_saved
from megavlm.arch.scenario import Scenario
from megavlm.arch.workload import Workload
from megavlm.config.messages import no_divisor
from megavlm.config.option import Count, Positive, option
from megavlm.config.schema import Config, ModelConfig, ProjectorConfig


@dataclass(frozen=True)
class QFormerConfig:
    """Options of the connector `qformer`."""

    num_queries: Count = option(32, "Learned queries: image tokens of each image.")
    num_layers: Count = option(12, "Layers of the Q-Former.")
    hidden_size: Count = option(768, "Hidden size of the Q-Former.")
    ffn_hidden_size: Count = option(3072, "Inner width of the MLPs of the Q-Former.")
    num_attention_heads: Count = option(12, "Attention heads of the Q-Former; zero heads pad it to a multiple of TP.")
    cross_attention_frequency: Count = option(2, "Every so many layers, from the first on, attend to the patches.")
    norm_epsilon: Positive = option(1e-12, "Epsilon of the norm layers of the Q-Former.")


# Options, and the settings of Blip2QFormerConfig with the same defaults.
_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "cross_attention_frequency": "cross_attention_frequency",
    "norm_epsilon": "layer_norm_eps",
}


class QFormer(Connector):
    """BERT layers, each sublayer followed by residual and norm: self-attention of queries, in some layers attention to
    the patches, and an MLP. A replicated linear layer projects to the language model's width.
    """

    name = "qformer"
    options = QFormerConfig
    module = "megavlm.model.connectors.qformer:QFormer"
    recomputes = True

    def problems(self, config: Config) -> Iterator[str]:
        own: QFormerConfig = self.own(config.model)
        if own.hidden_size % own.num_attention_heads:
            here = "model.projector.connectors.qformer"
            yield no_divisor(
                f"{here}.num_attention_heads",
                own.num_attention_heads,
                f"{here}.hidden_size {own.hidden_size}",
                own.hidden_size,
            )

    def tokens_per_grid(self, grid: Grid, projector: ProjectorConfig) -> int:
        return projector.connectors.qformer.num_queries

    def crossing(self, model: ModelConfig) -> range:
        """Return the indices of the layers with cross-attention to the patches."""
        return range(0, self.own(model).num_layers, self.own(model).cross_attention_frequency)

    def attention(self, model: ModelConfig, *, cross: bool) -> AttentionBlock:
        """Return the attention of a layer, to the patches (`cross`) or among the queries."""
        own = self.own(model)
        context = model.vision.hidden_size if cross else own.hidden_size
        heads = own.num_attention_heads
        return AttentionBlock(own.hidden_size, context, heads, heads, own.hidden_size // heads, bias=True)

    def mlp(self, model: ModelConfig) -> MlpBlock:
        """Return the MLP of a layer."""
        own = self.own(model)
        return MlpBlock(own.hidden_size, own.ffn_hidden_size, own.hidden_size, gated=False, bias=True)

    def blocks(self, model: ModelConfig) -> Mapping[str, Block]:
        blocks: dict[str, Block] = {}
        for layer in range(self.own(model).num_layers):
            blocks[f"layers.{layer}.self_attention"] = self.attention(model, cross=False)
            blocks[f"layers.{layer}.mlp"] = self.mlp(model)
        for layer in self.crossing(model):
            blocks[f"layers.{layer}.cross_attention"] = self.attention(model, cross=True)
        return blocks

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        projection = hidden_weight(self.own(model).hidden_size, model.language.hidden_size)
        return {"projection.weight": projection, **super().hidden_weights(model)}

    def parameters(self, model: ModelConfig, tp: int) -> int:
        own, crossing = self.own(model), len(self.crossing(model))
        norms = 2 * own.hidden_size * (1 + 2 * own.num_layers + crossing)
        blocks = sum(block.parameters(tp) for block in self.blocks(model).values())
        projection = (own.hidden_size + 1) * model.language.hidden_size
        return int(own.num_queries * own.hidden_size + norms + blocks + projection)

    def cost(self, model: ModelConfig, work: Workload) -> LayerCost:
        own, queries, crossing = self.own(model), work.features, len(self.crossing(model))
        to_self = self.attention(model, cross=False).flops(queries, queries, queries * own.num_queries)
        to_patches = self.attention(model, cross=True).flops(queries, work.patches, work.patches * own.num_queries)
        attention = own.num_layers * to_self[1] + crossing * to_patches[1]
        products = own.num_layers * (to_self[0] + self.mlp(model).flops(queries)) + crossing * to_patches[0]
        products += 2.0 * queries * own.hidden_size * model.language.hidden_size
        return LayerCost(self.parameters(model, 1), products + attention, attention)

    def products(self, *, trained: bool, reached: bool) -> tuple[int, int]:
        return 1, 1 + trained  # gradients pass the layers to the queries, whether or not they go on to the patches

    def saved_bytes(self, scenario: Scenario, *, trained: bool) -> float:
        model, work, e = scenario.model, scenario.work, scenario.bytes_each
        own, queries, crossing = self.own(model), work.features, len(self.crossing(model))
        norm = norm_saved(scenario, queries, own.hidden_size, "LayerNorm", trained=trained)
        mlp = self.mlp(model).saved_bytes(scenario, queries, trained=trained)
        to_self = self.attention(model, cross=False).saved_bytes(scenario, queries, queries)
        to_patches = self.attention(model, cross=True).saved_bytes(scenario, queries, work.patches)
        # Frozen queries have attended to one another before anything depends on the patches.
        total = (own.num_layers - (not trained)) * (to_self + norm)
        total += own.num_layers * (mlp + norm) + crossing * (to_patches + norm)
        total += queries * own.hidden_size * e * trained  # the normalised queries of each image
        return total + work.patches * (model.vision.hidden_size * e * trained + 8)

    def communication(self, scenario: Scenario) -> Communication:
        own, e = self.own(scenario.model), scenario.bytes_each
        blocks = 2 * own.num_layers + len(self.crossing(scenario.model))
        patches = stream_bytes(Stream.PATCHES, scenario)
        # All-reduces of the outputs of each block in the forward pass, of the gradients of its inputs in the backward
        # pass, and once of the gradients of the patches.
        halves = (scenario.work.features * own.hidden_size * e,) * (2 * blocks)
        return Communication((patches,) * scenario.sequence_parallel, (*halves, patches))

    def kernels(self, model: ModelConfig) -> tuple[float, float]:
        blocks = 2 * self.own(model).num_layers + len(self.crossing(model))
        return 10 + 12.0 * blocks, 14 + 20.0 * blocks  # an estimate

    hf_types = ("blip_2_qformer", "blip-2")

    def from_hf(self, settings: Any) -> dict[str, Any]:
        whole = settings.values.get("model_type") == "blip-2"
        inner = settings.section("qformer_config") if whole else settings
        inner.require("hidden_act", "gelu", why="the Q-Former here has GELU")
        inner.require("use_qformer_text_input", False, why="queries alone attend here, not words")
        options = {ours: inner.get(theirs, getattr(QFormerConfig(), ours)) for ours, theirs in _HF_NAMES.items()}
        return options | ({"num_queries": settings.get("num_query_tokens", 32)} if whole else {})

    def hf_names(self, model: ModelConfig) -> tuple[HfNames, ...]:
        names: dict[str, str] = {"norm": "layernorm"}
        for layer in range(self.own(model).num_layers):
            ours, theirs = f"layers.{layer}", f"encoder.layer.{layer}"
            pairs = {"self": "attention"} | ({"cross": "crossattention"} if layer in self.crossing(model) else {})
            for kind, place in pairs.items():
                for leaf in ("query", "key", "value"):
                    names[f"{ours}.{kind}_attention.{leaf}"] = f"{theirs}.{place}.attention.{leaf}"
                names[f"{ours}.{kind}_attention.output"] = f"{theirs}.{place}.output.dense"
                names[f"{ours}.{kind}_norm"] = f"{theirs}.{place}.output.LayerNorm"
            names[f"{ours}.mlp.fc1"] = f"{theirs}.intermediate_query.dense"
            names[f"{ours}.mlp.fc2"] = f"{theirs}.output_query.dense"
            names[f"{ours}.mlp_norm"] = f"{theirs}.output_query.LayerNorm"
        bare = {f"{key}.{leaf}": f"{name}.{leaf}" for key, name in names.items() for leaf in ("weight", "bias")}
        whole = {key: f"qformer.{name}" for key, name in bare.items()} | {"queries": "query_tokens"}
        whole |= {f"projection.{leaf}": f"language_projection.{leaf}" for leaf in ("weight", "bias")}
        alone = bare | {key: whole[key] for key in whole.keys() - bare.keys()}
        return bare, whole, {key: f"model.{name}" for key, name in whole.items()}, alone

    def exported(self, model: ModelConfig) -> int:
        return 3

    def hf_config(self, model: ModelConfig) -> dict[str, Any]:
        own: QFormerConfig = self.own(model)
        return {
            "architectures": ["Blip2QFormerModel"],
            "model_type": "blip_2_qformer",
            "encoder_hidden_size": model.vision.hidden_size,
            **{theirs: getattr(own, ours) for ours, theirs in _HF_NAMES.items()},
        }


QFORMER = QFormer()
