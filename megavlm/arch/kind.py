"""`LayerKind`: the torch-free interface of a kind of layer. `kinds.py` lists the kinds.

Legend: t tokens of a rank between tensor-parallel regions (sharded under sequence parallelism), T tokens inside them,
e bytes of a number.

`HiddenWeight` says which weights are matrices between hidden states, and which of their rows are one matrix. An update
rule that treats a matrix as a whole must know that `linear_qkv` holds queries, keys and values, that the first layer of
a gated MLP holds gate and up, and that a tensor of experts holds one matrix of each. Embeddings, the output layer, the
patch embedding and position tables are not among these: each of their rows (or columns) belongs to a token, a pixel or
a position, and not to a hidden channel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import ClassVar

from megavlm.arch.scenario import Scenario
from megavlm.arch.workload import Workload
from megavlm.config.schema import ModelConfig

ROUND = 2**24  # elements of whole matrices that a rank has in memory at a time, unless one matrix has more


@dataclass(frozen=True)
class Band:
    """Rows of a weight that form one matrix: `count` rows, from row `first` on, of every `period` rows."""

    first: int
    count: int
    period: int

    def before(self, row: int) -> int:
        """Return the number of the band's rows that lie before row `row` of the weight."""
        periods, rest = divmod(row, self.period)
        return periods * self.count + min(max(rest - self.first, 0), self.count)

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the band's rows within rows `start` … `end − 1` as at most three runs (row, periods, count).

        A run has `count` rows in each of `periods` consecutive periods. Its first row is `row`.
        """
        whole = range(-(-start // self.period), end // self.period)  # periods that lie within
        if len(whole) == 0:
            middle = min(end, -(-start // self.period) * self.period)
            yield from self._in_period(start, middle)
            yield from self._in_period(middle, end)
            return
        yield from self._in_period(start, whole.start * self.period)
        yield whole.start * self.period + self.first, len(whole), self.count
        yield from self._in_period(whole.stop * self.period, end)

    def _in_period(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        origin = start // self.period * self.period + self.first
        low, high = max(start, origin), min(end, origin + self.count)
        if low < high:
            yield low, 1, high - low


@dataclass(frozen=True)
class HiddenWeight:
    """A weight [rows, columns] or [experts, rows, columns] whose rows form one or more matrices."""

    rows: int  # without padding
    columns: int
    bands: tuple[Band, ...]
    experts: int = 0  # 0: no axis of experts

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return self.rows * self.columns * (self.experts or 1)

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Yield the rows and columns of each matrix."""
        for _ in range(self.experts or 1):
            for band in self.bands:
                yield band.before(self.rows), self.columns


def hidden_weight(columns: int, *counts: int, periods: int = 1, experts: int = 0) -> HiddenWeight:
    """Return a weight of `periods` periods, each with `counts[0]` rows of the first matrix, then `counts[1]` of the
    next, ….

    Gate and up are two counts in one period; queries, keys and values three in as many periods as there are groups.
    """
    period = sum(counts)
    ends = accumulate(counts, initial=0)
    bands = tuple(Band(first, end - first, period) for first, end in pairwise(ends))
    return HiddenWeight(periods * period, columns, bands, experts)


FP32 = 4  # bytes


class Stream(Enum):
    """The tensor that a layer reads, which fixes the shape of its input."""

    PATCHES = "patches"  # packed vision tokens [V(/TP), 1, Hv]
    IMAGES = "images"  # image features [F, 1, Hl]
    FRAMES = "frames"  # packed positions of sounds [A(/TP), 1, Ha]
    FEATURES = "features"  # features of images, then of sounds, if there is an audio encoder: [F + Fa, 1, Hl]
    TEXT = "text"  # hidden states [S(/TP), B, Hl]


@dataclass(frozen=True)
class LayerCost:
    """Work of a layer's forward pass, summed over tensor-parallel ranks."""

    parameters: int  # of its matrices, without biases and norms
    forward_flops: float
    attention_flops: float = 0.0  # part of `forward_flops`: attention's products
    expert_flops: float = 0.0  # part of `forward_flops`: products of routed experts


@dataclass(frozen=True)
class Communication:
    """Tensors that a forward pass communicates among tensor-parallel ranks, each in bytes of the whole tensor.

    The backward pass is taken to communicate as much. An all-reduce counts as two reductions; one that only the forward
    pass has, or only the backward pass, counts as one.
    """

    gathers: tuple[float, ...] = ()
    reductions: tuple[float, ...] = ()
    exchanges: tuple[float, ...] = ()  # all-to-alls, which take as long as a gather of so many bytes


@dataclass(frozen=True)
class Exchange:
    """A collective of `ranks` ranks, `stride` apart. Each rank sends or receives all of a tensor but its own share."""

    ranks: int
    stride: int
    size: float  # bytes
    to_each: bool  # each rank sends every other one its part (all-to-all); else parts go around a ring


