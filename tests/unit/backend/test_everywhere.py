"""What is replaced in megatron-core on every device, against what it replaces."""

from __future__ import annotations

import pytest
import torch

from megavlm import backend
from megavlm.errors import UserError

backend.activate()

from megatron.core.optimizer import clip_grads  # noqa: E402
from megatron.core.utils import local_multi_tensor_l2_norm  # noqa: E402

from megavlm.backend import everywhere  # noqa: E402


def test_the_norm_is_megatron_cores() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(5, 7), torch.randn(3), torch.zeros(4)]
    found, _ = everywhere.norm(0, None, [gradients], False)
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert found.shape == (1,)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert clip_grads.l2_norm_impl is everywhere.norm
    assert clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"4 processes on this machine see 2 CUDA devices.*--nproc-per-node 2"):
        backend.activate()
