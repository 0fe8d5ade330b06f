"""Next-token prediction: the sum of cross entropies over trained tokens, micro-batch by micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megavlm.inputs.batch import MicroBatch


def sum_loss(batch: MicroBatch, num_sources: int, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss, the number of its tokens, and the sums [2 + 2·num_sources] that `Schedule.train` returns.

    `losses` are the cross entropies [B, S].
    """
    mask = batch.text.loss_mask
    masked = losses * mask
    total, tokens = masked.sum(), mask.sum()
    parts = [torch.stack([total.detach().double(), tokens.double()])]
    if batch.text.sources is not None:
        for values in (masked.detach(), mask):
            sums = torch.zeros(num_sources, dtype=torch.float64, device=mask.device)
            parts.append(sums.index_add_(0, batch.text.sources.flatten(), values.flatten().double()))
    return total, tokens.int(), torch.cat(parts)
