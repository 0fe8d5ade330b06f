"""What megatron-core's schedules call in a step: transfers between chunks, timers, and the finalisation of
gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm.arch.dims import Dims
from megavlm.arch.schedules import BACKWARD, FORWARD, WEIGHT, rank_schedules, shape_of
from megavlm.inputs.batch import MicroBatch
from megavlm.model.vlm import VLMChunk
from megavlm.parallel.groups import Groups
from megavlm.pipeline.colocated import ColocatedEncoder
from megavlm.resilience.phases import COMMUNICATION, COMPUTE, PIPELINE, Phases

Size = tuple[int, ...]


class BatchShapedP2P(P2PCommunicator):
    """megatron-core's communicator, without the messages in which it sends the shape before each transfer of variable
    size, and for which the host waits.

    The schedule frees an output as soon as its transfer has started, by giving its tensor other memory. So another
    tensor of the same memory is sent, which a transfer under way may keep. On a GPU torch holds back the memory until
    then. On a CPU gloo may still read it, so a copy is sent unless the caller waits for the transfer.
    """

    def __init__(self, groups: Groups, config: TransformerConfig, *, sends_copies: bool) -> None:
        super().__init__(groups.pp, config)
        self._groups = groups
        self._sends_copies = sends_copies
        self._from_previous: deque[Size] = deque()
        self._from_next: deque[Size] = deque()

    def expect(self, chunks: Sequence[VLMChunk], batches: Sequence[MicroBatch]) -> None:
        """Compute the shapes of all transfers of the next step, which is on these micro-batches.

        Hidden states arrive from the previous rank in the order of this rank's forward passes, and gradients from the
        next rank in the order of its backward passes.
        """
        dims = self._groups.dims
        known = [[chunk.transferred(batch) for batch in batches] for chunk in chunks]
        ends = {kind: deque[Size]() for kind in (FORWARD, BACKWARD)}
        order = rank_schedules(shape_of(dims, len(batches)))[self._groups.coords.pp]
        for each in (each for each in order if each.kind in ends):  # weight gradients do not travel
            received, sent = known[each.chunk // dims.pp][each.micro]
            size = received if each.kind == FORWARD else sent
            if size is not None:
                ends[each.kind].append(size)
        self._from_previous, self._from_next = ends[FORWARD], ends[BACKWARD]

    def _communicate(self, *, tensor_send_next: Any, wait_on_reqs: bool = True, **others: Any) -> Any:
        if tensor_send_next is not None:
            tensor_send_next = tensor_send_next.detach()
            if self._sends_copies and not wait_on_reqs:
                tensor_send_next = tensor_send_next.clone()
        return super()._communicate(tensor_send_next=tensor_send_next, wait_on_reqs=wait_on_reqs, **others)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Size, Size]:
        """Return the shapes received from the previous and the next rank; megatron-core calls it before a transfer."""
        return self._from_previous.popleft() if recv_prev else (), self._from_next.popleft() if recv_next else ()


_COMPUTE = {
    "forward-compute": (FORWARD, "forward"),
    "backward-compute": (BACKWARD, "backward"),
    "weight-compute": (WEIGHT, "weights"),
}


class StepTimers:
    """megatron-core's timers: `timers("forward-compute").start()` begins a phase, `.stop()` ends it.

    Timers do not say which chunk runs, but the order is fixed before the step begins (`arch/schedules.py`). Between
    two passes a pipeline stage waits for its neighbours; what is neither a forward nor a backward pass keeps
    megatron-core's name in a trace.
    """

    def __init__(self, dims: Dims, *, rank: int, phases: Phases) -> None:
        """`rank` is the pipeline rank."""
        self.traced = False  # whether phases are labelled in a trace
        self._dims = dims
        self._rank = rank
        self._phases = phases
        self._between = PIPELINE if dims.pp > 1 else COMPUTE
        self._passes: dict[str, Iterator[str]] = {}
        self._open: dict[str, Any] = {}

    def begin_step(self, micro_batches: int) -> None:
        """Expect the passes of a training step."""
        order = rank_schedules(shape_of(self._dims, micro_batches))[self._rank]
        self._passes = {
            name: iter(
                [f"{word} of chunk {each.chunk}, micro-batch {each.micro}" for each in order if each.kind == kind]
            )
            for name, (kind, word) in _COMPUTE.items()
        }

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return _Timer(self, name)

    def begin(self, name: str) -> None:
        """Begin a phase."""
        label = name
        if name in _COMPUTE:
            label = next(self._passes[name])
            self._phases.enter(COMPUTE, label)
        if self.traced:
            self._open[name] = torch.profiler.record_function(label)
            self._open[name].__enter__()

    def end(self, name: str) -> None:
        """End it."""
        if name in _COMPUTE:
            self._phases.enter(self._between)
        if name in self._open:
            self._open.pop(name).__exit__(None, None, None)


@dataclass(frozen=True)
class _Timer:
    """megatron-core's view of one timer."""

    timers: StepTimers
    name: str

    def start(self, barrier: bool = False) -> None:
        self.timers.begin(self.name)

    def stop(self, barrier: bool = False) -> None:
        self.timers.end(self.name)


class NoSync:
    """The context in which all chunks accumulate gradients without reducing them.

    megatron-core's schedules enter the context that a call returns, and leave it before the last backward pass. If a
    schedule fails or runs forward only, it does not leave the context; `close` does.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        self._entered = ExitStack()

    def __call__(self) -> ExitStack:
        self._entered = ExitStack()
        for chunk in self._chunks:
            self._entered.enter_context(chunk.no_sync())
        return self._entered

    def close(self) -> None:
        """Leave the context if the schedule has not left it."""
        self._entered.close()


def finalize_gradients(
    chunks: list[Any],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
    *,
    groups: Groups,
    colocated: ColocatedEncoder | None = None,
    phases: Phases,
) -> None:
    """Finish the gradients after the last backward pass: reduce them over DP and TP, add up tied copies, then run a
    colocated encoder's backward pass. The schedule calls it.

    megatron-core would divide gradients by `num_tokens`, which the last stage alone counts, and let the host wait for
    it. Here they stay sums, and the update divides (`optim/chained.py`).
    """
    phases.enter(COMMUNICATION, "gradients")
    finalize_model_grads(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    sum_tied_gradients(chunks, groups)
    if colocated is not None:
        phases.enter(COMPUTE, "backward of the encoder")
        colocated.finish()


def sum_tied_gradients(chunks: Sequence[Any], groups: Groups) -> None:
    """Set `main_grad` of both copies of tied embeddings to the sum of both gradients, so that the copies stay equal.

    megatron-core synchronises copies on the first and last pipeline stage. Here the first language stage may be any
    stage, or another chunk of the last rank, so the copies have a group of their own.

    With the distributed optimizer only a rank's own shard of `main_grad` is reduced over data-parallel ranks at
    this point. megatron-core gives shared embeddings a bucket of their own, so copies are sharded alike and the sum
    of equal shards is right.
    """
    copies: list[Tensor] = [
        param.main_grad
        for chunk in chunks
        for param in chunk.parameters()
        if getattr(param, "shared_embedding", False) and param.requires_grad
    ]
    if not copies:
        return
    total = copies[0]
    for other in copies[1:]:
        total += other
    if groups.tied is not None:
        dist.all_reduce(total, group=groups.tied)
    for other in copies[1:]:
        other.copy_(total)
