"""A transfer that is under way keeps what it sends, whatever the schedule does to its own tensor."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

from megavlm.pipeline.callbacks import BatchShapedP2P


@pytest.mark.parametrize("sends_copies", [False, True])
def test_a_freed_output_is_still_sent(monkeypatch: pytest.MonkeyPatch, sends_copies: bool):
    kept: list[torch.Tensor] = []

    class Request:
        def wait(self) -> None:
            assert kept[0].tolist() == [0.0, 1.0, 2.0]

    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "isend", lambda tensor, dst, group: kept.append(tensor) or Request())
    stage = SimpleNamespace(size=lambda: 4, rank=lambda: 0)
    config = SimpleNamespace(
        variable_seq_lengths=True,
        virtual_pipeline_model_parallel_size=2,
        use_ring_exchange_p2p=False,
        batch_p2p_comm=False,
        batch_p2p_sync=False,
    )
    communicator = BatchShapedP2P(SimpleNamespace(pp=stage), config, sends_copies=sends_copies)  # type: ignore[arg-type]
    output = torch.arange(3.0) * torch.ones(3, requires_grad=True)
    _, _, requests = communicator._communicate(
        tensor_send_next=output,
        tensor_send_prev=None,
        recv_prev=False,
        recv_next=False,
        tensor_shape=None,
        wait_on_reqs=False,
    )
    deallocate_output_tensor(output, True)
    assert output.numel() == 1
    requests["send_next"].wait()
