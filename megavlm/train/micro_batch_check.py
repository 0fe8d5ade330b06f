"""Compute a micro-batch twice and compare bit for bit (`numerics.verify_micro_batch_interval`).

A device that computes wrongly now and then gives two results for the same inputs and random numbers, long before a loss
shows it. Each chunk is checked by itself, before its first forward pass of a step and with the input that it received:
a forward pass, then the backward pass of ½‖output‖², whose gradient is the output itself. So no pipeline stage waits
for a gradient of another one, and what one stage computes wrongly does not look wrong in the next. Tensor-parallel
ranks run the same passes at the same time, as ever.

Both passes leave nothing behind: no gradient, no random number, no entry in a history of FP8 scales.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megavlm.inputs.batch import MicroBatch
from megavlm.model.router import routers_of
from megavlm.model.vlm import VLMChunk, bare_chunk
from megavlm.optim.fully_sharded import FullyShardedChunk
from megavlm.parallel.groups import random_states, set_random_states
from megavlm.parallel.shards import local_part
from megavlm.train.replicas import Difference, checksum
from megavlm.train.state_before import Histories

Checksums = dict[str, Tensor]  # by what they are of, in the order in which a pass computes them


@dataclass(frozen=True, order=True)
class _Found:
    """The first place of a pass where this rank's results differ. Ranks compare places of the same chunk."""

    chunk: int
    place: int
    rank: int
    what: str


@contextmanager
def computed_twice(chunks: Sequence[Any]) -> Iterator[Callable[[], Difference | None]]:
    """Check, within this context, each chunk when it runs its first micro-batch.

    Yields a function that returns the first difference, equal on all ranks, or None; every rank calls it after a step.
    """
    found: list[tuple[int, Checksums, Checksums]] = []

    def forward(index: int, chunk: Any, batch: MicroBatch) -> Tensor:
        del chunk.__dict__["forward"]  # the first micro-batch only
        found.append((index, *_twice(chunk, batch)))
        return chunk.forward(batch)

    for index, chunk in enumerate(chunks):
        chunk.__dict__["forward"] = partial(forward, index, chunk)
    try:
        yield lambda: _first_difference([_compared(*each) for each in found])
    finally:
        for chunk in chunks:
            chunk.__dict__.pop("forward", None)


def _compared(chunk: int, once: Checksums, again: Checksums) -> _Found | None:
    differs = torch.stack([once[name] != again[name] for name in once]).tolist()
    place = next((place for place, each in enumerate(differs) if each), None)
    return None if place is None else _Found(chunk, place, dist.get_rank(), list(once)[place])


def _first_difference(own: Sequence[_Found | None]) -> Difference | None:
    """Return the first layer at which results differ, and its ranks; later differences may only follow from it."""
    every: list[list[_Found]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, [each for each in own if each is not None])
    places = sorted(each for found in every for each in found)
    if not places:
        return None
    first = places[0]
    ranks = {
        each.rank for each in places if (each.chunk, each.place, each.what) == (first.chunk, first.place, first.what)
    }
    return Difference(tuple(sorted(ranks)), first.what)


def _twice(chunk: Any, batch: MicroBatch) -> tuple[Checksums, Checksums]:
    """Return the checksums of two passes that begin alike, and leave everything as it was."""
    bare = bare_chunk(chunk)
    received, random, histories = bare.input_tensor, random_states(), Histories.of([bare])
    first = {module: module.is_first_microbatch for module in bare.modules() if hasattr(module, "is_first_microbatch")}
    tallies = [(router.tally, router.tally.clone()) for router in routers_of([bare])]
    passes = []
    with _deterministic(bare), _unreduced(chunk), torch.enable_grad():
        for _ in range(2):
            bare.input_tensor = _leaf(received)
            passes.append(_pass(chunk, bare, batch))
            set_random_states(random)
            histories.restore()
            for module, value in first.items():
                module.is_first_microbatch = value
            for tally, value in tallies:
                tally.copy_(value)
    bare.input_tensor = received
    return passes[0], passes[1]


def _pass(chunk: Any, bare: VLMChunk, batch: MicroBatch) -> Checksums:
    """Return the checksums of a forward and a backward pass; its gradients are cleared again."""
    sums: Checksums = {}
    times: Counter[str] = Counter()

    def note(what: str, value: Tensor) -> None:
        times[what] += 1
        sums[what if times[what] == 1 else f"{what} (call {times[what]})"] = checksum(value)

    if batch.features is not None:
        batch = replace(batch, features=replace(batch.features, values=_leaf(batch.features.values)))
    with _watched(bare, note):
        output = type(chunk).forward(chunk, batch)
        note(f"what {bare.names[-1]} passes on", output)
        if output.requires_grad:
            torch.autograd.backward(output, output.detach())
    inputs = {"the input": bare.input_tensor, "the features": None if batch.features is None else batch.features.values}
    for what, leaf in inputs.items():
        if leaf is not None and leaf.grad is not None:
            note(f"the gradient of {what} of {bare.names[0]}", leaf.grad)
    summed = ", summed over data-parallel ranks" if isinstance(chunk, FullyShardedChunk) else ""
    for name, param in bare.named_parameters():
        gradient = param.grad if summed else getattr(param, "main_grad", None)
        if gradient is not None:
            own = local_part(gradient)  # of offloaded parameters on the host, where no other result is
            note(f"the gradient of {name}{summed}", own.to(chunk.device) if summed else own)
    if isinstance(chunk, FullyShardedChunk):
        chunk.zero_grad_buffer()
    for buffer in (
        [*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())] if not summed else ()
    ):
        buffer.reset()
    return sums


@contextmanager
def _watched(chunk: VLMChunk, note: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `note`, within this context, with the output of each module that runs, and with the gradient of it."""

    def see(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, Tensor):
            note(f"the output of {name}", value)
            if value.requires_grad:
                value.register_hook(partial(note, f"the gradient of the output of {name}"))

    with ExitStack() as hooks:
        for name, module in chunk.named_modules():
            if name:
                hooks.callback(module.register_forward_hook(partial(see, name)).remove)
        yield


@contextmanager
def _deterministic(chunk: VLMChunk) -> Iterator[None]:
    """Let torch and Transformer Engine use kernels that add in a fixed order, where they have such."""
    attention = [module for module in chunk.modules() if getattr(module, "deterministic", None) is False]
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        for module in attention:
            module.deterministic = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)
            for module in attention:
                module.deterministic = False


@contextmanager
def _unreduced(chunk: Any) -> Iterator[None]:
    """Keep megatron-core from reducing gradients within this context, be it within its own `no_sync` or not."""
    groups = getattr(chunk, "bucket_groups", [])
    before = [group.is_last_microbatch for group in groups]
    for group in groups:
        group.is_last_microbatch = False
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group.is_last_microbatch = value


def _leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
