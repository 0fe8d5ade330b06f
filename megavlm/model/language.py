"""The two ends of the language model: embedding with the image features merged in, and the output with its loss.

Legend: B samples, S positions, H width, F image features, W vocabulary (padded to a multiple of TP).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megavlm.config.derived import rotary_channels
from megavlm.config.schema import LanguageConfig
from megavlm.inputs.batch import TextBatch
from megavlm.model.cross_entropy import CrossEntropy
from megavlm.model.linear_cross_entropy import LossOptions, linear_cross_entropy
from megavlm.model.weight_gradients import WeightGradients
from megavlm.parallel.groups import Groups


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of TP."""
    return -(-vocab_size // tp) * tp


class Embedding(MegatronModule):
    """Token embeddings, with features at image tokens: tokens [B, S], features [F, 1, H] → [S(/TP), B, H].

    Without features, these positions hold the embedding of the image token.
    """

    def __init__(self, vocab_size: int, *, layer_config: TransformerConfig, groups: Groups, scale: float = 1.0) -> None:
        """`scale` multiplies the embeddings of tokens."""
        super().__init__(config=layer_config)
        self.tp_group = groups.tp
        # As Transformers rounds it, which keeps it in the type of the weights.
        self.scale = torch.tensor(scale, dtype=layer_config.params_dtype).item()
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab(vocab_size, groups.dims.tp),
            layer_config.hidden_size,
            init_method=layer_config.init_method,
            config=layer_config,
            tp_group=groups.tp,
        )

    def forward(self, text: TextBatch, features: Tensor | None = None) -> Tensor:
        embedded = self.word_embeddings(text.tokens)
        if self.scale != 1:
            embedded = embedded * self.scale
        if features is not None:
            # With no image in the batch this copies nothing, yet keeps the features in the graph: the vision part of
            # the pipeline gets its (zero) gradient like on any other micro-batch.
            positions = text.feature_positions
            found = features[: positions.numel(), 0].to(embedded.dtype)
            embedded = embedded.flatten(0, 1).index_copy(0, positions, found).view_as(embedded)
        hidden = embedded.transpose(0, 1).contiguous()
        if self.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        return hidden


