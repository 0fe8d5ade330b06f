"""Run a step's passes in any fixed order: the runtime of all schedules, and of passes without gradients.

Two ranks that send to each other deadlock if they begin their transfers in different orders, because NCCL runs the
transfers of a pair of ranks one after the other. So all transfers of a step have one global order, and both ends of a
transfer follow it: the order in which the producing passes begin in a simulated step. A rank waits for a transfer only
after it has begun all of its own earlier transfers, so the first unfinished transfer can always complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor, forward_step
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm.arch.dims import Dims
from megavlm.arch.schedules import BACKWARD, FORWARD, WEIGHT, Pass, PipelineShape, shape_of, simulate, uniform
from megavlm.inputs.batch import MicroBatch
from megavlm.model.vlm import bare_chunk
from megavlm.model.weight_gradients import WeightGradients, leave_weight_gradients
from megavlm.parallel.groups import Groups
from megavlm.resilience.phases import COMPUTE, PIPELINE, Phases


class Transfers:
    """The asynchronous transfers of one step between this rank and others of `group`. A rank waits for a transfer only
    when it needs the tensor. Both ranks of a pair must begin their transfers in the same order (`rank_program`).
    """

    def __init__(self, group: dist.ProcessGroup, *, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._dtype = dtype
        self._device = device
        self._arriving: dict[Pass, tuple[Any, Tensor]] = {}
        self._leaving: dict[Pass, tuple[Any, Tensor]] = {}

    def receive(self, made_by: Pass, size: tuple[int, ...], *, source: int) -> None:
        """Begin to receive the output of a pass on rank `source`."""
        tensor = torch.empty(size, dtype=self._dtype, device=self._device)
        self._arriving[made_by] = dist.irecv(tensor, group=self._group, group_src=source), tensor

    def received(self, made_by: Pass) -> Tensor:
        """Wait for the receive and return its tensor."""
        work, tensor = self._arriving.pop(made_by)
        work.wait()
        return tensor

    def send(self, made_by: Pass, tensor: Tensor, *, target: int) -> None:
        """Begin to send the output of a pass. Its memory is kept until sent, even if the tensor is deallocated."""
        self._leaving = {each: held for each, held in self._leaving.items() if not held[0].is_completed()}
        kept = tensor.detach().contiguous()
        self._leaving[made_by] = dist.isend(kept, group=self._group, group_dst=target), kept

    def has_arrived(self, made_by: Pass) -> None:
        """Free a sent tensor once a reply shows that it has arrived: gloo does not report completion."""
        if made_by in self._leaving:
            self._leaving.pop(made_by)[0].wait()

    def finish(self) -> None:
        """Wait until all sent tensors have arrived."""
        for work, _ in self._leaving.values():
            work.wait()
        self._leaving.clear()


@dataclass(frozen=True)
class Receive:
    """An instruction to begin to receive the output of a pass on another rank."""

    made_by: Pass


_ONWARD = {FORWARD: 1, BACKWARD: -1}  # hidden states go to the next chunk, gradients to the previous one


def receiver(made_by: Pass, shape: PipelineShape, *, way: int = 1) -> Pass | None:
    """Return the pass of another chunk that takes this pass's output as input; None if no pass does."""
    chunk = made_by.chunk + way * _ONWARD.get(made_by.kind, shape.chunks)
    return Pass(made_by.kind, chunk, made_by.micro) if 0 <= chunk < shape.chunks else None


def maker(needed_by: Pass, shape: PipelineShape) -> Pass | None:
    """Return the pass of another chunk whose output this pass takes as input; None if no pass does."""
    return receiver(needed_by, shape, way=-1)


@lru_cache(maxsize=64)
def rank_program(shape: PipelineShape, rank: int) -> tuple[Pass | Receive, ...]:
    """Return a rank's passes in order, interleaved with the points at which its receives begin.

    All passes are assumed to take the same time, except that whole backward passes take twice as long. A pass begins
    after the passes that it depends on, so all ranks can follow the passes of all ranks sorted by start time.
    """
    each, whole = [1.0] * shape.chunks, [1.0 if shape.splits_backward else 2.0] * shape.chunks
    durations = uniform(each, whole, micro_batches=shape.micro_batches, weight=each)
    events = simulate(shape, durations, keep_events=True).events
    program: list[Pass | Receive] = []
    for event in sorted(events, key=lambda event: (event.start, event.rank)):
        to = receiver(event.step, shape)
        if event.rank == rank:
            program.append(event.step)
        elif to is not None and to.chunk % shape.pp == rank:
            program.append(Receive(event.step))
    return tuple(program)


