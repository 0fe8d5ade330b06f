"""Find the first layer at which two models, or two libraries, differ by more than rounding explains.

Values are compared by their norms: d = |a − b| / |b|. Each operation rounds its result by at most u relative to its
size. u is the unit roundoff of the coarsest type in which either model computes, or in which only one of them stores
weights. Sums are in fp32, in any order. Errors of n layers are independent and add as squares, so rounding explains
d ≤ (C·u + S·u₃₂)·√n. C and S stand for the operations of a layer and the length of sums, and were measured on all
families (`tests/parity/test_hf_parts.py` checks them). The first layer that differs is compared module by module.

Between experts with nearly the same score rounding decides, and outputs then differ by much more. So tokens of the
second model (of ours, beside Transformers) take the experts that they take in the other, if rounding explains that
these have not its best scores.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megavlm.families.shared.table import Rename, Table
from megavlm.inputs.batch import MicroBatch
from megavlm.model.router import Router
from megavlm.model.vlm import VLMChunk

OPERATIONS, SUMS = 8.0, 16.0  # C and S
_FP32 = torch.finfo(torch.float32).eps / 2
# Modules whose output differs by design in Transformers: choices in place of scores, embeddings times their scale.
_OTHERWISE = (".mlp.router", "embedding.word_embeddings")
_DIRECTIONS = 4  # random directions on which rows of unknown order are projected


@dataclass(frozen=True)
class Row:
    """The comparison of one tensor of both models: its relative difference, and the largest that rounding explains."""

    name: str
    difference: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.name} (relative difference {self.difference:.1e}; rounding explains {self.allowed:.1e})"

    @property
    def parts(self) -> bool:
        return not self.difference <= self.allowed  # NaN differs, too


@dataclass(frozen=True)
class Model:
    """A whole model on this process, and the unit roundoff of its coarsest type (computation or stored weights)."""

    chunk: VLMChunk
    roundoff: float


def first_parting(rows: Sequence[Row]) -> Row | None:
    """Return the first row that rounding does not explain."""
    return next((row for row in rows if row.parts), None)


def compared(
    a: Model, b: Model, batches: Sequence[tuple[MicroBatch, MicroBatch]], *, gradients: bool = False
) -> list[Row]:
    """Compare two models on pairs of batches, the first for `a` and the second for `b`; return rows in this order.

    Inputs; outputs of all layers, with those of its modules before the first layer that differs; gradients, last layer
    first. Each row has the largest difference over the batches. If shapes of inputs differ, only inputs are returned.
    """
    allowed = _Allowance(max(a.roundoff, b.roundoff))
    rows = _Rows()
    for ours, theirs in batches:
        _inputs(rows, ours, theirs)
    if any(math.isinf(row.difference) for row in rows.rows()):  # inputs of different shapes
        return rows.rows()
    with _same_experts(a.chunk, b.chunk, allowed):
        for ours, theirs in batches:
            layers, others = _layers(a.chunk, ours), _layers(b.chunk, theirs)
            for name, value in layers.items():
                number = a.chunk.names.index(name) + 1
                rows.add(name, difference(value, others.get(name)), allowed.after(number))
        parted = next((row.name for row in rows.rows() if row.parts and row.name in a.chunk.names), None)
        if parted is not None:
            found = _Rows()
            for ours, theirs in batches:
                modules, others = (_modules(*each, below=parted) for each in ((a.chunk, ours), (b.chunk, theirs)))
                for name, value in modules.items():
                    if name in others:  # only one of the models may have adapters
                        found.add(name, difference(value, others[name]), allowed.after(a.chunk.names.index(parted) + 1))
            rows.insert(before=parted, others=found.rows())
        if gradients:
            _gradients(rows, a, b, batches, allowed)
    return rows.rows()


def beside_transformers(
    ours: Model, theirs: nn.Module, table: Table, batches: Sequence[tuple[MicroBatch, Mapping[str, Any]]]
) -> list[Row]:
    """Compare our model with Transformers' (`theirs`): the outputs of modules whose weight is only renamed in `table`.

    Transformers orders the rows of features and the samples of a batch differently. So the sorted projections of all
    rows on a few random directions are compared, which do not depend on the order. A module with another number of rows
    or channels in Transformers is left out.
    """
    allowed = _Allowance(ours.roundoff)
    known, there = dict(ours.chunk.named_modules()), dict(theirs.named_modules())
    pairs = {
        key.removesuffix(".weight"): rule.hf_name.removesuffix(".weight")
        for key, rule in table.items()
        if key.endswith(".weight") and isinstance(rule, Rename) and not key[: -len(".weight")].endswith(_OTHERWISE)
    }
    pairs = {name: other for name, other in pairs.items() if name in known and other in there}
    rows, dtype = _Rows(), cast(Any, theirs).dtype
    for batch, given in batches:
        typed = {name: each.to(dtype) if each.is_floating_point() else each for name, each in given.items()}
        with _experts_of(there, ours.chunk, table, allowed):
            with torch.no_grad(), _recorded({other: there[other] for other in pairs.values()}) as values:
                theirs(**typed, use_cache=False)
            found = _outputs(ours.chunk, batch, {name: known[name] for name in pairs})
        for name, value in found.items():
            other = values.get(pairs[name])
            if other is not None and other.shape[-1] == value.shape[-1] and other.numel() == value.numel():
                apart = difference(_sorted(value), _sorted(other))
                rows.add(name, apart, allowed.after(1 + _layer_of(ours.chunk, name)))
    return rows.rows()


def difference(a: Tensor, b: Tensor | None) -> float:
    """Return |a − b| / |b|; 0 if both are zero; infinity for different shapes, without b, or if only b is zero."""
    if b is None or a.shape != b.shape:
        return math.inf
    size = float(b.norm())
    apart = float((a - b).norm())
    return apart / size if size else math.inf if apart else 0.0


@dataclass(frozen=True)
class _Allowance:
    roundoff: float

    def after(self, layers: int) -> float:
        return (OPERATIONS * self.roundoff + SUMS * _FP32) * math.sqrt(layers)


class _Rows:
    """Rows by name, in the order of their first appearance, each with its largest difference."""

    def __init__(self) -> None:
        self._found: dict[str, Row] = {}

    def add(self, name: str, apart: float, allowed: float) -> None:
        before = self._found.get(name)
        if before is None or not apart <= before.difference:
            self._found[name] = Row(name, apart, allowed)

    def insert(self, *, before: str, others: Sequence[Row]) -> None:
        rows = self.rows()
        at = list(self._found).index(before)
        self._found = {row.name: row for row in (*rows[:at], *others, *rows[at:])}

    def rows(self) -> list[Row]:
        return list(self._found.values())


class _Experts:
    """Records the experts that a router chooses, or replays those of another model, pass by pass.

    A choice is replayed where rounding explains that its scores are not the best here. megatron-core calls
    `get_replay_topk`.
    """

    def __init__(self, *, replayed: deque[Tensor] | None = None, allowed: float = 0.0) -> None:
        """Take the best experts or, where scores differ by at most `allowed`, those of `replayed`."""
        self._replayed, self._allowed = replayed, allowed
        self.passes = deque[Tensor]()  # chosen experts [T, k]

    def get_replay_topk(self, scores: Tensor, k: int, *groups: Any) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of each token's experts; `groups` ends with the function that finds the best."""
        *limits, best_of = groups
        best, chosen = best_of(scores, k, *limits)
        self.passes.append(chosen)
        others = self._replayed.popleft() if self._replayed else chosen
        if others.shape != chosen.shape:
            return best, chosen
        theirs = scores.gather(1, others)
        apart = difference(*(each.detach().float().sort().values for each in (theirs, best)))
        return (theirs, others) if apart <= self._allowed else (best, chosen)


