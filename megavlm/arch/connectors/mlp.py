"""The common projectors on merged patches: a linear layer, an MLP, a deep, a SwiGLU or a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from megavlm.arch.connector import Connector, HfNames, Split
from megavlm.arch.image_tokens import Grid
from megavlm.arch.kind import Communication, HiddenWeight, LayerCost, Stream, hidden_weight, stream_bytes
from megavlm.arch.scenario import Scenario
from megavlm.arch.tensor_split import share_of
from megavlm.arch.workload import Workload
from megavlm.config.derived import block_channels, projector_inputs
from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.errors import UserError

# Names of the linear layers of each kind, which are needed before their sizes are known.
_LAYERS = {
    "linear": ("linear_fc1",),
    "mlp": ("linear_fc1", "linear_fc2"),
    "deep_mlp": ("linear_in", "linear_fc1", "linear_fc2"),
    "swiglu": ("linear_fc1", "linear_fc2"),
    "gated": ("linear_in", "linear_gate", "linear_fc1", "linear_fc2"),
}


class Mlp(Connector):
    """A linear layer or an MLP on merged patches. Each rank has whole sequences; linear layers shard channels alone."""

    module = "megavlm.model.connector:Projector"
    reads = tuple(field.name for field in fields(ProjectorConfig) if field.name not in ("kind", "connectors"))
    keeps_grid = True

    def __init__(self, name: str, *, normed: bool = False) -> None:
        """Make the connector `name`; `normed` adds the norm of patches or merged features in any configuration."""
        self.name, self.normed = name, normed  # type: ignore[misc]

    def tokens_per_grid(self, grid: Grid, projector: ProjectorConfig) -> int:
        """Return rows × columns ÷ N²: pixel shuffle merges N × N neighbouring patches into one feature.

        A convolution without padding leaves out rows and columns at the end that fill no block. Raises UserError if a
        side of the grid is shorter than N, and for other merges if N does not divide both sides.
        """
        rows, columns = grid
        side = projector.pixel_shuffle
        uneven = projector.merge != "convolution" and (rows % side or columns % side)
        if uneven or min(grid) < side:
            raise UserError(
                f"a grid of {rows}×{columns} patches cannot be merged {side}×{side}: change the image "
                f"size, model.vision.patch_size or model.projector.pixel_shuffle {side}"
            )
        return (rows // side) * (columns // side)

    def smallest_grid(self, projector: ProjectorConfig) -> Grid:
        return projector.pixel_shuffle, projector.pixel_shuffle

    def has_norm(self, model: ModelConfig) -> bool:
        """Return whether there is a norm of patches or of merged features."""
        return self.normed or model.projector.input_norm

    def has_norm_weights(self, model: ModelConfig) -> bool:
        """Return whether this norm has weights."""
        return self.has_norm(model) and model.projector.normalization != "UnitRMSNorm"

    def convolution(self, model: ModelConfig) -> int:
        """Return the number of weights of the convolution that merges patches, which is replicated."""
        learned = model.projector.merge == "convolution"
        return block_channels(model) * projector_inputs(model) if learned else 0

    def layers(self, model: ModelConfig, tp: int = 1) -> Mapping[str, tuple[int, int]]:
        """Return the rows and columns of each sharded linear layer on one of `tp` ranks."""
        inputs, outputs = projector_inputs(model), model.language.hidden_size
        whole = model.projector.hidden_size
        hidden, own_outputs = share_of(whole, tp), share_of(outputs, tp)
        last = {"linear_fc2": (outputs, hidden)}
        return {
            "linear": {"linear_fc1": (own_outputs, inputs)},
            "mlp": {"linear_fc1": (hidden, inputs), **last},
            "deep_mlp": {"linear_in": (hidden, inputs), "linear_fc1": (hidden, whole), **last},
            "swiglu": {"linear_fc1": (2 * hidden, inputs), **last},  # gate over up
            "gated": {
                "linear_in": (own_outputs, inputs),
                **dict.fromkeys(("linear_gate", "linear_fc1"), (hidden, outputs)),
                **last,
            },
        }[model.projector.kind]

    def matrices(self, model: ModelConfig, tp: int = 1) -> int:
        """Return the number of weights of the sharded linear layers on one of `tp` ranks."""
        return sum(rows * columns for rows, columns in self.layers(model, tp).values())

    def parameters(self, model: ModelConfig, tp: int) -> int:
        projector, outputs = model.projector, model.language.hidden_size
        inputs, per_norm = projector_inputs(model), 2 if projector.normalization == "LayerNorm" else 1
        normed = model.vision.hidden_size if projector.norm_before_merge else inputs
        norms = per_norm * (normed * self.has_norm_weights(model) + outputs * (projector.kind == "gated"))
        newline = outputs * (projector.anyres_max_tiles is not None)
        merging = self.convolution(model) + inputs * (projector.merge == "convolution" and projector.merge_bias)
        biases = sum(rows for rows, _ in self.layers(model, tp).values()) * projector.bias
        return norms + newline + merging + self.matrices(model, tp) + biases

    def cost(self, model: ModelConfig, work: Workload) -> LayerCost:
        params = self.matrices(model) + self.convolution(model)
        return LayerCost(params, 2.0 * params * work.features)

    def saved_bytes(self, scenario: Scenario, *, trained: bool) -> float:
        model, e = scenario.model, scenario.bytes_each
        features, projector = scenario.work.features, scenario.model.projector
        merged = features * projector_inputs(model) * e
        patches = features * block_channels(model) * e
        convolved = patches * (projector.merge == "convolution")
        normed = (patches if projector.norm_before_merge else merged) * self.has_norm(model)
        widths = features * share_of(projector.hidden_size, scenario.dims.tp) * e
        inner = {"linear": 0.0, "swiglu": 3 * widths, "gated": 4 * widths}.get(projector.kind, 2 * widths)
        if projector.kind == "gated":  # inputs of the norm, of GELU and of the gated MLP
            inner += features * model.language.hidden_size * e * (2 + trained)
        if projector.kind == "deep_mlp":  # inputs of the first GELU and of the MLP
            inner += features * projector.hidden_size * e * (1 + trained)
        return (merged + convolved) * trained + normed + inner + scenario.work.patches * 8

    def communication(self, scenario: Scenario) -> Communication:
        patches, features = (stream_bytes(stream, scenario) for stream in (Stream.PATCHES, Stream.IMAGES))
        projector = scenario.model.projector
        more = (features,) * (projector.kind == "gated")
        if projector.kind == "deep_mlp":
            more = (features * projector.hidden_size / scenario.model.language.hidden_size,)
        return Communication((patches,) * scenario.sequence_parallel + more, (features, features, *more))

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        layers = dict(self.layers(model))
        if model.projector.merge == "convolution":
            layers["convolution"] = (projector_inputs(model), block_channels(model))
        found = {f"{name}.weight": hidden_weight(columns, rows) for name, (rows, columns) in layers.items()}
        if model.projector.kind == "swiglu":
            found["linear_fc1.weight"] = hidden_weight(projector_inputs(model), *(model.projector.hidden_size,) * 2)
        return found

    def hf_names(self, model: ModelConfig) -> tuple[HfNames, ...]:
        projector = model.projector
        norms = ("norm",) * self.has_norm_weights(model) + ("inner_norm",) * (self.name == "gated")
        convolved = projector.merge == "convolution"
        names = [
            *(f"{layer}.weight" for layer in (*_LAYERS[self.name], *norms)),
            *(f"{layer}.bias" for layer in _LAYERS[self.name] if projector.bias),
            *(f"{norm}.bias" for norm in norms if projector.normalization == "LayerNorm"),
            *("convolution.weight",) * convolved,
            *("convolution.bias",) * (convolved and projector.merge_bias),
            *("std_scale", "std_bias") * (projector.merge == "standardized_average"),
            *("image_newline",) * (projector.anyres_max_tiles is not None),
        ]
        return ({name: name for name in names},)

    def exported(self, model: ModelConfig) -> int | None:
        return None if model.vision.deepstack_layers else 0  # mergers inside the tower are weights of the projector

    def splits(self, model: ModelConfig) -> Mapping[str, Split]:
        outputs, hidden = model.language.hidden_size, model.projector.hidden_size
        rows = {"linear_in": hidden if model.projector.kind == "deep_mlp" else outputs, "linear_gate": hidden}
        rows["linear_fc1"] = outputs if model.projector.kind == "linear" else hidden
        of_rows = {f"{name}.{leaf}": Split(0, size) for name, size in rows.items() for leaf in ("weight", "bias")}
        if model.projector.kind == "swiglu":
            of_rows |= {f"linear_fc1.{leaf}": Split(0, 2 * hidden, blocks=2) for leaf in ("weight", "bias")}
        return of_rows | {"linear_fc2.weight": Split(1, hidden)}


LINEAR, MLP, DEEP_MLP, SWIGLU, GATED = map(Mlp, _LAYERS)