_COMPUTE = {"forward-compute": "forward", "backward-compute": "backward", "weight-compute": "weights"}


class StepTimers:
    """megatron-core's timers: `timers("forward-compute").start()` begins a phase, `.stop()` ends it.

    Timers do not say which chunk runs; the walker sets it. Between two passes a pipeline stage waits for its
    neighbours. Phases other than forward, backward and weight passes keep megatron-core's name in a trace.
    """

    def __init__(self, dims: Dims, *, phases: Phases) -> None:
        self.traced = False  # whether phases are labelled in a trace
        self.running = Pass("", 0, 0)
        self._phases = phases
        self._between = PIPELINE if dims.pp > 1 else COMPUTE
        self._open: dict[str, Any] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        return SimpleNamespace(start=lambda **_: self.begin(name), stop=lambda **_: self.end(name))

    def begin(self, name: str) -> None:
        """Begin a phase."""
        label = name
        if name in _COMPUTE:
            label = f"{_COMPUTE[name]} of chunk {self.running.chunk}, micro-batch {self.running.micro}"
            self._phases.enter(COMPUTE, label)
        if self.traced:
            self._open[name] = torch.profiler.record_function(label)
            self._open[name].__enter__()

    def end(self, name: str) -> None:
        """End a phase."""
        if name in _COMPUTE:
            self._phases.enter(self._between)
        if name in self._open:
            self._open.pop(name).__exit__(None, None, None)


def _pass_of(each: Pass | Receive) -> Pass:
    return each.made_by if isinstance(each, Receive) else each


ForwardStep = Callable[[Iterator[MicroBatch], Any], tuple[Tensor, Any]]


class PassWalker:
    """Runs this rank's passes in the order of `rank_program` by megatron-core's `forward_step` and `backward_step`."""

    def __init__(
        self,
        chunks: Sequence[Any],
        *,
        config: TransformerConfig,
        groups: Groups,
        device: torch.device,
        timers: StepTimers,
    ) -> None:
        """`chunks` are this rank's, wrapped for data parallelism. If the schedule has passes for weight gradients, the
        backward passes of all chunks but the first defer them: no rank waits for the first chunk's input gradient.
        """
        self._chunks = dict(zip(groups.dims.chunks_of(groups.coords.pp), chunks, strict=True))
        self._config = config
        self._groups = groups
        self._device = device
        self._timers = timers
        self._gradients = WeightGradients()
        self.overlaps_reduction = False  # whether gradients are reduced beside the last backward passes of a step
        if groups.dims.order == "zb-h1":
            for number, chunk in self._chunks.items():
                if number:
                    leave_weight_gradients(bare_chunk(chunk), self._gradients)

    def __call__(
        self,
        forward: ForwardStep,
        batches: Sequence[MicroBatch],
        iterators: Sequence[Iterator[MicroBatch]],
        *,
        forward_only: bool = False,
        outputs: bool = False,
    ) -> list[Any]:
        """Run the passes of a training step and finalize its gradients, or run forward passes only; return one result
        per micro-batch on the rank of the last chunk.

        Args:
            forward: runs a chunk on its next micro-batch.
            iterators: give each of this rank's chunks the micro-batches, on the device.
            outputs: `forward` returns outputs, not losses.
        """
        self._config.timers = None if forward_only else self._timers
        shape = shape_of(self._groups.dims, len(batches))
        program = rank_program(shape, self._groups.coords.pp)
        if forward_only:
            program = tuple(each for each in program if _pass_of(each).kind == FORWARD)
        last = {(each.kind, each.chunk): each for each in program if isinstance(each, Pass)}
        self._gradients.clear()  # of a step that was given up
        step = _Step(
            self._chunks,
            self._config,
            shape,
            forward,
            batches,
            dict(zip(self._chunks, iterators, strict=True)),
            Transfers(self._groups.pp, dtype=self._config.pipeline_dtype, device=self._device),
            self._gradients,
            forward_only,
            outputs,
        )
        with _timed(self._config, "forward-backward"):
            if not forward_only:  # else each part waits for what it reads
                for gather, chunk in zip(self._config.param_sync_func or (), self._chunks.values(), strict=False):
                    gather(chunk.parameters())
            for each in program:
                if isinstance(each, Receive):
                    step.receive(each.made_by)
                    continue
                # Data-parallel ranks reduce gradients in the last pass of each kind alone: a bucket is reduced once all
                # of its parameters have met their last gradient, in either.
                waits = self.overlaps_reduction and each != last[each.kind, each.chunk]
                with self._chunks[each.chunk].no_sync() if waits else nullcontext():
                    step.run(each)
            step.transfers.finish()
            if not forward_only:
                finalize = self._config.finalize_model_grads_func
                finalize(list(self._chunks.values()), None, pg_collection=self._groups.collection)
        return step.results