class LayerKind(ABC):
    """A kind of layer. A class that does not override all abstract methods fails when `kinds.py` is imported."""

    reads: ClassVar[Stream]
    launches: ClassVar[tuple[float, float]] = (2, 2)  # kernels, forward and backward (`benchmarks/host_time.py`)
    cpu_calls: ClassVar[float] = 1  # overhead of a pass on a CPU, in multiples of a single norm's

    def is_present(self, model: ModelConfig) -> bool:
        """Return whether the model has this layer; otherwise the layer is an identity."""
        return True

    @abstractmethod
    def parameters(self, model: ModelConfig, tp: int) -> int:
        """Return the number of parameters on one of `tp` ranks, with biases, norms and padding."""

    def model_parameters(self, model: ModelConfig) -> int:
        """Return the number of the model's parameters in the layer, without padding and without routed experts."""
        return self.parameters(model, 1)

    def expert_parameters(self, model: ModelConfig, ranks: int) -> int:
        """Return the parameters of routed experts on one of `ranks` (EP × ETP) ranks; `parameters` leaves them out."""
        return 0

    def hidden_weights(self, model: ModelConfig) -> Mapping[str, HiddenWeight]:
        """Return the weights that are matrices between hidden states, by their names within the layer."""
        return {}

    @abstractmethod
    def cost(self, model: ModelConfig, work: Workload, number: int) -> LayerCost:
        """Return the work of layer `number` of this kind (0 if the kind is not numbered)."""

    def kernels(self, model: ModelConfig) -> tuple[float, float]:
        """Return the number of kernels that the host launches for a forward pass and for a backward pass."""
        return self.launches

    def calls(self, model: ModelConfig) -> float:
        """Return the overhead of a pass on a CPU, in multiples of a single norm's."""
        return self.cpu_calls

    def is_recomputed(self, model: ModelConfig) -> bool:
        """Return whether full recomputation saves the layer's input alone."""
        return False

    def padding(self, model: ModelConfig, tp: int) -> tuple[float, float]:
        """Return the work of a rank relative to 1/TP, of linear layers and of attention: 1 without padding."""
        return 1.0, 1.0

    def products(self, scenario: Scenario, *, trained: bool, reached: bool) -> tuple[int, int]:
        """Return the FLOPs of a forward and a backward pass as multiples of the forward FLOPs: 1, and 1 per gradient.

        `trained`: the layer's own weights are trained. `reached`: its input needs a gradient.
        """
        return 1, trained + reached

    @abstractmethod
    def saved_bytes(self, scenario: Scenario, *, trained: bool, core_attention: bool) -> float:
        """Return the bytes that autograd saves for the backward pass of a micro-batch, on one tensor-parallel rank.

        `trained`: the layer's own weights are trained. `core_attention`: attention's products are recomputed.
        """

    def waiting_bytes(self, scenario: Scenario) -> float:
        """Return the bytes that a micro-batch keeps from a backward pass to its delayed weight gradients.

        They hold the inputs of linear layers and the gradients of their outputs; 0 if the layer delays no gradients.
        """
        return 0.0

    def communication(self, scenario: Scenario) -> Communication:
        """Return the tensors that a forward pass communicates under tensor parallelism (TP > 1)."""
        return Communication()

    def context_exchange(self, scenario: Scenario) -> tuple[tuple[int, float], ...]:
        """Return the collectives of a forward pass among context-parallel ranks (CP > 1).

        A collective is a pair: its number of ranks, and the bytes of a tensor. Each rank sends or receives all of the
        tensor but its own share.
        """
        return ()

    def expert_exchange(self, scenario: Scenario) -> tuple[Exchange, ...]:
        """Return the collectives of a forward pass among the ranks that share routed experts (EP × ETP > 1)."""
        return ()


def stream_bytes(stream: Stream, scenario: Scenario) -> float:
    """Return the bytes of the whole tensor `stream` of one micro-batch."""
    work, model, e = scenario.work, scenario.model, scenario.bytes_each
    if stream is Stream.FRAMES:
        return work.frames * model.audio.hidden_size * e
    if stream is Stream.PATCHES:
        return work.patches * model.vision.hidden_size * e
    counts = {Stream.IMAGES: work.features, Stream.FEATURES: work.features + work.sounds, Stream.TEXT: work.tokens}
    return counts[stream] * model.language.hidden_size * e


def norm_bytes(scenario: Scenario, tokens: float, width: int, normalization: str) -> float:
    """Return the bytes that a norm saves: input and statistics, or on a CPU for an RMS norm x and x̂ in fp32."""
    if normalization == "LayerNorm" or scenario.on_gpu:
        return tokens * (width * scenario.bytes_each + 8)
    return tokens * (2 * width + 1) * FP32
