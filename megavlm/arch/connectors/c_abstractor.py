"""Honeybee's C-Abstractor (Cha et al. 2024, arXiv 2312.06742): ResNet blocks, average pooling to a square of tokens,
ResNet blocks, and an MLP. A token describes a region of the image and its surroundings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megavlm.arch.connector import Block, Connector, HfNames, Split
from megavlm.arch.image_tokens import Grid
from megavlm.arch.kind import (
    FP32,
    Communication,
    HiddenWeight,
    LayerCost,
    Stream,
    hidden_weight,
    norm_bytes,
    stream_bytes,
)
from megavlm.arch.resampler import MlpBlock
from megavlm.arch.scenario import Scenario
from megavlm.arch.tensor_split import share_of
from megavlm.arch.workload import Workload
from megavlm.config.option import Count, Positive, filled, option
from megavlm.config.schema import ModelConfig, ProjectorConfig

TAPS = 9  # weights of a 3 × 3 convolution for each channel


@dataclass(frozen=True)
class CAbstractorConfig:
    """Options of the connector `c_abstractor`."""

    side: Count = option(12, "Rows and columns of image tokens of each image.")
    depth: Count = option(3, "ResNet blocks before and after the pooling.")
    hidden_size: Count = option(1024, "Channels of the ResNet blocks; zero channels pad it to a multiple of TP.")
    squeeze_size: Count = option(
        None, "Inner width of squeeze-and-excitation; default: a quarter of the blocks' channels."
    )
    ffn_hidden_size: Count = option(
        None, "Inner width of the MLP after the blocks; default: model.language.hidden_size."
    )
    norm_epsilon: Positive = option(1e-5, "Epsilon of the C-Abstractor's norms.")


@dataclass(frozen=True)
class ConvBlock:
    """A RegNet block (Radosavovic et al. 2020): 1 × 1 convolution, depthwise 3 × 3 convolution, squeeze-and-excitation,
    1 × 1 convolution, with layer norms over channels. A shortcut projects inputs of another width.

    From the first 1 × 1 convolution to the second, channels are sharded over tensor-parallel ranks.
    """

    inputs: int
    width: int
    squeeze: int

    @property
    def projects(self) -> bool:
        """Return whether the shortcut projects the inputs, because their width differs from the block's."""
        return self.inputs != self.width

    def splits(self, name: str) -> dict[str, Split]:
        """Return how the block's weights are sharded, by their names below `name`."""
        rows = ["conv1.weight", "conv2.weight", "excite.weight", "excite.bias"]
        rows += [f"{norm}.{leaf}" for norm in ("norm1", "norm2") for leaf in ("weight", "bias")]
        rows += ["shortcut.weight"] * self.projects
        columns = ("squeeze.weight", "conv3.weight")
        sharded_rows = {f"{name}.{leaf}": Split(0, self.width) for leaf in rows}
        return sharded_rows | {f"{name}.{leaf}": Split(1, self.width) for leaf in columns}

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of all weights of the block."""
        norms = ("norm3", "shortcut_norm") if self.projects else ("norm3",)
        whole = ("squeeze.bias", *(f"{norm}.{leaf}" for norm in norms for leaf in ("weight", "bias")))
        return (*self.splits(name), *(f"{name}.{leaf}" for leaf in whole))

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return the rows and columns of each matrix of the block."""
        matrices = {
            "conv1": (self.width, self.inputs),
            "squeeze": (self.squeeze, self.width),
            "excite": (self.width, self.squeeze),
            "conv3": (self.width, self.width),
        }
        return matrices | ({"shortcut": (self.width, self.inputs)} if self.projects else {})

    def hidden_weights(self, name: str) -> dict[str, HiddenWeight]:
        """Return the weights that are matrices between hidden states, by their names below `name`."""
        matrices = self.matrices().items()
        return {f"{name}.{leaf}.weight": hidden_weight(columns, rows) for leaf, (rows, columns) in matrices}

    def parameters(self, tp: int) -> int:
        """Return the number of parameters on one of `tp` ranks, with norms and padding."""
        own = share_of(self.width, tp)
        matrices = own * (self.inputs * (1 + self.projects) + 2 * self.squeeze + self.width)
        norms = 4 * own + 2 * self.width * (1 + self.projects)
        return matrices + norms + TAPS * own + self.squeeze + own

    def flops(self, positions: float, images: float) -> float:
        """Return the FLOPs for `positions` positions of `images` images; squeeze-and-excitation runs once per image."""
        per_position = self.inputs * self.width * (1 + self.projects) + self.width * (self.width + TAPS)
        return 2.0 * (per_position * positions + 2 * self.width * self.squeeze * images)

    def saved_bytes(self, scenario: Scenario, positions: float, images: float, *, trained: bool) -> float:
        """Return the bytes that the block saves for the backward pass, its inputs included."""
        e, own = scenario.bytes_each, share_of(self.width, scenario.dims.tp)
        # A norm saves its input and statistics; SiLU, the 3 × 3 convolution and the gate save their inputs; the 1 × 1
        # convolutions save theirs if their weights are trained.
        inner = 2 * norm_bytes(scenario, positions, own, "LayerNorm") + (4 + trained) * positions * own * e
        outer = (1 + self.projects) * norm_bytes(scenario, positions, self.width, "LayerNorm")
        outer += positions * (self.width + self.inputs * trained) * e
        gate = images * (self.squeeze * (1 + trained) + own * (1 + trained)) * e
        return inner + outer + gate

    def reductions(self, scenario: Scenario, positions: float, images: float) -> tuple[float, ...]:
        """Return the bytes of the block's reductions.

        In the forward pass these are the outputs and the squeezed channels, in the backward pass the gradients of the
        inputs and of the excited channels, and in both the fp32 statistics of norms over sharded channels.
        """
        e = scenario.bytes_each
        block = (positions * self.width * e, positions * self.inputs * e, *(images * self.squeeze * e,) * 2)
        return block + (2 * positions * FP32,) * 4