@dataclass(frozen=True)
class _Step:
    """A step in progress, with the outputs of its passes that later passes still need."""

    chunks: dict[int, Any]
    config: TransformerConfig
    shape: PipelineShape
    forward_function: ForwardStep
    batches: Sequence[MicroBatch]
    iterators: dict[int, Iterator[MicroBatch]]
    transfers: Transfers
    gradients: WeightGradients
    forward_only: bool
    outputs: bool
    results: list[Any] = field(default_factory=list)
    kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)  # inputs and outputs

    def receive(self, made_by: Pass) -> None:
        """Begin to receive the output of another rank's pass; its shape follows from the micro-batch."""
        to = receiver(made_by, self.shape)
        assert to is not None
        entering, leaving = bare_chunk(self.chunks[to.chunk]).transferred(self.batches[made_by.micro])
        size = entering if made_by.kind == FORWARD else leaving
        assert size is not None
        self.transfers.receive(made_by, size, source=made_by.chunk % self.shape.pp)

    def run(self, each: Pass) -> None:
        """Run a pass, and begin to send its output."""
        if self.config.timers is not None:
            self.config.timers.running = each
        {FORWARD: self._forward, BACKWARD: self._backward, WEIGHT: self._weights}[each.kind](each)

    def _forward(self, each: Pass) -> None:
        received = self._made_for(each)
        hidden = None if received is None else received.requires_grad_()
        output, _ = forward_step(
            self.forward_function,
            self.iterators[each.chunk],
            self.chunks[each.chunk],
            self.shape.micro_batches,
            hidden,
            self.results,
            self.config,
            cp_group_size=1,  # read by nothing: losses are sums over tokens
            collect_non_loss_data=self.outputs,
            is_first_microbatch=each.micro == 0,
            current_microbatch=each.micro,
            is_last_stage=each.chunk == self.shape.chunks - 1,
        )
        self._send(each, output)
        if not self.forward_only:
            deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
            self.kept[each.chunk, each.micro] = hidden, output

    def _backward(self, each: Pass) -> None:
        gradient = self._made_for(each)
        self.transfers.has_arrived(Pass(FORWARD, each.chunk, each.micro))
        hidden, output = self.kept.pop((each.chunk, each.micro))
        with self.gradients.left_by(each.chunk, each.micro) if self.shape.splits_backward else nullcontext():
            of_hidden = backward_step(hidden, output, gradient, ModelType.encoder_or_decoder, self.config)
        self._send(each, of_hidden)

    def _weights(self, each: Pass) -> None:
        with _timed(self.config, "weight-compute"):
            self.gradients.compute(each.chunk, each.micro)

    def _made_for(self, each: Pass) -> Tensor | None:
        """Wait for a pass's input from another rank and return it; None at the ends of the pipeline."""
        made_by = maker(each, self.shape)
        return None if made_by is None else self.transfers.received(made_by)

    def _send(self, each: Pass, made: Tensor | None) -> None:
        to = receiver(each, self.shape)
        if to is not None:
            assert made is not None
            self.transfers.send(each, made, target=to.chunk % self.shape.pp)


@contextmanager
def _timed(config: TransformerConfig, name: str) -> Iterator[None]:
    """Run a phase between the start and the stop of its timer."""
    if config.timers is not None:
        config.timers(name).start()
    yield
    if config.timers is not None:
        config.timers(name).stop()
