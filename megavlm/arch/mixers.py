"""Token mixers of language layers: softmax attention, latent attention and linear attention (GatedDeltaNet).

Multi-head latent attention (MLA; DeepSeek-V2, DeepSeek-AI 2024) projects the hidden states of a token to a latent of L
channels, from which keys and values of all heads are projected, and to R channels of a key that rotate, which all heads
share. Queries may come from a latent, too. Projections to latents are replicated on all tensor-parallel ranks, and each
rank projects its own tokens: latents are gathered in place of hidden states, which are wider.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from megavlm.arch.kind import HiddenWeight, hidden_weight
from megavlm.arch.tensor_split import HeadSplit, LatentHead, delta_split, language_split
from megavlm.arch.workload import Workload
from megavlm.config.derived import attends_in_window, is_latent, is_linear, unwindowed, windowed
from megavlm.config.schema import LanguageConfig

CHUNK = 64  # tokens that linear attention computes together (`model/delta_rule.py`)


def attention_rows(split: HeadSplit) -> int:
    """Return the number of rows, each as wide as the hidden states, of softmax attention's matrices on a rank."""
    return split.local_rows + split.local_heads * split.width


class Mixer(ABC):
    """Torch-free arithmetic of one kind of attention in language layers: shards, parameters and FLOPs."""

    linear = False

    def seen(self, language: LanguageConfig) -> LanguageConfig:
        """Return the language model as layers with this mixer see it; the other methods take that."""
        return language

    @abstractmethod
    def split(self, language: LanguageConfig, tp: int) -> HeadSplit:
        """Return how attention heads are sharded over `tp` ranks."""

    @abstractmethod
    def weights(self, language: LanguageConfig, tp: int) -> int:
        """Return the number of weights of attention's matrices on one of `tp` ranks."""

    def multiplied(self, language: LanguageConfig, tp: int) -> float:
        """Return how many weights one of `tp` ranks multiplies with each token on average. This is `weights`, but a
        matrix that the rank multiplies only with its own part of the tokens counts 1/tp.
        """
        return self.weights(language, tp)

    def gathered(self, language: LanguageConfig) -> int:
        """Return the channels of each token that tensor-parallel ranks gather."""
        return language.hidden_size

    @abstractmethod
    def others(self, language: LanguageConfig, tp: int) -> int:
        """Return the number of attention's parameters outside its matrices on one of `tp` ranks."""

    @abstractmethod
    def model_weights(self, language: LanguageConfig) -> int:
        """Return the number of weights of attention's matrices in the model, without padding."""

    @abstractmethod
    def hidden_weights(self, language: LanguageConfig) -> Mapping[str, HiddenWeight]:
        """Return attention's matrices between hidden states, by their names within the layer."""

    @abstractmethod
    def flops(self, language: LanguageConfig, work: Workload, number: int) -> float:
        """Return the forward FLOPs of attention in layer `number`, without the products with its matrices."""


class SoftmaxAttention(Mixer):
    """Grouped-query attention: matrices of queries, keys, values and output, and of the output gate if it has one."""

    def seen(self, language: LanguageConfig) -> LanguageConfig:
        return windowed(language)

    def split(self, language: LanguageConfig, tp: int) -> HeadSplit:
        return language_split(language, tp)

    def weights(self, language: LanguageConfig, tp: int) -> int:
        return attention_rows(language_split(language, tp)) * language.hidden_size

    def others(self, language: LanguageConfig, tp: int) -> int:
        split = language_split(language, tp)
        biases = split.local_rows * language.add_qkv_bias + language.hidden_size * language.add_proj_bias
        norms = 2 * split.width * (language.qk_norm and language.qk_norm_weights)
        return biases + norms + split.local_heads * language.attention_sinks

    def model_weights(self, language: LanguageConfig) -> int:
        return self.weights(language, 1)

    def hidden_weights(self, language: LanguageConfig) -> Mapping[str, HiddenWeight]:
        """Return the two weights; queries and the gate of their output are one matrix, as in Transformers."""
        hidden, width, groups = language.hidden_size, language.kv_channels, language.num_query_groups
        queries = language.num_attention_heads // groups * width
        projected = queries * (1 + language.attention_output_gate), *(width,) * (2 - language.keys_as_values)
        return {
            "self_attention.linear_qkv.weight": hidden_weight(hidden, *projected, periods=groups),
            "self_attention.linear_proj.weight": hidden_weight(groups * queries, hidden),
        }

    def flops(self, language: LanguageConfig, work: Workload, number: int) -> float:
        squares = work.sliding_squares if attends_in_window(language, number) else work.token_squares
        return 2.0 * squares * language.kv_channels * language.num_attention_heads


class UnwindowedAttention(SoftmaxAttention):
    """Attention of layers without a sliding window in a model where others have one: their heads may be others, and no
    window asks for masks.
    """

    def seen(self, language: LanguageConfig) -> LanguageConfig:
        return _without_window(unwindowed(language))


@lru_cache(maxsize=256)
def _without_window(language: LanguageConfig) -> LanguageConfig:
    return replace(language, window_size=None)


