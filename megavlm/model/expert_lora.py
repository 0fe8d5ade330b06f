"""LoRA of routed experts: y = W_e·x + (α/r)·B_e·A_e·x for a row x of expert e.

PEFT adapts a parameter that holds all experts of a layer in this way (`target_parameters`). Gate and up are one such
parameter, so they share A. Both products are grouped, as those of the experts themselves.

EP divides the experts. ETP divides the rows of fc1, and B's with them, and the columns of fc2, and A's with them; the
other of the two is whole on every ETP rank. Legend: T tokens on this rank, E experts (of it), K inputs, M outputs,
r rank of the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from megavlm.config.lora import ROUTED_EXPERTS, is_target
from megavlm.config.schema import LoraConfig
from megavlm.model.experts import ExpertWeight, GroupedExperts, Rows, grouped, mark

ALIGNED_BYTES = 16  # of a row that torch's grouped product reads


class ExpertAdapter(nn.Module):
    """A [E, r, K] and B [E, M, r] of the experts of a rank; `whole` names the one that ETP does not divide."""

    def __init__(self, weight: Tensor, lora: LoraConfig, *, whole: str, etp: dist.ProcessGroup) -> None:
        super().__init__()
        experts, outputs, inputs = weight.shape
        self.A = nn.Parameter(torch.zeros(experts, lora.rank, inputs, dtype=weight.dtype))
        self.B = nn.Parameter(torch.zeros(experts, outputs, lora.rank, dtype=weight.dtype))
        self.scale, self.whole, self.etp = lora.alpha / lora.rank, whole, etp
        for name, param in self.named_parameters():
            mark(param)
            if name == whole:
                param.shared = etp.rank() > 0  # type: ignore[attr-defined]  # the norm counts one copy

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """x [T, K] → [T, M]."""
        return grouped(grouped(x, self._factor("A"), rows), self._factor("B"), rows) * self.scale

    def _factor(self, name: str) -> Tensor:
        """Return A or B, padded to a rank that grouped products read.

        An ETP rank computes some of fc1's outputs, or all of fc2's from some of the inputs: either way it has a part of
        the gradient of the whole factor, which the backward pass sums.
        """
        factor: Tensor = getattr(self, name)
        missing = -factor.shape[1 if name == "A" else 2] % (ALIGNED_BYTES // factor.element_size())
        if name == self.whole:
            factor = copy_to_tensor_model_parallel_region(factor, group=self.etp)
        return F.pad(factor, (0, 0, 0, missing) if name == "A" else (0, missing))


class AdaptedExpertWeight(ExpertWeight):
    """Takes the place of an `ExpertWeight`'s class; its adapter is kept below it as `lora`."""

    lora: nn.ModuleDict

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        (adapter,) = self.lora.values()
        output: Tensor = super().forward(x, rows) + adapter(x, rows)
        return output


def adapt_experts(experts: Any, layer: str, lora: LoraConfig) -> None:
    """Give the targets among the two parameters of a layer's experts an adapter each."""
    assert isinstance(experts, GroupedExperts)
    layer = f"{layer}.{ROUTED_EXPERTS}"
    for module, name, whole in ((experts.linear_fc1, "gate_up_proj", "A"), (experts.linear_fc2, "down_proj", "B")):
        if is_target(lora, layer, name):
            module.__class__ = AdaptedExpertWeight
            adapter = ExpertAdapter(module.weight, lora, whole=whole, etp=experts.groups.expt_tp)
            module.lora = nn.ModuleDict({name: adapter})
