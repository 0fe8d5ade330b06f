"""The CPU backend's parts against torch's own."""

from __future__ import annotations

import copy
import math
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from megavlm import backend

chosen = backend.activate()

from megatron.core.tensor_parallel import random as mcore_random  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megavlm.model.attention import CoreAttention  # noqa: E402
from megavlm.model.packing import packed  # noqa: E402
from megavlm.optim.elementwise import ElementwiseOptimizer  # noqa: E402
from megavlm.optim.rules import ADAMW  # noqa: E402


def core_attention() -> CoreAttention:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    return CoreAttention(config, 1, AttnMaskType.causal, "self")


@pytest.mark.parametrize(
    ("lengths", "causal", "groups"),
    [([6], True, 4), ([3, 3, 3], False, 1), ([5, 1, 2, 2, 7], True, 2), ([5, 1, 2, 2, 7], False, 4), ([1, 1], True, 1)],
)
def test_packed_attention_is_block_diagonal(lengths, causal, groups):
    torch.manual_seed(0)
    total = sum(lengths)
    q = torch.randn(total, 1, 4, 8, requires_grad=True)
    k, v = (torch.randn(total, 1, groups, 8, requires_grad=True) for _ in range(2))
    packing = packed([0, *accumulate(lengths)], q.device)
    kind = AttnMaskType.causal if causal else AttnMaskType.no_mask
    out = core_attention()(q, k, v, None, kind, packed_seq_params=packing)

    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = sequence[:, None] == sequence[None]
    if causal:
        mask = mask.tril()
    repeated = [x[:, 0].repeat_interleave(4 // groups, dim=1).transpose(0, 1) for x in (k, v)]
    scores = (q[:, 0].transpose(0, 1) @ repeated[0].transpose(1, 2)) / math.sqrt(8)
    expected = scores.masked_fill(~mask, -math.inf).softmax(-1) @ repeated[1]
    torch.testing.assert_close(out[:, 0], expected.transpose(0, 1).flatten(1))

    seed = torch.randn_like(out)
    ours = torch.autograd.grad((out * seed).sum(), (q, k, v), retain_graph=True)
    theirs = torch.autograd.grad((expected.transpose(0, 1).flatten(1)[:, None] * seed).sum(), (q, k, v))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, atol=2e-6, rtol=1e-4)


def test_adamw_follows_torch_and_keeps_its_step_in_the_group():
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5)
    twin = copy.deepcopy(model)
    arguments = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours = ElementwiseOptimizer(model.parameters(), ADAMW, **arguments)
    theirs = torch.optim.AdamW(twin.parameters(), **arguments)
    for _ in range(10):
        x = torch.randn(3, 7)
        for each, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    for mine, reference in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-7)
    assert ours.state_dict()["param_groups"][0]["step"] == 10
    assert set(ours.state_dict()["state"][0]) == {"exp_avg", "exp_avg_sq"}


def test_recomputation_draws_the_same_dropout():
    """megatron-core restores "CUDA" generator states around recomputation: on CPU that is the default generator."""
    mcore_random.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    x = torch.ones(1000, requires_grad=True)

    def noisy(value):
        with mcore_random.get_cuda_rng_tracker().fork():
            value = F.dropout(value, 0.5)
        return F.dropout(value, 0.5)

    out = mcore_random.checkpoint(noisy, False, x)
    torch.randn(3)  # other numbers drawn between forward and backward
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())  # the gradient of dropout is its own mask times its scale


def test_megatron_sees_a_cpu_and_we_see_torch_as_it_is():
    import megatron.core.pipeline_parallel.schedules as schedules

    assert schedules.torch.zeros([], device="cuda").device.type == "cpu"
    assert schedules.torch.cuda.current_device() == "cpu"
    assert schedules.torch.Tensor is torch.Tensor
    assert not torch.cuda.is_available()
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"  # the one lie that reaches everybody: optimizers ask
    assert torch.ones(1).type(torch.int32).dtype is torch.int32
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
