"""What a step that is not taken leaves of gradients that travel as codes."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megavlm.backend import activate

activate()  # before the modules below import megatron-core

from megavlm.optim.codes import Coded  # noqa: E402
from megavlm.optim.slow_links import CodedReduction, coded_reductions, forget_errors  # noqa: E402


def test_residuals_of_all_buckets_are_dropped() -> None:
    groups = [SimpleNamespace(start_grad_sync=None) for _ in range(3)]
    for group in groups[:2]:
        group.start_grad_sync = CodedReduction(group, Coded("int8"), None)
        group.start_grad_sync.errors[0] = torch.ones(3)
    chunks = [SimpleNamespace(bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:]), SimpleNamespace()]
    assert len(list(coded_reductions(chunks))) == 2
    forget_errors(chunks)
    assert not any(each.errors for each in coded_reductions(chunks))
