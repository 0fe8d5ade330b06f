"""The encoder's kinds that are not transformer layers: patch embedding, the tower's last norm, projectors."""

from __future__ import annotations

from megavlm.arch.kind import Communication, LayerCost, LayerKind, Stream, norm_bytes, stream_bytes
from megavlm.arch.scenario import Scenario
from megavlm.arch.transformer import norm_parameters
from megavlm.arch.workload import Workload
from megavlm.config.derived import block_channels, projector_inputs
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
    """Merged patches and a linear layer or an MLP, whole sequences on each rank outside their own products."""

    reads = Stream.PATCHES
    launches = (15, 14)
    cpu_calls = 6

    def has_norm(self, model: ModelConfig) -> bool:
        """Return whether patches or merged features are normalised."""
        return model.projector.input_norm

    def convolution(self, model: ModelConfig) -> int:
        """Return the weights that merge the patches of a block, whole on every tensor-parallel rank."""
        learned = model.projector.merge == "convolution"
        return block_channels(model) * projector_inputs(model) if learned else 0

    def parameters(self, model: ModelConfig, tp: int) -> int:
        projector, outputs = model.projector, model.language.hidden_size
        inputs = projector_inputs(model)
        normed = model.vision.hidden_size if projector.norm_before_merge else inputs
        norm = normed * (2 if projector.normalization == "LayerNorm" else 1)
        count = norm * self.has_norm(model) + outputs * (projector.anyres_max_tiles is not None)
        count += self.convolution(model)
        if projector.kind == "linear":
            return count + (inputs + projector.bias) * outputs // tp
        hidden = model.projector.hidden_size
        return count + (inputs + projector.bias + outputs) * hidden // tp + outputs * projector.bias

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        inputs, outputs = projector_inputs(model), model.language.hidden_size
        hidden = model.projector.hidden_size
        params = inputs * outputs if model.projector.kind == "linear" else inputs * hidden + hidden * outputs
        params += self.convolution(model)
        return LayerCost(params, 2.0 * params * work.features)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        model, e = scenario.model, scenario.bytes_each
        features, projector = scenario.work.features, scenario.model.projector
        merged = features * projector_inputs(model) * e
        patches = features * block_channels(model) * e
        convolved = patches * (projector.merge == "convolution")
        normed = (patches if projector.norm_before_merge else merged) * self.has_norm(model)
        hidden = model.projector.hidden_size
        inner = 0 if projector.kind == "linear" else 2 * features * hidden / scenario.dims.tp * e
        return (merged + convolved) * trained + normed + inner + scenario.work.patches * 8

    def communication(self, scenario: Scenario) -> Communication:
        patches, features = (stream_bytes(stream, scenario) for stream in (Stream.PATCHES, Stream.FEATURES))
        return Communication((patches,) * scenario.sequence_parallel, (features, features))


class DeepstackMerger(Projector):
    """A DeepStack merger (Qwen3-VL): a projector with a norm, applied to the output of an inner vision layer."""

    def has_norm(self, model: ModelConfig) -> bool:
        return True