@contextmanager
def _same_experts(a: VLMChunk, b: VLMChunk, allowed: _Allowance) -> Iterator[None]:
    """Let tokens take the same experts in `b` as in `a`, which runs first, where rounding explains other scores."""
    routers = _routers(b)
    pairs = [(module, routers[name], name) for name, module in _routers(a).items() if name in routers]
    try:
        for ours, theirs, name in pairs:
            ours.replay = _Experts()
            theirs.replay = _Experts(replayed=ours.replay.passes, allowed=allowed.after(1 + _layer_of(a, name)))
        yield
    finally:
        for ours, theirs, _ in pairs:
            ours.replay = theirs.replay = None


@contextmanager
def _experts_of(there: Mapping[str, nn.Module], ours: VLMChunk, table: Table, allowed: _Allowance) -> Iterator[None]:
    """Do as `_same_experts` with Transformers' model, whose modules are `there`, which runs first."""
    with ExitStack() as stack:
        for name, router in _routers(ours).items():
            parents = accumulate(table[f"{name}.weight"].hf_names[0].split("."), "{}.{}".format)
            found = [there[place] for parent in parents if (place := f"{parent}.experts") in there]
            if found:
                taken = deque[Tensor]()
                hook = found[-1].register_forward_pre_hook(partial(_note_choice, taken), with_kwargs=True)
                stack.callback(hook.remove)
                router.replay = _Experts(replayed=taken, allowed=allowed.after(1 + _layer_of(ours, name)))
                stack.callback(setattr, router, "replay", None)
        yield


