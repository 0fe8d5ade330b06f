"""Run micro-batches through a pipeline, in the order of its schedule (`walker.py`).

Every rank of a pipeline iterates over the same micro-batches, and each chunk reads the inputs of its layers: patches in
the first vision stage, tokens in the first language stage, labels in the last. Chunks send each other hidden states
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm.arch.dims import Dims, RowSplit
from megavlm.arch.objectives import objective_of
from megavlm.backend import Backend
from megavlm.backend.host_copies import HostCopies
from megavlm.config.derived import decoder_layers
from megavlm.config.schema import Config, ModelConfig
from megavlm.data.context_parts import with_further_tokens
from megavlm.inputs.batch import MicroBatch
from megavlm.model.layer_modules import fp8_fields
from megavlm.model.router import routers_of
from megavlm.model.specs import common_config
from megavlm.objective.gather import Representations
from megavlm.objective.losses import answer_log_probabilities, next_token, preference_loss
from megavlm.parallel.groups import Groups
from megavlm.pipeline.colocated import ColocatedEncoder
from megavlm.pipeline.gradient_cache import GradientCache
from megavlm.pipeline.micro_batches import on_device, own_part, whole_rows
from megavlm.pipeline.walker import ForwardStep, PassWalker, StepTimers
from megavlm.resilience.phases import COMMUNICATION, COMPUTE, Phases

# From a micro-batch and the losses [B, S] of its positions to the loss, its tokens and sums, as `next_token`.
MicroBatchLoss = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Tensor]]


def pipeline_config(config: Config, dims: Dims) -> TransformerConfig:
    """Return the configuration for megatron-core's passes, DDP and gradient finalisation."""
    language = config.model.language
    return common_config(
        config,
        tp=dims.tp,
        num_layers=1,  # read by nothing here
        hidden_size=language.hidden_size,
        num_attention_heads=dims.tp,  # read by nothing here, but its validation divides it by TP
        qk_layernorm=language.qk_norm or config.model.vision.qk_norm != "none",
        **_expert_fields(config),
        deallocate_pipeline_outputs=True,
        # With it, the first micro-batch of a step tells Transformer Engine that weights have changed.
        **fp8_fields(config, "vision", "language"),
    )


def _expert_fields(config: Config) -> dict[str, Any]:
    """Return the fields with which passes scale load-balancing losses like the loss (`MoEAuxLossAutoScaler`)."""
    experts = config.model.experts
    if not experts.num_experts:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": 2,  # read by nothing here
        "add_bias_linear": False,  # read by nothing here, but refused with experts that ETP splits
    }