class CAbstractor(Connector):
    """A learned position for each patch, `depth` blocks, average pooling, `depth` blocks; then linear, SiLU, linear."""

    name = "c_abstractor"
    options = CAbstractorConfig
    module = "megavlm.model.connectors.c_abstractor:CAbstractor"
    recomputes = True

    def resolved(self, model: ModelConfig) -> CAbstractorConfig:
        own: CAbstractorConfig = self.own(model)
        squeeze = max(1, own.hidden_size // 4)
        return filled(own, squeeze_size=squeeze, ffn_hidden_size=model.language.hidden_size)

    def tokens_per_grid(self, grid: Grid, projector: ProjectorConfig) -> int:
        side: int = projector.connectors.c_abstractor.side
        return side**2

    def table(self, model: ModelConfig) -> int:
        """Return the side of the table of learned positions: the patches along a side of `vision.image_size`."""
        return model.vision.image_size // model.vision.patch_size

    def blocks(self, model: ModelConfig) -> Mapping[str, Block]:
        return {"mlp": self.mlp(model), **self.conv_blocks(model)}

    def conv_blocks(self, model: ModelConfig) -> dict[str, ConvBlock]:
        """Return the blocks before the pooling, named `before.N`, and after it, named `after.N`."""
        own = self.own(model)
        places = [(stage, number) for stage in ("before", "after") for number in range(own.depth)]
        inputs = {("before", 0): model.vision.hidden_size}
        return {
            f"{stage}.{number}": ConvBlock(
                inputs.get((stage, number), own.hidden_size), own.hidden_size, own.squeeze_size
            )
            for stage, number in places
        }

    def mlp(self, model: ModelConfig) -> MlpBlock:
        """Return the MLP after the blocks."""
        own = self.own(model)
        return MlpBlock(own.hidden_size, own.ffn_hidden_size, model.language.hidden_size, gated=False, bias=True)

    def hf_names(self, model: ModelConfig) -> tuple[HfNames, ...]:
        # A folder does not say how wide its tower is: only its weights tell whether the first block has a shortcut.
        return tuple(self._names(model, projects=projects) for projects in (False, True))

    def exported(self, model: ModelConfig) -> int:
        return int(self.conv_blocks(model)["before.0"].projects)

    def _names(self, model: ModelConfig, *, projects: bool) -> HfNames:
        blocks = self.conv_blocks(model)
        first = blocks["before.0"]
        blocks["before.0"] = replace(first, inputs=first.width + projects)
        names = [leaf for name, block in blocks.items() for leaf in block.names(name)]
        return {name: name for name in ("positions", *self.mlp(model).names("mlp"), *names)}

    def parameters(self, model: ModelConfig, tp: int) -> int:
        blocks = sum(block.parameters(tp) for block in self.blocks(model).values())
        return blocks + self.table(model) ** 2 * model.vision.hidden_size

    def _seen(self, model: ModelConfig, work: Workload) -> dict[str, tuple[ConvBlock, float]]:
        """Return each block and the number of positions that it processes."""
        seen = {"before": work.patches, "after": work.features}
        return {name: (block, seen[name.partition(".")[0]]) for name, block in self.conv_blocks(model).items()}

    def _images(self, model: ModelConfig, work: Workload) -> float:
        return float(work.features / self.own(model).side ** 2)

    def cost(self, model: ModelConfig, work: Workload) -> LayerCost:
        images = self._images(model, work)
        flops = sum(block.flops(positions, images) for block, positions in self._seen(model, work).values())
        return LayerCost(self.parameters(model, 1), flops + self.mlp(model).flops(work.features))

    def products(self, *, trained: bool, reached: bool) -> tuple[int, int]:
        return 1, trained + (trained or reached)  # gradients pass the blocks to the learned positions

    def saved_bytes(self, scenario: Scenario, *, trained: bool) -> float:
        model, work = scenario.model, scenario.work
        images, width = self._images(model, work), self.own(model).hidden_size * scenario.bytes_each
        seen = self._seen(model, work).values()
        blocks = sum(block.saved_bytes(scenario, positions, images, trained=trained) for block, positions in seen)
        mlp = self.mlp(model).saved_bytes(scenario, work.features, trained=trained)
        return blocks + mlp + work.features * width * trained + work.patches * (width + 8)

    def communication(self, scenario: Scenario) -> Communication:
        model, work = scenario.model, scenario.work
        patches, features = (stream_bytes(stream, scenario) for stream in (Stream.PATCHES, Stream.IMAGES))
        width, images = self.own(model).hidden_size * scenario.bytes_each, self._images(model, work)
        reductions = [features, work.features * width]
        for block, positions in self._seen(model, work).values():
            reductions += block.reductions(scenario, positions, images)
        projected = sum(block.projects for block in self.conv_blocks(model).values())
        gathers = (patches,) * scenario.sequence_parallel + (work.patches * width,) * projected
        return Communication(gathers, tuple(reductions))

    def kernels(self, model: ModelConfig) -> tuple[float, float]:
        return 20 + 38.0 * self.own(model).depth, 24 + 60.0 * self.own(model).depth  # an estimate


C_ABSTRACTOR = CAbstractor()