class LinearAttention(Mixer):
    """GatedDeltaNet: a state of key width × value width for each value head."""

    linear = True

    def split(self, language: LanguageConfig, tp: int) -> HeadSplit:
        return delta_split(language, tp).heads

    def weights(self, language: LanguageConfig, tp: int) -> int:
        split = delta_split(language, tp)
        return (split.local_rows + split.heads.local_heads * split.width) * language.hidden_size

    def others(self, language: LanguageConfig, tp: int) -> int:
        """Return the number of parameters of the convolution, the decays and the norm, which is replicated."""
        split = delta_split(language, tp)
        channels = split.heads.slots * split.heads.rows(*split.convolved)
        return channels * language.linear_conv_kernel_dim + 2 * split.heads.local_heads + split.width

    def model_weights(self, language: LanguageConfig) -> int:
        split = delta_split(language, 1)
        rows = split.heads.slots * split.heads.rows(*split.projected) + split.heads.local_heads * split.width
        return rows * language.hidden_size

    def hidden_weights(self, language: LanguageConfig) -> Mapping[str, HiddenWeight]:
        """Return the two weights; queries, keys, values, gates, β and decays are a matrix each."""
        groups, hidden, width = language.linear_num_key_heads, language.hidden_size, language.linear_key_head_dim
        heads = language.linear_num_value_heads // groups
        values = heads * language.linear_value_head_dim
        projected = values, width, width, values, heads, heads
        return {
            "self_attention.in_proj.weight": hidden_weight(hidden, *projected, periods=groups),
            "self_attention.out_proj.weight": hidden_weight(groups * values, hidden),
        }

    def flops(self, language: LanguageConfig, work: Workload, number: int) -> float:
        """Return the FLOPs of the rule by chunks of C tokens, with keys K and values V wide: for each token and head,
        2·C·K for keys with keys, 2·C·K for queries with keys, C·(K + V) for the triangular system, 2·C·V for outputs
        within the chunk, and 6·K·V for reading the state twice and writing it.
        """
        key, value = language.linear_key_head_dim, language.linear_value_head_dim
        each = CHUNK * (5 * key + 3 * value) + 6 * key * value
        return float(work.tokens) * language.linear_num_value_heads * each


class LatentAttention(Mixer):
    """Latent attention: all heads project their keys and values from one latent per token."""

    def split(self, language: LanguageConfig, tp: int) -> HeadSplit:
        return language_split(language, tp)

    def weights(self, language: LanguageConfig, tp: int) -> int:
        return self._down(language) + self._up(language, tp)

    def multiplied(self, language: LanguageConfig, tp: int) -> float:
        return self._down(language) / tp + self._up(language, tp)

    def gathered(self, language: LanguageConfig) -> int:
        return (language.q_lora_rank or language.hidden_size) + self._latents(language)

    def others(self, language: LanguageConfig, tp: int) -> int:
        """Return the number of parameters of the norms of latents."""
        return (language.q_lora_rank or 0) + (language.kv_lora_rank or 0)

    def model_weights(self, language: LanguageConfig) -> int:
        return self.weights(language, 1)

    def hidden_weights(self, language: LanguageConfig) -> Mapping[str, HiddenWeight]:
        """Return the weights, each of which is one matrix, as in Transformers."""
        hidden, heads, rank = language.hidden_size, language.num_attention_heads, language.kv_lora_rank or 0
        rows = {name: heads * each for name, each in self._heads(language).rows.items()}
        weights = {
            "linear_kv_down_proj": hidden_weight(hidden, self._latents(language)),
            "linear_kv_up_proj": hidden_weight(rank, rows["linear_kv_up_proj"]),
            "linear_proj": hidden_weight(rows["linear_proj"], hidden),
        }
        if language.q_lora_rank is None:
            weights["linear_q_proj"] = hidden_weight(hidden, rows["linear_q_proj"])
        else:
            weights["linear_q_down_proj"] = hidden_weight(hidden, language.q_lora_rank)
            weights["linear_q_up_proj"] = hidden_weight(language.q_lora_rank, rows["linear_q_up_proj"])
        return {f"self_attention.{name}.weight": weight for name, weight in weights.items()}

    def flops(self, language: LanguageConfig, work: Workload, number: int) -> float:
        squares = work.sliding_squares if attends_in_window(language, number) else work.token_squares
        return 1.0 * squares * (language.kv_channels + language.v_head_dim) * language.num_attention_heads

    def _heads(self, language: LanguageConfig) -> LatentHead:
        latent = language_split(language, 1).latent
        assert latent is not None
        return latent

    def _latents(self, language: LanguageConfig) -> int:
        """Return the number of channels of the key/value latent and of the rotated part of keys."""
        return (language.kv_lora_rank or 0) + language.qk_pos_emb_head_dim

    def _down(self, language: LanguageConfig) -> int:
        return (self._latents(language) + (language.q_lora_rank or 0)) * language.hidden_size

    def _up(self, language: LanguageConfig, tp: int) -> int:
        rows, hidden = self._heads(language).rows, language.hidden_size
        queries = rows["linear_q_proj"] * (language.q_lora_rank or hidden)
        keys = rows["linear_kv_up_proj"] * (language.kv_lora_rank or 0)
        return language_split(language, tp).local_heads * (queries + keys + rows["linear_proj"] * hidden)


SOFTMAX, UNWINDOWED, LATENT, LINEAR = SoftmaxAttention(), UnwindowedAttention(), LatentAttention(), LinearAttention()


def mixer_of(language: LanguageConfig, number: int) -> Mixer:
    """Return the token mixer of language layer `number`."""
    if is_linear(language, number):
        return LINEAR
    if is_latent(language):
        return LATENT
    return SOFTMAX if language.window_size is None or attends_in_window(language, number) else UNWINDOWED
