"""`Connector`: the torch-free interface of a kind of projector. The package's own connectors are in `connectors/`.

A connector turns the patches of each image into features for the language model. The rest of the program asks this
class: the planner for FLOPs, bytes and communication, the data for tokens per image, checkpoints for how its weights
are sharded. Only `build` needs torch, which it imports when it is called.
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
    """How tensor-parallel ranks shard a weight.

    The weight has `blocks` equal parts along `axis`. Each part is sharded in units of `unit` rows (an attention
    head's), and padded with zeros.
    """

    axis: int
    size: int  # the model's rows along the axis, in all blocks together
    unit: int = 1
    blocks: int = 1

    def part(self, tp: int, rank: int) -> Part | None:
        """Return the shard of a rank; None if shards are equal and follow each other in the order of ranks."""
        block = self.size // self.blocks
        if (self.blocks == 1 or tp == 1) and block // self.unit % tp == 0:
            return None
        return Part(self.axis, self.size, share_runs(block, tp, rank, blocks=self.blocks, share=self._share))

    def _share(self, size: int, tp: int) -> int:
        return share_of(size // self.unit, tp) * self.unit


class Block(Protocol):
    """Interface of a part of a connector with weights sharded over tensor-parallel ranks, such as an `MlpBlock`."""

    def splits(self, name: str) -> Mapping[str, Split]: ...

    def hidden_weights(self, name: str) -> Mapping[str, HiddenWeight]: ...

    def parameters(self, tp: int) -> int: ...


class Connector(ABC):
    """A kind of projector. A class that does not override all abstract methods cannot be instantiated."""

    name: ClassVar[str]  # value of --projector-kind
    options: ClassVar[type | None] = None  # a frozen dataclass whose fields are `option()`s
    module: ClassVar[str]  # "package.module:name" of what `build` calls
    reads: ClassVar[tuple[str, ...]] = ()  # options of `model.projector` that it reads, besides `kind`
    # Features are a grid like the patches, merged by model.projector.pixel_shuffle, as tiles, M-RoPE's positions and
    # DeepStack need.
    keeps_grid: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False  # --recompute-granularity full recomputes it in the backward pass
    launches: ClassVar[tuple[float, float]] = (15, 14)  # kernels, forward and backward: an estimate

    def own(self, model: ModelConfig) -> Any:
        """Return the connector's options."""
        return getattr(model.projector.connectors, self.name)

    def resolved(self, model: ModelConfig) -> Any:
        """Return the connector's options, completed by the defaults that follow from the rest of the model."""
        return self.own(model)

    def problems(self, config: Config) -> Iterator[str]:
        """Yield one line for each mistake in the options, with its remedy. Ranges have been checked before."""
        yield from ()

    @abstractmethod
    def tokens_per_grid(self, grid: Grid, projector: ProjectorConfig) -> int:
        """Return the number of features of an image with this grid of patches. Raises UserError if it has none."""

    def smallest_grid(self, projector: ProjectorConfig) -> Grid:
        """Return the smallest grid of patches that has a feature."""
        return 1, 1

    def blocks(self, model: ModelConfig) -> Mapping[str, Block]:
        """Return the blocks with sharded weights, by their names in the module, for `splits` and `hidden_weights`."""
        return {}

    @abstractmethod
    def parameters(self, model: ModelConfig, tp: int) -> int:
        """Return the number of parameters on one of `tp` ranks, with biases, norms and padding."""

    @abstractmethod
    def cost(self, model: ModelConfig, work: Workload) -> LayerCost:
        """Return the parameters of the matrices and the FLOPs of a forward pass, summed over tensor-parallel ranks."""

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        """Return the weights that are matrices between hidden states, by their names in the module.

        Update rules of whole matrices leave all other weights to an elementwise rule.
        """
        mappings = (block.hidden_weights(name) for name, block in self.blocks(model).items())
        return {key: weight for weights in mappings for key, weight in weights.items()}

    def products(self, *, trained: bool, reached: bool) -> tuple[int, int]:
        """Return the FLOPs of a forward and a backward pass, as multiples of forward FLOPs (`LayerKind.products`)."""
        return 1, trained + reached

    @abstractmethod
    def saved_bytes(self, scenario: Scenario, *, trained: bool) -> float:
        """Return the bytes that autograd saves for the backward pass of a micro-batch, on one rank."""

    def communication(self, scenario: Scenario) -> Communication:
        """Return the tensors that a forward pass communicates under tensor parallelism.

        The default is the all-gather of the patches, which sequence parallelism has sharded.
        """
        return Communication((stream_bytes(Stream.PATCHES, scenario),) * scenario.sequence_parallel)

    def splits(self, model: ModelConfig) -> Mapping[str, Split]:
        """Return how weights are sharded, by their names in the module.

        All other weights are replicated. All ranks do the same computation with them, so their gradients are equal and
        need no all-reduce.
        """
        mappings = (block.splits(name) for name, block in self.blocks(model).items())
        return {key: split for splits in mappings for key, split in splits.items()}

    def is_padded(self, model: ModelConfig, tp: int) -> bool:
        """Return whether the shard of some rank has padding rows."""
        return any(split.size // split.blocks // split.unit % tp for split in self.splits(model).values())

    def kernels(self, model: ModelConfig) -> tuple[float, float]:
        """Return the number of kernels of a forward pass and of a backward pass."""
        return self.launches

    def build(self, builder: Any) -> Any:
        """Build the torch module (`megavlm.model.connector`) with a `LayerBuilder`."""
        return from_code(self.module)(builder)

    hf_types: ClassVar[tuple[str, ...]] = ()  # values of `model_type` in config.json of folders with its weights

    def from_hf(self, settings: Any) -> Mapping[str, Any]:
        """Return the options that follow from a config.json whose model type is in `hf_types`; `settings` is a
        `families.shared.settings.Settings`.

        Raises UserError for a setting that is not supported.
        """
        return {}

    def hf_names(self, model: ModelConfig) -> tuple[HfNames, ...]:
        """Return the sets of names that weights have in Hugging Face folders. Weights not in a set are initialised."""
        return ()

    def exported(self, model: ModelConfig) -> int | None:
        """Return the index of the set of `hf_names` that exports use; None if the connector cannot be exported."""
        return None

    def hf_config(self, model: ModelConfig) -> Mapping[str, Any] | None:
        """Return the config.json for the Transformers module that reads an export; None if there is no such module."""
        return None


@lru_cache(maxsize=64)
def _named(name: str) -> Connector:
    connector = registered("connectors")[name]
    assert isinstance(connector, Connector), name
    return connector


def connector_of(projector: ProjectorConfig) -> Connector:
    """Return the connector that the configuration names."""
    return _named(projector.kind)
