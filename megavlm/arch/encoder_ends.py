"""The encoder's kinds that are not transformer layers: patch embedding, the tower's last norm, connectors."""

from __future__ import annotations

from collections.abc import Mapping

from megavlm.arch.connector import Connector, connector_of
from megavlm.arch.connectors.mlp import Mlp
from megavlm.arch.kind import Communication, HiddenWeight, LayerCost, LayerKind, Stream, norm_bytes
from megavlm.arch.scenario import Scenario
from megavlm.arch.transformer import norm_parameters
from megavlm.arch.workload import Workload
from megavlm.config.schema import ModelConfig


class PatchEmbed(LayerKind):
    reads = Stream.PATCHES
    launches = (21, 23)
    cpu_calls = 4

    def parameters(self, model: ModelConfig, tp: int) -> int:
        vision = model.vision
        pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        rows = pixels + vision.patch_bias + vision.class_token
        if vision.position_embedding != "rope2d":
            rows += (vision.image_size // vision.patch_size) ** 2 + vision.class_token
        return rows * vision.hidden_size + norm_parameters(vision) * vision.pre_norm

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        vision = model.vision
        pixels = vision.in_channels * vision.patch_size**2
        table = (vision.image_size // vision.patch_size) ** 2 if vision.position_embedding != "rope2d" else 0
        params = (vision.temporal_patch_size * pixels + table) * vision.hidden_size
        return LayerCost(params, 2.0 * pixels * vision.hidden_size * work.patches)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        vision, patches = scenario.model.vision, scenario.work.patches
        norm = norm_bytes(scenario, patches, vision.hidden_size, vision.normalization) * vision.pre_norm
        return patches * vision.in_channels * vision.patch_size**2 * scenario.bytes_each + norm

    def communication(self, scenario: Scenario) -> Communication:
        return Communication()


class VisionNorm(LayerKind):
    reads = Stream.PATCHES

    def is_present(self, model: ModelConfig) -> bool:
        return model.vision.post_norm and model.vision.feature_layer == -1

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return norm_parameters(model.vision) if self.is_present(model) else 0

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        return LayerCost(model.vision.hidden_size, 0.0)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        vision, tokens = scenario.model.vision, scenario.work.patches / scenario.sequence_shards
        present = self.is_present(scenario.model)
        return norm_bytes(scenario, tokens, vision.hidden_size, vision.normalization) if present else 0.0

    def communication(self, scenario: Scenario) -> Communication:
        return Communication()


class Projector(LayerKind):
    """The connector that `--projector-kind` names: all answers are its own."""

    reads = Stream.PATCHES

    def connector(self, model: ModelConfig) -> Connector:
        """Return what makes features of patches in a model."""
        return connector_of(model.projector)

    def kernels(self, model: ModelConfig) -> tuple[float, float]:
        return self.connector(model).kernels(model)

    def calls(self, model: ModelConfig) -> float:
        return self.connector(model).calls(model)

    def is_recomputed(self, model: ModelConfig) -> bool:
        return self.connector(model).recomputes

    def parameters(self, model: ModelConfig, tp: int) -> int:
        return self.connector(model).parameters(model, tp)

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        return self.connector(model).hidden_weights(model)

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        return self.connector(model).cost(model, work)

    def products(self, scenario: Scenario, *, trained: bool, reached: bool) -> tuple[int, int]:
        return self.connector(scenario.model).products(trained=trained, reached=reached)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        return self.connector(scenario.model).saved_bytes(scenario, trained=trained)

    def communication(self, scenario: Scenario) -> Communication:
        return self.connector(scenario.model).communication(scenario)


class DeepstackMerger(Projector):
    """A DeepStack merger (Qwen3-VL): a projector with a norm, applied to the output of an inner vision layer."""

    normed = Mlp("deepstack", normed=True)  # of the kind that the projector is

    def connector(self, model: ModelConfig) -> Connector:
        return self.normed
