"""`Connector`: everything that a kind of projector declares, in one place. `connectors/` has the package's own.

A connector turns the patches of each image into features for the language model. What else there is in the program asks
it here: the planner for FLOPs, bytes and exchanges, the data for tokens per image, checkpoints for how ranks divide its
weights. Only `build` needs torch, which it imports when it is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from megavlm.arch.image_tokens import Grid
from megavlm.arch.kind import Communication, HiddenWeight, LayerCost, Stream, stream_bytes
from megavlm.arch.scenario import Scenario
from megavlm.arch.tensor_split import Part, share_of, share_runs
from megavlm.arch.workload import Workload
from megavlm.config.registry import from_code, registered
from megavlm.config.schema import Config, ModelConfig, ProjectorConfig

HfNames = Mapping[str, str]  # names in Hugging Face folders, by those in the module


@dataclass(frozen=True)
class Split:
    """How tensor-parallel ranks divide a weight: along `axis`, in `blocks` equal parts of the axis, each of which they
    divide in units of `unit` rows (an attention head's). Padding is zeros.
    """

    axis: int
    size: int  # rows of the model along the axis, of all blocks
    unit: int = 1
    blocks: int = 1

    def part(self, tp: int, rank: int) -> Part | None:
        """Return what a rank holds; None if ranks divide the axis into neighbouring equal parts."""
        block = self.size // self.blocks
        if (self.blocks == 1 or tp == 1) and block // self.unit % tp == 0:
            return None
        return Part(self.axis, self.size, share_runs(block, tp, rank, blocks=self.blocks, share=self._share))

    def _share(self, size: int, tp: int) -> int:
        return share_of(size // self.unit, tp) * self.unit


class Block(Protocol):
    """A part of a connector of which ranks hold shares: the blocks of `resampler.py`, for example."""

    def splits(self, name: str) -> Mapping[str, Split]: ...

    def hidden_weights(self, name: str) -> Mapping[str, HiddenWeight]: ...

    def parameters(self, tp: int) -> int: ...


class Connector(ABC):
    """A kind of projector. One that lacks an answer cannot be made."""

    name: ClassVar[str]  # in --projector-kind
    options: ClassVar[type | None] = None  # a frozen dataclass of `option()`s: section NAME
    module: ClassVar[str]  # "package.module:name" of what `build` calls
    reads: ClassVar[tuple[str, ...]] = ()  # options of the projector that it heeds, beside `kind`
    # Features lie row by row as in the image, merged by model.projector.pixel_shuffle: what tiles, M-RoPE's positions
    # and DeepStack need.
    keeps_grid: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False  # --recompute-granularity full computes it again in the backward pass
    launches: ClassVar[tuple[float, float]] = (15, 14)  # kernels, forward and backward: an estimate
    cpu_calls: ClassVar[float] = 6  # overhead of a pass on a CPU, in units of a lone norm's

    def own(self, model: ModelConfig) -> Any:
        """Return the connector's options."""
        return getattr(model.projector.connectors, self.name)

    def resolved(self, model: ModelConfig) -> Any:
        """Return its options with the defaults that follow from the rest of the model."""
        return self.own(model)

    def problems(self, config: Config) -> Iterator[str]:
        """Yield what is wrong with the options, each in one line with the remedy. Ranges are checked before."""
        yield from ()

    @abstractmethod
    def tokens_per_grid(self, grid: Grid, projector: ProjectorConfig) -> int:
        """Return the number of features of an image of so many patches. Raises UserError if it has none."""

    def smallest_grid(self, projector: ProjectorConfig) -> Grid:
        """Return the fewest patches that have a feature."""
        return 1, 1

    def blocks(self, model: ModelConfig) -> Mapping[str, Block]:
        """Return the parts that ranks divide, by their names in the module; `splits` and `hidden_weights` ask them."""
        return {}

    @abstractmethod
    def parameters(self, model: ModelConfig, tp: int) -> int:
        """Return the parameters that one of `tp` ranks holds, biases, norms and padding included."""

    @abstractmethod
    def cost(self, model: ModelConfig, work: Workload) -> LayerCost:
        """Return the parameters of its matrices and the FLOPs of a forward pass, of all ranks together."""

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        """Return the weights that are matrices between hidden states, by their names in the module. To an update rule
        of whole matrices all others are no matrices.
        """
        found = (block.hidden_weights(name) for name, block in self.blocks(model).items())
        return {key: weight for weights in found for key, weight in weights.items()}

    def products(self, *, trained: bool, reached: bool) -> tuple[int, int]:
        """Return how often each pass takes the forward FLOPs (`LayerKind.products`)."""
        return 1, trained + reached

    @abstractmethod
    def saved_bytes(self, scenario: Scenario, *, trained: bool) -> float:
        """Return what autograd saves for the backward pass of a micro-batch on one rank, in bytes."""

    def communication(self, scenario: Scenario) -> Communication:
        """Return what a forward pass exchanges under tensor parallelism. By default whole patches come in, which
        sequence parallelism has scattered, and ranks do nothing together.
        """
        return Communication((stream_bytes(Stream.PATCHES, scenario),) * scenario.sequence_parallel)

    def splits(self, model: ModelConfig) -> Mapping[str, Split]:
        """Return how ranks divide weights, by their names in the module. All others are whole on each rank, which
        computes with them what all ranks do: their gradients are equal and need no sum.
        """
        found = (block.splits(name) for name, block in self.blocks(model).items())
        return {key: split for splits in found for key, split in splits.items()}

    def is_padded(self, model: ModelConfig, tp: int) -> bool:
        """Return whether some rank holds rows that the model does not have."""
        return any(split.size // split.blocks // split.unit % tp for split in self.splits(model).values())

    def kernels(self, model: ModelConfig) -> tuple[float, float]:
        """Return the kernels of a pass, forward and backward."""
        return self.launches

    def calls(self, model: ModelConfig) -> float:
        """Return the overhead of a pass on a CPU, in units of a lone norm's."""
        return self.cpu_calls

    def build(self, builder: Any) -> Any:
        """Return the module (`megavlm.model.connector`) for a `LayerBuilder`."""
        return from_code(self.module)(builder)

    hf_types: ClassVar[tuple[str, ...]] = ()  # values of `model_type` in config.json of folders with its weights

    def from_hf(self, settings: Any) -> Mapping[str, Any]:
        """Return the options that a config.json of `hf_types` decides (`families.shared.settings.Settings`).

        Raises UserError for a setting that is not supported.
        """
        return {}

    def hf_names(self, model: ModelConfig) -> tuple[HfNames, ...]:
        """Return the sets of names under which folders have the weights. Weights that a set lacks are drawn."""
        return ()

    def exported(self, model: ModelConfig) -> int | None:
        """Return the number of the set with all weights, whose names an export has; None: there is none."""
        return None

    def hf_config(self, model: ModelConfig) -> Mapping[str, Any] | None:
        """Return the config.json of a module of Transformers that reads an export's weights; None if there is none."""
        return None


@lru_cache(maxsize=64)
def _named(name: str) -> Connector:
    found = registered("connectors")[name]
    assert isinstance(found, Connector), name
    return found


def connector_of(projector: ProjectorConfig) -> Connector:
    """Return the connector that a configuration names."""
    return _named(projector.kind)
