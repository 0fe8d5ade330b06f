"""Idefics2's connector (Laurençon et al. 2024): an MLP to the language model's width, then a Perceiver resampler
(Jaegle et al. 2021), whose learned latents attend to the projected patches of their image and to one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megavlm.arch.connector import Block, Connector, HfNames
from megavlm.arch.image_tokens import Grid
from megavlm.arch.kind import FP32, Communication, LayerCost, Stream, stream_bytes
from megavlm.arch.resampler import AttentionBlock, MlpBlock, norm_saved
from megavlm.arch.scenario import Scenario
from megavlm.arch.workload import Workload
from megavlm.config.messages import no_divisor
from megavlm.config.option import Count, Positive, filled, option
from megavlm.config.schema import Config, ModelConfig, ProjectorConfig


@dataclass(frozen=True)
class PerceiverConfig:
    """Options of the connector `perceiver`."""

    num_latents: Count = option(64, "Learned latents: image tokens of each image.")
    num_layers: Count = option(3, "Layers of the Perceiver resampler.")
    num_attention_heads: Count = option(16, "Query heads of the Perceiver resampler.")
    num_query_groups: Count = option(
        4, "Key/value heads of the Perceiver resampler; zero heads pad it to a multiple of TP."
    )
    kv_channels: Count = option(96, "Width of the resampler's attention heads.")
    ffn_hidden_size: Count = option(
        None, "Inner width of the MLPs of the Perceiver resampler; default: 4 × language hidden size."
    )
    projection_ffn_hidden_size: Count = option(
        None, "Inner width of the MLP before the resampler, to the language model's width; default: its MLPs' width."
    )
    norm_epsilon: Positive = option(1e-6, "Epsilon of the resampler's norms.")


# Options, and the settings of Idefics2PerceiverConfig with the same defaults.
_HF_NAMES = {
    "num_latents": "resampler_n_latents",
    "num_layers": "resampler_depth",
    "num_attention_heads": "resampler_n_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "resampler_head_dim",
    "norm_epsilon": "rms_norm_eps",
}


class Perceiver(Connector):
    """Layers as wide as the language model: RMS norms, attention of latents to [patches; latents], and a gated MLP."""

    name = "perceiver"
    options = PerceiverConfig
    module = "megavlm.model.connectors.perceiver:Perceiver"
    recomputes = True

    def resolved(self, model: ModelConfig) -> PerceiverConfig:
        hidden, ffn = 4 * model.language.hidden_size, model.language.ffn_hidden_size
        return filled(self.own(model), ffn_hidden_size=hidden, projection_ffn_hidden_size=ffn)

    def problems(self, config: Config) -> Iterator[str]:
        own: PerceiverConfig = self.own(config.model)
        if own.num_attention_heads % own.num_query_groups:
            here = "model.projector.connectors.perceiver"
            groups, heads = own.num_query_groups, own.num_attention_heads
            yield no_divisor(f"{here}.num_query_groups", groups, f"{here}.num_attention_heads {heads}", heads)

    def tokens_per_grid(self, grid: Grid, projector: ProjectorConfig) -> int:
        return projector.connectors.perceiver.num_latents

    def attention(self, model: ModelConfig) -> AttentionBlock:
        """Return the attention of a layer."""
        own, width = self.own(model), model.language.hidden_size
        return AttentionBlock(width, width, own.num_attention_heads, own.num_query_groups, own.kv_channels, bias=False)

    def mlp(self, model: ModelConfig) -> MlpBlock:
        """Return the MLP of a layer."""
        width = model.language.hidden_size
        return MlpBlock(width, self.own(model).ffn_hidden_size, width, gated=True, bias=False)

    def projection(self, model: ModelConfig) -> MlpBlock:
        """Return the MLP between the patches and the resampler."""
        inner = self.own(model).projection_ffn_hidden_size
        return MlpBlock(model.vision.hidden_size, inner, model.language.hidden_size, gated=True, bias=False)

    def blocks(self, model: ModelConfig) -> Mapping[str, Block]:
        blocks: dict[str, Block] = {"projection": self.projection(model)}
        for layer in range(self.own(model).num_layers):
            blocks |= {f"layers.{layer}.attention": self.attention(model), f"layers.{layer}.mlp": self.mlp(model)}
        return blocks

    def parameters(self, model: ModelConfig, tp: int) -> int:
        own, width = self.own(model), model.language.hidden_size
        divided = sum(block.parameters(tp) for block in self.blocks(model).values())
        return int(divided + (3 * own.num_layers + own.num_latents + 1) * width)

    def cost(self, model: ModelConfig, work: Workload) -> LayerCost:
        own, latents = self.own(model), work.features
        positions = work.patches + latents
        products, attention = self.attention(model).flops(latents, positions, positions * own.num_latents)
        layer = products + self.mlp(model).flops(latents)
        flops = own.num_layers * (layer + attention) + self.projection(model).flops(work.patches)
        return LayerCost(self.parameters(model, 1), flops, own.num_layers * attention)

    def products(self, *, trained: bool, reached: bool) -> tuple[int, int]:
        return 1, 1 + trained  # gradients pass the layers to the latents, whether or not they go on to the patches

    def saved_bytes(self, scenario: Scenario, *, trained: bool) -> float:
        model, work, e = scenario.model, scenario.work, scenario.bytes_each
        own, latents, patches, width = self.own(model), work.features, work.patches, model.language.hidden_size
        norm = norm_saved(scenario, latents, width, "RMSNorm", trained=trained)
        context = norm_saved(scenario, patches, width, "RMSNorm", trained=trained)
        layer = self.attention(model).saved_bytes(scenario, latents, patches + latents)
        layer += self.mlp(model).saved_bytes(scenario, latents, trained=trained) + 2 * norm + context
        total = own.num_layers * layer + norm - latents * width * e * trained  # nothing reads the last norm's output
        if scenario.on_gpu or e == FP32:  # the norms of all layers keep the same projected patches
            total -= (own.num_layers - 1) * patches * width * e
        if not trained:  # frozen latents are normalised before anything depends on the patches
            total -= norm
        total += self.projection(model).saved_bytes(scenario, patches, trained=trained)
        return total + patches * (model.vision.hidden_size * e * trained + 8)

    def communication(self, scenario: Scenario) -> Communication:
        own, work, e = self.own(scenario.model), scenario.work, scenario.bytes_each
        width = scenario.model.language.hidden_size * e
        patches = stream_bytes(Stream.PATCHES, scenario)
        # All-reduces of outputs in the forward pass, of the gradients of inputs and projected patches in the backward
        # pass.
        layer = (work.features * width,) * 4 + (work.patches * width,)
        reductions = (work.patches * width, patches, *(layer * own.num_layers))
        return Communication((patches,) * scenario.sequence_parallel, reductions)

    def kernels(self, model: ModelConfig) -> tuple[float, float]:
        return 20 + 32.0 * self.own(model).num_layers, 24 + 52.0 * self.own(model).num_layers  # an estimate

    hf_types = ("idefics2_perceiver", "idefics2")

    def from_hf(self, settings: Any) -> dict[str, Any]:
        whole = settings.values.get("model_type") == "idefics2"
        inner = settings.section("perceiver_config") if whole else settings
        inner.require("hidden_act", "silu", why="the resampler here has gated MLPs with SiLU")
        options = {ours: inner.get(theirs, getattr(PerceiverConfig(), ours)) for ours, theirs in _HF_NAMES.items()}
        if not whole:
            return options | {"ffn_hidden_size": 4 * inner.get("hidden_size", 4096)}
        text = settings.section("text_config")
        text.require("hidden_act", "silu", why="the projection here is a gated MLP with SiLU")
        width, inner_width = text.get("hidden_size", 4096), text.get("intermediate_size", 14336)
        return options | {"ffn_hidden_size": 4 * width, "projection_ffn_hidden_size": inner_width}

    def hf_names(self, model: ModelConfig) -> tuple[HfNames, ...]:
        of_mlp = {"gate": "gate_proj", "up": "up_proj", "fc2": "down_proj"}
        names = {"latents": "latents", "norm.weight": "norm.weight"}
        for number in range(self.own(model).num_layers):
            layer = {"latents_norm": "input_latents_norm", "context_norm": "input_context_norm"}
            layer |= {"mlp_norm": "post_attention_layernorm"} | {f"mlp.{a}": f"mlp.{b}" for a, b in of_mlp.items()}
            layer |= {f"attention.{leaf}": f"self_attn.{leaf[0]}_proj" for leaf in ("query", "key", "value", "output")}
            names |= {f"layers.{number}.{a}.weight": f"layers.{number}.{b}.weight" for a, b in layer.items()}
        projection = {f"projection.{a}.weight": f"modality_projection.{b}.weight" for a, b in of_mlp.items()}
        whole = {key: f"perceiver_resampler.{name}" for key, name in names.items()} | projection
        places = ("model.connector.", "connector.")
        return names, *({key: f"{place}{name}" for key, name in whole.items()} for place in places), names | projection

    def exported(self, model: ModelConfig) -> int:
        return 3

    def hf_config(self, model: ModelConfig) -> dict[str, Any] | None:
        own: PerceiverConfig = self.own(model)
        width = model.language.hidden_size
        if own.ffn_hidden_size != 4 * width:  # Idefics2PerceiverResampler has no other width
            return None
        return {
            "architectures": ["Idefics2PerceiverResampler"],
            "model_type": "idefics2_perceiver",
            "hidden_act": "silu",
            "hidden_size": width,
            **{theirs: getattr(own, ours) for ours, theirs in _HF_NAMES.items()},
        }


PERCEIVER = Perceiver()
