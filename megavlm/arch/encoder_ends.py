"""The encoder's kinds that are not transformer layers: patch embedding, the tower's last norm, projectors."""

from __future__ import annotations

from megavlm.arch.kind import Communication, LayerCost, LayerKind, Stream, norm_bytes, stream_bytes
from megavlm.arch.scenario import Scenario
from megavlm.arch.transformer import norm_parameters
from megavlm.arch.workload import Workload
from megavlm.config.derived import block_channels, projector_inputs
from megavlm.config.schema import ModelConfig
from megavlm.config.tensor_split import share_of


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

    def matrices(self, model: ModelConfig, tp: int = 1) -> int:
        """Return the weights of one of `tp` ranks in the layers that they divide."""
        inputs, outputs = projector_inputs(model), model.language.hidden_size
        hidden, own_outputs = share_of(model.projector.hidden_size, tp), share_of(outputs, tp)
        match model.projector.kind:
            case "linear":
                return inputs * own_outputs
            case "mlp":
                return inputs * hidden + hidden * outputs
            case "gated":
                return inputs * own_outputs + 3 * outputs * hidden

    def biases(self, model: ModelConfig, tp: int) -> int:
        """Return the biases of the same layers on one of `tp` ranks: those of the last layer of an MLP are whole."""
        outputs, hidden = model.language.hidden_size, share_of(model.projector.hidden_size, tp)
        match model.projector.kind:
            case "linear":
                return share_of(outputs, tp)
            case "mlp":
                return hidden + outputs
            case "gated":
                return share_of(outputs, tp) + 2 * hidden + outputs

    def parameters(self, model: ModelConfig, tp: int) -> int:
        projector, outputs = model.projector, model.language.hidden_size
        inputs, per_norm = projector_inputs(model), 2 if projector.normalization == "LayerNorm" else 1
        normed = model.vision.hidden_size if projector.norm_before_merge else inputs
        norms = per_norm * (normed * self.has_norm(model) + outputs * (projector.kind == "gated"))
        newline = outputs * (projector.anyres_max_tiles is not None)
        merging = self.convolution(model) + inputs * (projector.merge == "convolution" and projector.merge_bias)
        divided = self.matrices(model, tp) + self.biases(model, tp) * projector.bias
        return norms + newline + merging + divided

    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        params = self.matrices(model) + self.convolution(model)
        return LayerCost(params, 2.0 * params * work.features)

    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        model, e = scenario.model, scenario.bytes_each
        features, projector = scenario.work.features, scenario.model.projector
        merged = features * projector_inputs(model) * e
        patches = features * block_channels(model) * e
        convolved = patches * (projector.merge == "convolution")
        normed = (patches if projector.norm_before_merge else merged) * self.has_norm(model)
        widths = features * share_of(projector.hidden_size, scenario.dims.tp) * e
        inner = {"linear": 0.0, "mlp": 2 * widths, "gated": 4 * widths}[projector.kind]
        if projector.kind == "gated":  # what norm, GELU and the gated MLP read
            inner += features * model.language.hidden_size * e * (2 + trained)
        return (merged + convolved) * trained + normed + inner + scenario.work.patches * 8

    def communication(self, scenario: Scenario) -> Communication:
        patches, features = (stream_bytes(stream, scenario) for stream in (Stream.PATCHES, Stream.FEATURES))
        more = (features,) * (scenario.model.projector.kind == "gated")
        return Communication((patches,) * scenario.sequence_parallel + more, (features, features, *more))


class DeepstackMerger(Projector):
    """A DeepStack merger (Qwen3-VL): a projector with a norm, applied to the output of an inner vision layer."""

    def has_norm(self, model: ModelConfig) -> bool:
        return True
