"""Gradient caching (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").

A loss that compares every text of a global batch with every other one is no sum over micro-batches. But it depends on a
micro-batch m only through the output y_m of the last stage, so by the chain rule

    dL/dθ = Σ_m (∂y_m/∂θ)ᵀ · ∂L/∂y_m = Σ_m d/dθ ⟨y_m, g_m⟩     with g_m = ∂L/∂y_m held fixed

A step therefore runs (1) all micro-batches forward, without graphs, for the y_m; (2) the loss, for all g_m; (3) forward
and backward again with ⟨y_m, g_m⟩ as the loss of a micro-batch. Memory is that of one micro-batch (or as many as a
pipeline keeps) whatever the batch, and the gradient is that of the whole batch at once. It costs one forward pass more.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megavlm.arch.objectives import learned_scalars
from megavlm.config.schema import ModelConfig
from megavlm.data.types import RECORD
from megavlm.inputs.batch import MicroBatch
from megavlm.objective.gather import Loss, Representations
from megavlm.objective.losses import whole_batch
from megavlm.parallel.groups import Groups, random_states, set_random_states


class Draws:
    """Keeps random generators' states before each micro-batch of each chunk, so that a second pass draws the same.

    Without dropout nothing is drawn, and no state is kept.
    """

    def __init__(self, *, kept: bool) -> None:
        self._kept = kept
        self._before = defaultdict[int, deque[dict[str, Any]]](deque)  # by chunk

    def first(self, chunk: Any) -> None:
        """Note the state before a chunk's next micro-batch of the first pass."""
        if self._kept:
            self._before[id(chunk)].append(random_states())

    def again(self, chunk: Any) -> None:
        """Set the generators to the state before a chunk's next micro-batch of the second pass."""
        if self._kept:
            set_random_states(self._before[id(chunk)].popleft())


@dataclass(frozen=True)
class GradientCache:
    """The two passes of a step, and the loss in between."""

    model: ModelConfig
    groups: Groups
    draws: bool  # whether layers draw random numbers

    def step(
        self,
        batches: Sequence[MicroBatch],
        run: Callable[..., list[Any]],
        *,
        num_sources: int,
    ) -> Tensor | None:
        """Accumulate the gradients of a step in the parameters; return the sums of `Schedule.train` on the last stage,
        None on other stages.

        `run(forward, forward_only=…, outputs=…)` runs all micro-batches through the pipeline (`PassWalker`).
        """
        draws = Draws(kept=self.draws)
        with torch.no_grad():
            outputs = run(partial(_first_forward, draws), forward_only=True, outputs=True)
        loss = self.loss(batches, outputs)
        after = random_states() if self.draws else None
        gradients = iter(self._gradients(batches, loss) if loss is not None else ())
        run(partial(_second_forward, draws, gradients), forward_only=False)
        if after is not None:
            set_random_states(after)
        return None if loss is None else self.totals(loss, num_sources)

    def loss(
        self,
        batches: Sequence[MicroBatch],
        outputs: Sequence[Tensor],
        *,
        see: Callable[[Representations], None] = lambda found: None,
    ) -> Loss | None:
        """Return the loss over the global batch, given the last stage's outputs for this rank's micro-batches; None on
        ranks of other stages. `see` is called with the representations from which the loss is computed.
        """
        if not outputs:
            return None
        found = self.representations(batches, outputs)
        see(found)
        with torch.enable_grad():
            return whole_batch(self.model.objective.kind)(found, self.model.objective, self.groups.dp)

    def representations(self, batches: Sequence[MicroBatch], outputs: Sequence[Tensor]) -> Representations:
        """Return the representations of all micro-batches, given the last stage's outputs [R·H + scalars]."""
        scalars = len(learned_scalars(self.model))
        width = self.model.language.hidden_size
        vectors = [output[: len(output) - scalars].view(-1, width) for output in outputs]
        members, records = [], 0
        for batch in batches:
            assert batch.text.members is not None, "the data loader says what the texts are"
            own = batch.text.members.clone()
            own[:, RECORD] += records
            records += len(own)
            members.append(own)
        device = outputs[0].device
        return Representations(
            torch.cat(vectors), torch.cat(members).to(device), outputs[0][len(outputs[0]) - scalars :]
        )

    def totals(self, loss: Loss, num_sources: int) -> Tensor:
        """Return the sums of `Schedule.train`. Context-parallel ranks have equal sums: all but the first give zeros."""
        totals = loss.totals(num_sources)
        return totals if self.groups.coords.cp == 0 else torch.zeros_like(totals)

    def _gradients(self, batches: Sequence[MicroBatch], loss: Loss) -> Iterator[Tensor]:
        """Yield the gradient of the last stage's output per micro-batch; the first one includes the scalars' gradient.

        The scalars' gradient is later summed over data-parallel and context-parallel ranks. A data-parallel rank yields
        its share; of the context-parallel ranks, the first yields the whole and the others zeros.
        """
        parts = loss.vectors.split([len(batch.text.lengths) for batch in batches])
        scalars = loss.scalars if self.groups.coords.cp == 0 else torch.zeros_like(loss.scalars)
        for vectors in parts:
            yield torch.cat([vectors.flatten(), scalars])
            scalars = torch.zeros_like(scalars)


def _first_forward(draws: Draws, batches: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    draws.first(chunk)
    return chunk(batch), _kept


def _kept(output: Tensor, non_loss_data: bool = True) -> Tensor:
    return output


def _second_forward(
    draws: Draws, gradients: Iterator[Tensor], batches: Iterator[MicroBatch], chunk: Any
) -> tuple[Tensor, Any]:
    batch = next(batches)
    draws.again(chunk)
    return chunk(batch), partial(_inner_product, gradients)


def _inner_product(gradients: Iterator[Tensor], output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ⟨y, g⟩ of the next micro-batch as its loss, and zero tokens; the last value is the loss, detached."""
    total = (output * next(gradients)).sum()
    return total, torch.zeros((), dtype=torch.int, device=total.device), total.detach()