class Output(MegatronModule):
    """The output layer with its cross entropy, or the logits alone: [S(/TP), B, H] → loss [B, S], logits [B, S, W]."""

    reads_below = True  # `linear`'s weight, some rows of which it multiplies at a time
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
    ) -> None:
        """`chunk`: positions whose logits are in memory at a time while the loss is computed."""
        super().__init__(config=layer_config)
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
        )

    def forward(
        self, hidden: Tensor, labels: Tensor, positions: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Cross entropy of each prediction, fp32 [B, S], for labels [B, S]; `weight` is that of a tied embedding.

        `positions` [L] are those of the flattened [B·S] that have a loss, by default all; that of the others is 0.
        """
        # The embedding's gradient is not left: a tied weight's two gradients are added up before they are rounded.
        options = replace(self.options, weight_gradients=self.weight_gradients if weight is None else None)
        hidden, weight = self._whole(hidden), self.linear.weight if weight is None else weight
        rows, (samples, length) = hidden.flatten(0, 1), labels.shape
        if positions is None or len(positions) == labels.numel():
            return linear_cross_entropy(rows, weight, labels.t().flatten(), options).view(length, samples).t()
        chosen = rows.index_select(0, positions % length * samples + positions // length)
        losses = linear_cross_entropy(chosen, weight, labels.flatten()[positions], options)
        return losses.new_zeros(labels.numel()).index_copy(0, positions, losses).view(samples, length)

    def logits(self, hidden: Tensor, weight: Tensor | None = None, *, at: Tensor | None = None) -> Tensor:
        """This rank's columns of the logits, [S, B, W/TP], without a loss: answers and comparisons need them.

        `at` [B]: of one position of each row alone, [1, B, W/TP].
        """
        hidden = self._whole(hidden)
        if at is not None:
            hidden = hidden[at, torch.arange(len(at), device=hidden.device)][None]
        return F.linear(hidden, self.linear.weight if weight is None else weight)

    def _whole(self, hidden: Tensor) -> Tensor:
        """Return all positions of the hidden states, [S, B, H]."""
        if self.linear.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)

    def gather(self, logits: Tensor) -> Tensor:
        """Whole logits on every tensor-parallel rank, [B, S, vocabulary]."""
        whole = gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
        return whole[..., : self.vocab_size].transpose(0, 1)


def rope(positions: Tensor, language: LanguageConfig) -> Tensor:
    """Return the rotary angles (Su et al. 2021) of each position: [B or 1, S] → [S, B or 1, 1, channels].

    With M-RoPE (Wang et al. 2024, Qwen2-VL) positions are [3, B, S], and each pair of channels follows one of the axes.
    """
    if language.mrope_section:
        axes = torch.tensor(mrope_axes(language.mrope_section, interleaved=language.mrope_interleaved))
        moved = positions.index_select(0, axes.to(positions.device, non_blocking=True)).permute(2, 1, 0)
    else:
        moved = positions.t()[:, :, None]
    angles = moved.float() * frequencies(language, device=positions.device)
    if language.rotary_interleaved:
        both = angles.repeat_interleave(2, dim=-1)
        return F.pad(both, (0, language.kv_channels - both.shape[-1]))[:, :, None]  # channels that do not rotate
    return torch.cat([angles, angles], dim=-1)[:, :, None]


def mrope_axes(section: tuple[int, ...], *, interleaved: bool) -> list[int]:
    """Return which axis (0 time, 1 height, 2 width) each pair of channels turns with, fastest pair first.

    Sections divide the pairs (Qwen2-VL): all of time, then height, then width. Interleaved (Qwen3-VL), pairs alternate
    time, height, width, so that each axis has fast and slow ones, until an axis has its number; time has the rest.
    """
    time, height, width = section
    if not interleaved:
        return [0] * time + [1] * height + [2] * width
    counts = (0, height, width)
    return [i % 3 if i // 3 < counts[i % 3] else 0 for i in range(sum(section))]


def frequencies(language: LanguageConfig, *, device: torch.device) -> Tensor:
    """Angle per position of each pair of the D channels that rotate, [D/2]: base^(−2i/D), slower where scaled.

    Llama 3.1's scaling by s (its reference implementation, `apply_scaling`): with w the wavelength 2π/f, a wave shorter
    than L/high keeps its frequency, one longer than L/low turns s times slower, and in between the two are mixed in
    proportion to how far L/w lies from low to high.

    YaRN (Peng et al. 2023) mixes in proportion to the number i of the pair: with the frequency base^(−2i/D) it makes n
    turns within L at i = D/2 · ln(L / 2πn) / ln base. The bounds are rounded away from one another, as in its reference
    implementation.
    """
    width = rotary_channels(language)
    plain = language.rotary_base ** (-torch.arange(0, width, 2, device=device).float() / width)
    if language.rope_scaling == "none":
        return plain
    slow = plain / language.rope_scaling_factor
    if language.rope_scaling == "linear":
        return slow
    if language.rope_scaling == "yarn":
        first, last = _yarn_bounds(language)
        share = ((torch.arange(width // 2, device=device) - first) / (last - first)).clamp(0, 1)
        return torch.lerp(plain, slow, share)
    low, high = language.rope_low_freq_factor, language.rope_high_freq_factor
    turns = language.rope_original_positions * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(slow, plain, share)


def _yarn_bounds(language: LanguageConfig) -> tuple[float, float]:
    """Return the last rotary pair that keeps its frequency, and the first whose frequency is divided by the factor."""
    width = rotary_channels(language)

    def pair_of(turns: float) -> float:
        length = math.log(language.rope_original_positions / (2 * math.pi * turns))
        return width / 2 * length / math.log(language.rotary_base)

    first = max(math.floor(pair_of(language.rope_beta_fast)), 0)
    last = min(math.ceil(pair_of(language.rope_beta_slow)), width - 1)
    return first, last if last != first else first + 1e-3
