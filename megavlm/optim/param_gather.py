"""Wait for updated parameters that are gathered while the forward pass already runs (`--overlap-param-gather`).

After an optimizer step a rank has new values for its shard of each bucket alone. megatron-core lets a module wait, in
a hook before its forward, for the buckets of the parameters that it owns itself. That is not enough for a module that
reads parameters of submodules which it never calls: such a class says `reads_below = True`, and waits for those, too.
Code that reads parameters outside a forward pass calls `gather_parameters` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from megavlm.resilience.phases import COMMUNICATION, Phases


def wait_before_reading(wrapped: DistributedDataParallel) -> None:
    """Let modules with `reads_below` wait for the parameters of their submodules, and check it once (`_Watch`)."""
    for module in wrapped.module.modules():
        if _reads_below(module):
            module.register_forward_pre_hook(partial(_wait, wrapped))
    _Watch(wrapped)


def gather_parameters(chunks: Sequence[Any]) -> None:
    """Gather the updated parameters on every data-parallel rank and wait for them; every rank calls it.

    It does nothing for chunks whose parameters are gathered by the end of a step.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def count_waits(chunks: Sequence[Any], phases: Phases) -> None:
    """Count waits for gathered parameters as communication, though they lie inside forward passes.

    Otherwise a rank that waits for a slow one would seem to compute for as long.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            for group in chunk.bucket_groups:
                group.finish_param_sync = partial(_counted, group.finish_param_sync, phases)


def _counted(wait: Callable[..., None], phases: Phases, *args: Any, **kwargs: Any) -> None:
    before = phases.now
    phases.enter(COMMUNICATION, "parameters")
    wait(*args, **kwargs)
    phases.enter(before.phase, before.detail)


def _reads_below(module: nn.Module) -> bool:
    return bool(getattr(module, "reads_below", False))


def _wait(wrapped: DistributedDataParallel, module: nn.Module, *_: Any) -> None:
    for param in module.parameters():
        if param in wrapped.param_to_bucket_group:
            wrapped.param_to_bucket_group[param].finish_param_sync(
                skip_next_bucket_dispatch=wrapped.ddp_config.align_param_gather
            )


class _Watch:
    """Checks, in a chunk's first training pass, that a module waits for the gather of each trained parameter."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self.unread = {param: name for name, param in wrapped.module.named_parameters() if param.requires_grad}
        modules = list(wrapped.module.modules())
        self.hooks = [module.register_forward_pre_hook(self._reads) for module in modules]
        self.hooks.append(wrapped.module.register_forward_hook(self._end))

    def _reads(self, module: nn.Module, *_: Any) -> None:
        for param in module.parameters(recurse=_reads_below(module)):
            self.unread.pop(param, None)

    def _end(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation need not use every part of the model
        for hook in self.hooks:
            hook.remove()
        assert not self.unread, (
            f"nothing waits for the gathered {', '.join(self.unread.values())}: a module that reads parameters of "
            "modules which it does not call needs `reads_below = True`"
        )
