"""BatchShapedP2P between pipeline chunks whose shapes both sides know from the batch, so that nobody announces them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_config import TransformerConfig

from megavlm.data.batch import MicroBatch
from megavlm.model.vlm import VLMChunk
from megavlm.parallel.groups import Groups
from megavlm.planner.schedules import BACKWARD, FORWARD, rank_schedules, shape_of

Size = tuple[int, ...]


class BatchShapedP2P(P2PCommunicator):
    """megatron-core's, without its announcements: before each transfer of variable size it sends the shape in a message
    of its own, and lets the host wait until the device has received it.

    The schedule frees an output as soon as its transfer has begun. A GPU frees in the order of its stream, after the
    transfer; gloo still reads, so on a CPU a copy is sent wherever nobody waits for the end of the transfer.
    """

    def __init__(self, groups: Groups, config: TransformerConfig, *, sends_copies: bool) -> None:
        super().__init__(groups.pp, config)
        self._groups = groups
        self._sends_copies = sends_copies
        self._from_previous: deque[Size] = deque()
        self._from_next: deque[Size] = deque()

    def expect(self, chunks: Sequence[VLMChunk], batches: Sequence[MicroBatch]) -> None:
        """A step on these micro-batches is about to begin: hidden states come from the previous rank in the order of
        this rank's forward passes, gradients from the next in that of its backward passes.
        """
        dims = self._groups.dims
        known = [[chunk.transferred(batch) for batch in batches] for chunk in chunks]
        ends = {kind: deque[Size]() for kind in (FORWARD, BACKWARD)}
        for each in rank_schedules(shape_of(dims, len(batches)))[self._groups.coords.pp]:
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
        """What megatron-core asks for before a transfer."""
        return self._from_previous.popleft() if recv_prev else (), self._from_next.popleft() if recv_next else ()