def _note_choice(taken: deque[Tensor], module: nn.Module, *given: Any) -> None:
    """Append the experts that Transformers gives to their module, between hidden states and weights."""
    taken.extend(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.dtype == torch.int64)


def _routers(chunk: VLMChunk) -> dict[str, Router]:
    return {name: module for name, module in chunk.named_modules() if isinstance(module, Router)}


def _inputs(rows: _Rows, ours: MicroBatch, theirs: MicroBatch) -> None:
    others = theirs.host_tensors()
    for name, value in ours.host_tensors().items():
        other = others.get(name)
        rows.add(f"inputs.{name}", difference(value.float(), None if other is None else other.float()), 1e-6)


def _layers(chunk: VLMChunk, batch: MicroBatch) -> dict[str, Tensor]:
    """Run a forward pass and return the output of each layer by name, in fp32 on the CPU."""
    found: dict[str, Tensor] = {}
    run = chunk.run_layer

    def noting(name: str, hidden: Any, context: Any) -> Tensor:
        output = run(name, hidden, context)
        found[name] = _kept(output)
        return output

    chunk.run_layer = noting  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            chunk(batch.to(chunk.device), logits=True)
    finally:
        del chunk.run_layer
    return found


def _modules(chunk: VLMChunk, batch: MicroBatch, *, below: str) -> dict[str, Tensor]:
    """Return the outputs of all modules inside the layer `below` by name, in the order in which the modules finish."""
    inside = {name: module for name, module in chunk.named_modules() if name.startswith(f"{below}.")}
    return _outputs(chunk, batch, inside)


def _outputs(chunk: VLMChunk, batch: MicroBatch, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    with torch.no_grad(), _recorded(modules) as found:
        chunk(batch.to(chunk.device), logits=True)
    return found


@contextmanager
def _recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Record the outputs of modules by name while the context is open; yield the dictionary that they go to."""
    found: dict[str, Tensor] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(module: nn.Module, given: Any, output: Any) -> None:
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
                found[name] = _kept(output)

        return note

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(noting(name)).remove)
        yield found


def _kept(output: Any) -> Tensor:
    """Return the output of a module as one fp32 tensor on the CPU, plus the bias if megatron-core returns it apart."""
    first, *others = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    value = first.detach().to(torch.float32, copy=True)  # later operations may change the output in place
    for other in others:
        if other.shape == first.shape[-1:]:
            value = value + other.detach().float()
    return value.cpu()


def _sorted(value: Tensor) -> Tensor:
    """Return the projections of all rows on fixed directions, each in ascending order."""
    rows = value.reshape(-1, value.shape[-1])
    directions = torch.randn(rows.shape[1], _DIRECTIONS, generator=torch.Generator().manual_seed(0))
    return (rows @ directions).sort(dim=0).values


def _gradients(
    rows: _Rows, a: Model, b: Model, batches: Sequence[tuple[MicroBatch, MicroBatch]], allowed: _Allowance
) -> None:
    """Add rows for the gradients of the summed loss, last layer first; n counts the layers of both passes."""
    ours, theirs = (_gradients_of(*each) for each in zip((a.chunk, b.chunk), zip(*batches, strict=True), strict=True))
    for name, value in ours.items():
        passed = 2 * len(a.chunk.names) - _layer_of(a.chunk, name)
        rows.add(f"gradient of {name}", difference(value, theirs.get(name)), allowed.after(passed))


def _gradients_of(chunk: VLMChunk, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Return the gradient of each parameter by name, in the order of the backward pass."""
    found: dict[str, Tensor] = {}
    chunk.requires_grad_(True)
    with ExitStack() as stack:
        for name, param in chunk.named_parameters():
            note = partial(found.__setitem__, name)
            stack.callback(param.register_post_accumulate_grad_hook(note).remove)
        for batch in batches:
            moved = batch.to(chunk.device)
            chunk.set_input_tensor(None)
            (chunk(moved) * moved.text.loss_mask).sum().backward()
    gradients = {name: param.grad.float().cpu() for name, param in found.items() if param.grad is not None}
    chunk.zero_grad(set_to_none=True)
    return gradients


def _layer_of(chunk: VLMChunk, name: str) -> int:
    """Return the number, from 0, of the layer that contains the module or parameter of a name."""
    return next(number for number, layer in enumerate(chunk.names) if f"{name}.".startswith(f"{layer}."))
