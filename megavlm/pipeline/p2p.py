"""Transfers between pipeline chunks whose shapes both sides compute from the batch, so that no shape is sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig

from megavlm.arch.schedules import BACKWARD, FORWARD, rank_schedules, shape_of
from megavlm.inputs.batch import MicroBatch
from megavlm.model.vlm import VLMChunk
from megavlm.parallel.groups import Groups

Size = tuple[int, ...]


class BatchShapedP2P(P2PCommunicator):
    """megatron-core's communicator, without the messages in which it sends the shape before each transfer of variable
    size, and for which the host waits.

    The schedule frees an output as soon as its transfer has started. On a GPU the memory is reused in stream order, so
    after the transfer. On a CPU gloo may still read it, so a copy is sent unless the caller waits for the transfer.
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
        if self._sends_copies and not wait_on_reqs and tensor_send_next is not None:
            tensor_send_next = tensor_send_next.detach().clone()
        return super()._communicate(tensor_send_next=tensor_send_next, wait_on_reqs=wait_on_reqs, **others)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Size, Size]:
        """Return the shapes received from the previous and the next rank; megatron-core calls it before a transfer."""
        return self._from_previous.popleft() if recv_prev else (), self._from_next.popleft() if recv_next else ()
