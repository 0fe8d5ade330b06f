"""What a step that is not taken leaves of gradients that travel as codes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from megavlm.backend import activate

activate()  # before the modules below import megatron-core

from megavlm.errors import UserError  # noqa: E402
from megavlm.optim.codes import Coded  # noqa: E402
from megavlm.optim.slow_links import (  # noqa: E402  # noqa: E402
    CodedReduction,
    CodedUnitReduction,
    coded_reductions,
    forget_errors,
    refuse_torch_without_hooks,
)
from megavlm.train.outputs import hints  # noqa: E402
from tests.support.flags import resolved  # noqa: E402


def test_residuals_of_all_buckets_are_dropped() -> None:
    groups = [SimpleNamespace(start_grad_sync=None) for _ in range(3)]
    for group in groups[:2]:
        group.start_grad_sync = CodedReduction(group, Coded("int8"), None)
        group.start_grad_sync.errors[0] = torch.ones(3)
    unit = CodedUnitReduction(Coded("int8"), None)  # of ZeRO-2 and 3
    unit.errors[0] = torch.ones(3)
    chunks = [
        SimpleNamespace(bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:]),
        SimpleNamespace(coded_reductions=[unit]),
        SimpleNamespace(),
    ]
    assert len(list(coded_reductions(chunks))) == 3
    forget_errors(chunks)
    assert not any(each.errors for each in coded_reductions(chunks))


@pytest.mark.parametrize("option", ["--compress-gradients int8", "--compress-weights fp8"])
def test_a_torch_without_hooks_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    config = resolved(f"--data-parallel-sharding full --precision bf16 {option}".split())
    refuse_torch_without_hooks(config)
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(UserError, match=rf"^{option} with .* full needs a newer torch than .*sharding optimizer$"):
        refuse_torch_without_hooks(config)


def test_a_run_says_that_a_resume_is_another_run() -> None:
    for flags, said in (("int8", True), ("int8 --set parallel.compress_error_feedback=false", False), ("none", False)):
        config = resolved(f"--compress-gradients {flags} --transformer-impl torch".split())
        assert ("no checkpoint has the residual" in "".join(hints(config, None, None))) == said
