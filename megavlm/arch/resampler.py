"""Torch-free blocks of resamplers: attention of queries to patches or to one another, and MLPs.

`megavlm/model/resampler.py` is the torch half. Attention heads and the inner channels of MLPs are sharded over
tensor-parallel ranks; all else is replicated.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavlm.arch.connector import Split
from megavlm.arch.kind import FP32, HiddenWeight, hidden_weight, norm_bytes
from megavlm.arch.scenario import Scenario
from megavlm.arch.tensor_split import share_of


@dataclass(frozen=True)
class AttentionBlock:
    """Attention of queries `width` wide, in `heads` heads, to positions `context` wide, in `groups` key/value heads."""

    width: int
    context: int
    heads: int
    groups: int
    head_width: int
    bias: bool

    def splits(self, name: str) -> dict[str, Split]:
        """Return how weights are sharded: by key/value heads, each with its query heads."""
        per_group = self.heads // self.groups * self.head_width
        rows = {"query": (self.groups * per_group, per_group), "key": (self.groups * self.head_width, self.head_width)}
        rows["value"] = rows["key"]
        of_rows = {f"{name}.{leaf}.weight": Split(0, size, unit) for leaf, (size, unit) in rows.items()}
        of_rows |= {f"{name}.{leaf}.bias": Split(0, size, unit) for leaf, (size, unit) in rows.items() if self.bias}
        return of_rows | {f"{name}.output.weight": Split(1, self.groups * per_group, per_group)}

    def hidden_weights(self, name: str) -> dict[str, HiddenWeight]:
        """Return the weights that are matrices between hidden states, by their names below `name`."""
        wide, narrow = self.local(1)
        rows = {"query": (wide, self.width), **dict.fromkeys(("key", "value"), (narrow, self.context))}
        rows["output"] = (self.width, wide)
        return {f"{name}.{leaf}.weight": hidden_weight(columns, count) for leaf, (count, columns) in rows.items()}

    def local(self, tp: int) -> tuple[int, int]:
        """Return the number of channels of queries, and of keys, on one of `tp` ranks."""
        groups = share_of(self.groups, tp)
        return groups * (self.heads // self.groups) * self.head_width, groups * self.head_width

    def parameters(self, tp: int) -> int:
        """Return the number of parameters on one of `tp` ranks, with biases and padding."""
        queries, keys = self.local(tp)
        return (
            (self.width + self.bias) * queries
            + 2 * (self.context + self.bias) * keys
            + self.width * (queries + self.bias)
        )

    def flops(self, queries: float, projected: float, pairs: float) -> tuple[float, float]:
        """Return the FLOPs of the linear layers, and those of attention.

        `projected` positions become keys and values, and `pairs` pairs of a query and a key are scored.
        """
        wide, narrow = self.local(1)
        products = 2.0 * (2 * self.width * wide * queries + 2 * self.context * narrow * projected)
        return products, 4.0 * wide * pairs

    def saved_bytes(self, scenario: Scenario, queries: float, keys: float) -> float:
        """Return the bytes that attention saves: queries, keys, values, output, and one number per query and head."""
        wide, narrow = self.local(scenario.dims.tp)
        return (2 * wide * queries + 2 * narrow * keys) * scenario.bytes_each + wide / self.head_width * queries * FP32


@dataclass(frozen=True)
class MlpBlock:
    """An MLP: linear, activation, linear. If `gated`, activation(gate) · up takes the place of the first two."""

    width: int
    inner: int
    outputs: int
    gated: bool
    bias: bool

    @property
    def first(self) -> tuple[str, ...]:
        """Return the names of the linear layers before the activation."""
        return ("gate", "up") if self.gated else ("fc1",)

    def splits(self, name: str) -> dict[str, Split]:
        """Return how weights are sharded, by their names below `name`: along the inner channels."""
        leaves = ("weight", "bias") if self.bias else ("weight",)
        rows = {f"{name}.{layer}.{leaf}": Split(0, self.inner) for layer in self.first for leaf in leaves}
        return rows | {f"{name}.fc2.weight": Split(1, self.inner)}

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of all weights of the MLP."""
        return (*self.splits(name), *(f"{name}.fc2.bias",) * self.bias)

    def hidden_weights(self, name: str) -> dict[str, HiddenWeight]:
        """Return the weights that are matrices between hidden states, by their names below `name`."""
        first = {f"{name}.{layer}.weight": hidden_weight(self.width, self.inner) for layer in self.first}
        return first | {f"{name}.fc2.weight": hidden_weight(self.inner, self.outputs)}

    def parameters(self, tp: int) -> int:
        """Return the number of parameters on one of `tp` ranks, with biases and padding."""
        inner = share_of(self.inner, tp)
        return (self.width + self.bias) * inner * len(self.first) + self.outputs * (inner + self.bias)

    def flops(self, tokens: float) -> float:
        """Return the FLOPs of a forward pass, summed over tensor-parallel ranks."""
        return 2.0 * tokens * self.inner * (self.width * len(self.first) + self.outputs)

    def saved_bytes(self, scenario: Scenario, tokens: float, *, trained: bool) -> float:
        """Return the bytes that the MLP saves: inputs of the activation, its output and the other factor if gated, and
        the input of fc2 if trained.
        """
        tensors = (3 if self.gated else 1) + trained
        return tensors * tokens * share_of(self.inner, scenario.dims.tp) * scenario.bytes_each


def norm_saved(scenario: Scenario, tokens: float, width: int, kind: str, *, trained: bool) -> float:
    """Return the bytes that a norm saves, with its output if the following linear layers are trained.

    On a CPU, an RMS norm saves x̂ only if its weight is trained.
    """
    kept = norm_bytes(scenario, tokens, width, kind) + tokens * width * scenario.bytes_each * trained
    spared = kind == "RMSNorm" and not scenario.on_gpu and not trained
    return kept - tokens * width * FP32 * spared