class Schedule:
    """Runs micro-batches through this rank's chunks and returns the results of the last chunk."""

    def __init__(
        self,
        chunks: Sequence[Any],
        *,
        config: TransformerConfig,
        model: ModelConfig,
        groups: Groups,
        backend: Backend,
        num_sources: int = 0,
        colocated: ColocatedEncoder | None = None,
        cache: GradientCache | None = None,
        phases: Phases | None = None,
    ) -> None:
        """`num_sources` is the number of data sets whose losses are summed separately. `colocated` encodes images
        before the pipeline runs, if the encoder is not part of it. `cache` computes a loss over the whole batch, if
        the objective needs one. `phases` records which pass runs.
        """
        dims = groups.dims
        self.colocated = colocated
        self.cache = cache
        self.chunks = list(chunks)
        self.config = config
        self.model = model
        self.routers = list(routers_of(self.chunks))
        self.groups = groups
        self.backend = backend
        self.num_sources = num_sources
        self.phases = phases if phases is not None else Phases()
        self.timers = StepTimers(dims, phases=self.phases)
        self._host_copies = HostCopies(backend.device)
        self.walk = PassWalker(self.chunks, config=config, groups=groups, device=backend.device, timers=self.timers)

    def train(self, batches: Sequence[MicroBatch], loss: MicroBatchLoss | None = None) -> Tensor:
        """Run the forward and backward passes of one optimizer step. `loss` replaces the loss of the objective: the
        last stage calls it for one micro-batch after the other.

        Gradients are in the parameters' `main_grad` afterwards, summed over data-parallel ranks. The optimizer divides
        them by the number of trained tokens of the global batch, so that each trained token has the same weight.

        Returns:
            [2 + 2·num_sources] float64: sum of cross entropies and trained tokens of this data-parallel rank, then the
            sums and the tokens of each data set, then with multi-token-prediction layers the mean over these layers of
            the sum of their cross entropies, then the sums of the objective's further metrics. Zeros on all ranks but
            the last stage's, so that sums over ranks count each token once per tensor-parallel rank.
        """
        self.phases.enter(COMPUTE, "images")
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for router in self.routers:
            router.tally.zero_()
        if self.colocated is not None:
            self.colocated.encoder.zero_gradients()
        batches = self._prepared(batches)
        if self.cache is not None:
            assert loss is None, "embeddings have no losses of positions"
            totals = self.cache.step(batches, partial(self._pass, batches), num_sources=self.num_sources)
            return self.no_totals() if totals is None else totals
        forward = self._forward_loss(self.num_sources) if loss is None else partial(_forward_loss, loss=loss)
        sums = self._pass(batches, forward, forward_only=False)
        return torch.stack(sums).sum(0) if sums else self.no_totals()

    def _forward_loss(self, num_sources: int) -> ForwardStep:
        """Return the forward step of an objective whose loss is a sum over micro-batches."""
        objective = self.model.objective
        if objective_of(self.model).compares:
            group = self.groups.collection.cp
            return partial(
                _forward_loss,
                loss=lambda batch, losses: preference_loss(batch, num_sources, objective, group, losses),
            )
        weight = objective.mtp_loss_scaling_factor
        return partial(_forward_loss, loss=lambda batch, losses: next_token(batch, num_sources, weight, losses))

    @torch.no_grad()
    def answers(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probability of each answer, [R] float64, of micro-batches on the last stage; [] elsewhere."""
        forward = partial(_forward_answers, group=self.groups.collection.cp)
        return self._pass(self._prepared(batches), forward, forward_only=True, outputs=True)

    def no_totals(self, num_sources: int | None = None) -> Tensor:
        """Return zeros shaped like `train`'s result, for ranks without a loss; `num_sources` defaults to the own."""
        number = self.num_sources if num_sources is None else num_sources
        more = (self.model.language.mtp_layers > 0) + len(objective_of(self.model).measured)
        return torch.zeros(2 + 2 * number + more, dtype=torch.float64, device=self.backend.device)

    def tallies(self) -> Tensor | None:
        """Return the routers' counts of the last step, [layers · (E + 2)] float64 (`Router`); None without experts.

        Layers of other stages are zero, so that the sum over all ranks is that of the whole model.
        """
        experts, layers = self.model.experts.num_experts, decoder_layers(self.model.language)
        if not experts:
            return None
        sums = torch.zeros(layers, experts + 2, dtype=torch.float64, device=self.backend.device)
        for router in self.routers:
            sums[router.number] = router.tally
        return sums.flatten()

    @torch.no_grad()
    def losses(
        self,
        batches: Sequence[MicroBatch],
        *,
        num_sources: int,
        see: Callable[[Representations], None] = lambda found: None,
    ) -> Tensor:
        """Run forward passes of micro-batches; return sums as `train` does, for `num_sources` data sets.

        `see` is called with the embedded texts on the last stage, if the objective embeds.
        """
        if self.cache is not None:
            loss = self.cache.loss(batches, self.outputs(batches), see=see)
            return self.no_totals(num_sources) if loss is None else self.cache.totals(loss, num_sources)
        batches = self._prepared(batches)
        sums = self._pass(batches, self._forward_loss(num_sources), forward_only=True)
        return torch.stack(sums).sum(0) if sums else self.no_totals(num_sources)

    @torch.no_grad()
    def outputs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the output of each micro-batch on the last stage's ranks; [] on other ranks."""
        return self._pass(self._prepared(batches), _forward_output, forward_only=True, outputs=True)

    @torch.no_grad()
    def statistics(self, batches: Sequence[MicroBatch], *, top: int) -> list[Tensor]:
        """Return the statistics of the next token, [B, S, 2 + 2·top] float64 (`token_statistics`), of each micro-batch
        on the last stage's ranks, whole rows on each; [] on other ranks.
        """
        split, group = self.groups.dims.row_split, self.groups.collection.cp
        prepared = self._prepared(batches, split, further=False)
        found = self._pass(prepared, partial(_forward_output, top=top), forward_only=True, outputs=True)
        return [whole_rows(own, split, group) for own in found]

    @torch.no_grad()
    def logits(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return logits [B, S, vocabulary] of each micro-batch on the last stage's ranks; [] on other ranks.

        Each micro-batch holds all of its images, on every rank. Context-parallel ranks have whole rows, as their
        key/value caches do: their micro-batches must continue rows of a cache.
        """
        assert self.groups.dims.cp == 1 or all(batch.continuation is not None for batch in batches), "rows of a cache"
        if self.colocated is not None:
            batches = self.colocated.with_own_images(batches)
        self.phases.enter(self.phases.now.phase, "answers")
        # Answers are generated alike on all context-parallel ranks.
        prepared = self._prepared(batches, RowSplit(), further=False)
        return self._pass(prepared, partial(_forward_output, logits=True), forward_only=True, outputs=True)

    def _prepared(
        self, batches: Sequence[MicroBatch], split: RowSplit | None = None, *, further: bool = True
    ) -> list[MicroBatch]:
        """Return this rank's part of a step's micro-batches: its part of the rows, and its images or their features.

        Without `further` they have no targets for multi-token prediction.
        """
        depths = self.model.language.mtp_layers if further else 0
        split = self.groups.dims.row_split if split is None else split
        if self.colocated is not None:
            batches = self.colocated.encode(batches, split)
        batches = [with_further_tokens(batch, depths) for batch in batches]
        deals = self.model if self.colocated is None else None
        return [own_part(batch, split, rank=self.groups.coords.cp, deals=deals) for batch in batches]

    def _pass(
        self,
        batches: Sequence[MicroBatch],
        forward: ForwardStep,
        *,
        forward_only: bool,
        outputs: bool = False,
    ) -> list[Any]:
        """Run prepared micro-batches through the pipeline; return the results of `forward` on the last stage.

        `outputs`: `forward` returns outputs, not losses.
        """
        # While chunks take micro-batches, passes of the next step's encoder are queued.
        meanwhile = self.colocated.advance if self.colocated is not None else lambda: None
        iterators = on_device(batches, self._host_copies, chunks=len(self.chunks), meanwhile=meanwhile)
        results = self.walk(forward, batches, iterators, forward_only=forward_only, outputs=outputs)
        while self.colocated is not None and self.colocated.advance():
            pass  # the remaining passes overlap with the optimizer
        return results


def _forward_loss(batches: Iterator[MicroBatch], chunk: Any, *, loss: Callable[..., Any]) -> tuple[Tensor, Any]:
    batch = next(batches)
    return chunk(batch), partial(loss, batch)


def _forward_answers(batches: Iterator[MicroBatch], chunk: Any, *, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    batch = next(batches)
    return chunk(batch), lambda losses, non_loss_data: answer_log_probabilities(batch, losses, group)[0]


def _forward_output(batches: Iterator[MicroBatch], chunk: Any, **wants: Any) -> tuple[Tensor, Any]:
    return chunk(next(batches), **wants), lambda output, non_loss_data: output


def finalize_gradients(
    chunks: list[Any],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
    *,
    groups: Groups,
    colocated: ColocatedEncoder | None = None,
    phases: Phases,
) -> None:
    """Finalize the gradients after the last backward pass: reduce them over DP and TP, add up tied copies, then run a
    colocated encoder's backward pass. `PassWalker` calls this function.

    megatron-core would divide gradients by `num_tokens`, which only the last stage counts, and make the host wait for
    it. Here gradients stay sums, and the update divides (`optim/chained.py`).
    """
    phases.enter(COMMUNICATION, "gradients")
    finalize_model_grads(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    sum_tied_gradients(chunks, groups)
    if colocated is not None:
        phases.enter(COMPUTE, "backward of the encoder")
        colocated.finish()


def sum_tied_gradients(chunks: Sequence[Any], groups: Groups) -> None:
    """Set `main_grad` of both copies of tied embeddings to the sum of both gradients, so that the copies stay equal.

    megatron-core synchronises copies on the first and last pipeline stage. Here the first language stage may be any
    stage, or another chunk of the last rank, so the copies have a group of their own.

    With the distributed optimizer only a rank's own shard of `main_grad` is reduced over data-parallel ranks at
    this point. megatron-core gives shared embeddings a bucket of their own, so both copies have equal shards, and the
    sum of equal shards is right.
    """
    copies: list[Tensor] = [
        param.main_grad
        for chunk in chunks
        for param in chunk.parameters()
        if getattr(param, "shared_embedding", False) and param.requires_grad
    ]
    if not copies:
        return
    total = copies[0]
    for other in copies[1:]:
        total += other
    if groups.tied is not None:
        dist.all_reduce(total, group=groups.tied)
    for other in copies[1:]:
        other.copy_(total)
