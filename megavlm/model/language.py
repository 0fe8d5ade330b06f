"""Ends of the language model: the embedding with image features merged in, and the output with its loss.

The output layer of a model that embeds texts pools hidden states into one vector for each text. DeepStack (Meng et al.
2024; Qwen3-VL) adds features of inner vision layers to the first language layers: merger j turns the output of vision
layer d_j into features [F, 1, H], which are added to the hidden states of the image tokens after language layer j.
In between they are sent along with the hidden states past every cut of the pipeline.

**Multi-token prediction** (MTP): layers after the language model, each of which predicts a token further ahead. With h⁰
the language model's last hidden states and E the embeddings that it read, depth k = 1 … D computes

    hᵏ_t = norm( Layer_k( W_k [norm(E_{t+k}); norm(hᵏ⁻¹_t)] ) )

and the output layer predicts token t + k + 1 from hᵏ_t (DeepSeek-V3, DeepSeek-AI 2024, section 2.2; Gloeckle et al.
2024). Layer_k is a transformer layer like others, with positions that are k places further on, too. E of an image token
is its feature, as for the language model. E comes from the first language stage with the hidden states, past each cut:
so no stage needs another copy of the embedding, nor the images' features, but a cut sends at least twice as many bytes.

Legend: B samples, S positions, H width, F image features, W vocabulary (padded to a multiple of TP), R texts of a
micro-batch, K positions that are pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megavlm.config.schema import LanguageConfig
from megavlm.inputs.batch import TextBatch
from megavlm.model.cross_entropy import CrossEntropy, LossOptions, linear_cross_entropy, token_statistics
from megavlm.model.norm import Norm
from megavlm.model.weight_gradients import WeightGradients
from megavlm.parallel.groups import Groups


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Return the number of rows of the embedding: the vocabulary rounded up to a multiple of TP."""
    return -(-vocab_size // tp) * tp


class Embedding(MegatronModule):
    """Token embedding with features at image tokens: tokens [B, S], features [F, 1, H] → [S(/TP), B, H].

    Without features, these positions hold the embedding of the image token. `sounds` are positions [N] in the flattened
    [B·S], and the features [N, H] of sounds at them.
    """

    def __init__(self, vocab_size: int, *, layer_config: TransformerConfig, groups: Groups, scale: float = 1.0) -> None:
        """Build the embedding. Its output is multiplied by `scale`."""
        super().__init__(config=layer_config)
        self.tp_group = groups.tp
        # Rounded to the type of the weights, as in Transformers.
        self.scale = torch.tensor(scale, dtype=layer_config.params_dtype).item()
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab(vocab_size, groups.dims.tp),
            layer_config.hidden_size,
            init_method=layer_config.init_method,
            config=layer_config,
            tp_group=groups.tp,
        )

    def forward(
        self, text: TextBatch, features: Tensor | None = None, sounds: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        embedded = self.word_embeddings(text.tokens)
        if self.scale != 1:
            embedded = embedded * self.scale
        if features is not None:
            # With no image in the batch this copies nothing, yet keeps the features in the graph: the vision part of
            # the pipeline gets its (zero) gradient like on any other micro-batch.
            positions = text.feature_positions
            values = features[: positions.numel(), 0]
            if sounds is not None:
                positions, values = torch.cat([positions, sounds[0]]), torch.cat([values, sounds[1]])
            embedded = embedded.flatten(0, 1).index_copy(0, positions, values.to(embedded.dtype)).view_as(embedded)
        hidden = embedded.transpose(0, 1).contiguous()
        if self.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        return hidden


class Output(MegatronModule):
    """The output layer with its cross entropy, or the logits alone: [S(/TP), B, H] → loss [B, S], logits [B, S, W]."""

    reads_below = True  # it reads `linear`'s weight itself, some rows at a time
    weight_gradients: WeightGradients | None = None

    def __init__(
        self,
        vocab_size: int,
        *,
        layer_config: TransformerConfig,
        groups: Groups,
        own_weight: bool,
        cross_entropy: CrossEntropy,
        chunk: int,
        softcap: float | None = None,
        scale: float = 1.0,
    ) -> None:
        """Build the output layer. The loss holds the logits of `chunk` positions in memory at a time. Logits are
        multiplied by `scale`, and then bounded by `softcap`.
        """
        super().__init__(config=layer_config)
        self.scale = scale
        self.vocab_size = vocab_size
        self.tp_group = groups.tp
        self.linear = ColumnParallelLinear(
            layer_config.hidden_size,
            padded_vocab(vocab_size, groups.dims.tp),
            config=layer_config,
            init_method=layer_config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=not own_weight,
            tp_group=groups.tp,
        )
        width = self.linear.output_size_per_partition
        self.options = LossOptions(
            group=groups.tp,
            real=max(0, min(width, vocab_size - groups.tp.rank() * width)),
            chunk=chunk,
            cross_entropy=cross_entropy,
            sums_in_place=self.linear.gradient_accumulation_fusion,
            softcap=softcap,
        )

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        positions: Tensor | None = None,
        weight: Tensor | None = None,
        teacher: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the cross entropy of each prediction, fp32 [B, S], for labels [B, S]; `weight` is a tied embedding's.

        `positions` [L] of the flattened [B·S] have a loss, by default all; the loss of the others is 0. `teacher` are
        further labels and their weights, [B, S, K] each; a label's own weight is what they leave of 1. With labels
        [(1 + D)·B, S], the rows behind the first B have no further labels.
        """
        # A tied weight's gradient is not delayed: its two gradients are summed before they are rounded.
        options = replace(self.options, weight_gradients=self.weight_gradients if weight is None else None)
        hidden, weight = self._whole(hidden), self.linear.weight if weight is None else weight
        rows, (samples, length) = hidden.flatten(0, 1), labels.shape
        targets, shares = labels, None
        if teacher is not None:
            tokens, weights = (F.pad(each, (0, 0, 0, 0, 0, samples - len(each))) for each in teacher)
            targets = torch.cat([labels[..., None], tokens], dim=-1)
            shares = torch.cat([1 - weights.sum(-1, keepdim=True), weights], dim=-1)
        if positions is None or len(positions) == labels.numel():
            targets, shares = targets.transpose(0, 1), None if shares is None else shares.transpose(0, 1).flatten(0, 1)
            losses = linear_cross_entropy(rows, weight, targets.flatten(0, 1), options, shares)
            return losses.view(length, samples).t()
        chosen = rows.index_select(0, positions % length * samples + positions // length)
        shares = None if shares is None else shares.flatten(0, 1)[positions]
        losses = linear_cross_entropy(chosen, weight, targets.flatten(0, 1)[positions], options, shares)
        return losses.new_zeros(labels.numel()).index_copy(0, positions, losses).view(samples, length)

    def logits(self, hidden: Tensor, weight: Tensor | None = None, *, at: Tensor | None = None) -> Tensor:
        """Return this rank's columns of the logits, [S, B, W/TP], for generation and comparisons.

        `at` [B] selects one position of each row: [1, B, W/TP].
        """
        hidden = self._whole(hidden)
        if at is not None:
            hidden = hidden[at, torch.arange(len(at), device=hidden.device)][None]
        logits = F.linear(hidden, self.linear.weight if weight is None else weight)
        cap = self.options.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def statistics(
        self, hidden: Tensor, labels: Tensor, positions: Tensor | None, weight: Tensor | None = None, *, top: int
    ) -> Tensor:
        """Return the statistics of each prediction, [B, S, 2 + 2·top] float64 (`token_statistics`).

        Arguments are those of `forward`; positions without a loss have zeros.
        """
        rows, (samples, length) = self._whole(hidden).flatten(0, 1), labels.shape
        chosen = torch.arange(labels.numel(), device=labels.device) if positions is None else positions
        rows = rows.index_select(0, chosen % length * samples + chosen // length)
        weight = self.linear.weight if weight is None else weight
        found = token_statistics(rows, weight, labels.flatten()[chosen], self.options, top=top)
        whole = found.new_zeros(labels.numel(), found.shape[1])
        return whole.index_copy_(0, chosen, found).unflatten(0, (samples, length))

    def _whole(self, hidden: Tensor) -> Tensor:
        """Return the scaled hidden states of all positions, [S, B, H]; scaling the logits would cost more."""
        if self.scale != 1:
            hidden = hidden * self.scale
        if self.linear.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)

    def gather(self, logits: Tensor) -> Tensor:
        """Return whole logits on every tensor-parallel rank, [B, S, vocabulary]."""
        whole = gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
        return whole[..., : self.vocab_size].transpose(0, 1)


class PredictionInput(MegatronModule):
    """Input of a layer for multi-token prediction: W [norm(embeddings); norm(hidden states)], [S(/TP), B, H].

    W is replicated. Under sequence parallelism each rank multiplies its own positions, and gradients are summed.
    """

    def __init__(self, language: LanguageConfig, layer_config: TransformerConfig) -> None:
        super().__init__(config=layer_config)
        width, epsilon = language.hidden_size, language.norm_epsilon
        self.embedding_norm = Norm(layer_config, width, epsilon, bias=False)
        self.hidden_norm = Norm(layer_config, width, epsilon, bias=False)
        self.projection = nn.Linear(2 * width, width, bias=False, dtype=layer_config.params_dtype)
        self.projection.weight.sequence_parallel = layer_config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1)
        return self.projection(joined)


class Representation(MegatronModule):
    """Pooling of hidden states, [S(/TP), B, H] → fp32 [R·H + learned scalars], with the learned scalars of the loss.

    The scalars follow the vectors, so that the loss returns one gradient for all. The loss normalises the vectors,
    separately for each width at which it is computed. With a reward head the result is one score for each text, [R].
    """

    reads_below = True  # it reads the head's weight itself

    def __init__(
        self, learned: tuple[str, ...], *, scores: bool, layer_config: TransformerConfig, groups: Groups
    ) -> None:
        """Build the pooling, with one scalar for each name in `learned`, and a reward head if it `scores`."""
        super().__init__(config=layer_config)
        self.groups = groups
        self.sharded = layer_config.sequence_parallel
        self.learned = learned
        self.head: nn.Linear | None = None
        if scores:
            self.head = nn.Linear(layer_config.hidden_size, 1, bias=False, dtype=layer_config.params_dtype)
            self.head.weight.sequence_parallel = self.sharded  # type: ignore[attr-defined]
        for name in learned:
            self.register_parameter(name, nn.Parameter(torch.empty(1, dtype=layer_config.params_dtype)))

    def forward(self, hidden: Tensor, text: TextBatch) -> Tensor:
        """Return the vectors of all texts of a micro-batch, the same on all tensor- and context-parallel ranks.

        A rank pools its own positions, and the sum over ranks gives the vectors. Each rank computes the same loss from
        them, so each has the whole gradient, which is also that of its own pooled sums.
        """
        assert text.pool is not None, "the data loader says which positions are pooled"
        assert text.pool_weights is not None
        positions, owners = text.pool
        length, samples, _ = hidden.shape
        # This rank's part of the rows; positions of other parts count zero times.
        row, place = positions // text.tokens.shape[1], positions % text.tokens.shape[1]
        place = place - length * self.groups.coords.tp if self.sharded else place
        here = (place >= 0) & (place < length)
        rows = hidden.flatten(0, 1).index_select(0, place.clamp(0, length - 1) * samples + row).float()
        if self.head is not None:  # before the sum over ranks: of the head's gradient, each has its own positions' part
            rows = nn.functional.linear(rows, self.head.weight.float())
        weights = text.pool_weights * here
        pooled = rows.new_zeros(len(text.lengths), rows.shape[1]).index_add(0, owners, rows * weights[:, None])
        if self.sharded:
            pooled = reduce_from_tensor_model_parallel_region(pooled, group=self.groups.tp)
        if self.groups.dims.cp > 1:
            pooled = reduce_from_tensor_model_parallel_region(pooled, group=self.groups.collection.cp)
        return torch.cat([pooled.flatten(), *(getattr(self, name).float() for name in self.learned)])


def pack(hidden: Tensor, carried: Sequence[Tensor]) -> Tensor:
    """Return one tensor for the next pipeline chunk: `hidden` if nothing is carried, else all values, [N, 1, 1].

    megatron-core's transfers announce shapes of three dimensions.
    """
    if not carried:
        return hidden
    return torch.cat([hidden.flatten(), *(tensor.flatten() for tensor in carried)])[:, None, None]


def unpack(
    packed: Tensor, *, hidden: tuple[int, int], carried: Sequence[tuple[int, ...]]
) -> tuple[Tensor, list[Tensor]]:
    """Split a tensor of `pack` into hidden states [any, *hidden] and tensors with the shapes in `carried`."""
    if not carried:
        return packed, []
    sizes = [prod(shape) for shape in carried]
    first, *rest = packed.flatten().split([packed.numel() - sum(sizes), *sizes])
    return first.view(-1, *hidden), [part.view(shape) for part, shape in zip(rest, carried, strict=True)]


def add_features(
    hidden: Tensor, features: Tensor, positions: Tensor, *, length: int, sequence_group: dist.ProcessGroup | None
) -> Tensor:
    """Add features to the hidden states of their tokens: [S(/TP), B, H], [F, 1, H] → [S(/TP), B, H].

    Args:
        positions: [F] index into the flattened [B·S] tokens; empty for a blank image's feature, which is added nowhere
            but stays in the graph, so that its merger gets a gradient of zero.
        length: S.
        sequence_group: ranks over which S is sharded; each adds the features of its own positions. The backward pass
            sums the features' gradients over these ranks, because every rank holds all features.
    """
    features = features[: positions.numel()]
    sample, position = positions // length, positions % length
    if sequence_group is not None:
        features = copy_to_tensor_model_parallel_region(features, group=sequence_group)
        position = position - sequence_group.rank() * hidden.shape[0]
        mine = (position >= 0) & (position < hidden.shape[0])
        features = features * mine[:, None, None]  # features of other ranks' positions add zero
        position = position.clamp(0, hidden.shape[0] - 1)
    flat = hidden.flatten(0, 1).index_add(0, position * hidden.shape[1] + sample, features[:, 0].to(hidden.dtype))
    return flat.view_as(hidden)
