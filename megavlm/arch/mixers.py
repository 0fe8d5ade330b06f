"""What mixes the tokens of a language layer: softmax attention, or linear attention (GatedDeltaNet)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from megavlm.arch.kind import HiddenWeight, hidden_weight
from megavlm.arch.tensor_split import HeadSplit, delta_split, language_split
from megavlm.arch.workload import Workload
from megavlm.config.derived import attends_in_window
from megavlm.config.schema import LanguageConfig

CHUNK = 64  # tokens that linear attention computes together (`model/delta_rule.py`)


class Mixer(ABC):
    """Torch-free arithmetic of one kind of attention in a language layer."""

    linear = False

    @abstractmethod
    def split(self, language: LanguageConfig, tp: int) -> HeadSplit:
        """Return how its heads are sharded over `tp` ranks."""

    @abstractmethod
    def rows(self, language: LanguageConfig, tp: int) -> int:
        """Return the number of rows, each as wide as the hidden states, of its matrices on one of `tp` ranks."""

    @abstractmethod
    def others(self, language: LanguageConfig, tp: int) -> int:
        """Return the number of its other parameters on one of `tp` ranks."""

    @abstractmethod
    def model_rows(self, language: LanguageConfig) -> int:
        """Return the number of rows of its matrices in the model, without padding."""

    @abstractmethod
    def hidden_weights(self, language: LanguageConfig) -> Mapping[str, HiddenWeight]:
        """Return its matrices between hidden states, by their names within the layer."""

    @abstractmethod
    def flops(self, language: LanguageConfig, work: Workload, number: int) -> float:
        """Return the forward FLOPs of layer `number` beside the products with its matrices."""


class SoftmaxAttention(Mixer):
    """Grouped-query attention: queries, keys and values, an output, and with an output gate a matrix more."""

    def split(self, language: LanguageConfig, tp: int) -> HeadSplit:
        return language_split(language, tp)

    def rows(self, language: LanguageConfig, tp: int) -> int:
        split = language_split(language, tp)
        return split.local_rows + split.local_heads * split.width

    def others(self, language: LanguageConfig, tp: int) -> int:
        split = language_split(language, tp)
        return split.local_rows * language.add_qkv_bias + 2 * split.width * language.qk_norm

    def model_rows(self, language: LanguageConfig) -> int:
        return self.rows(language, 1)

    def hidden_weights(self, language: LanguageConfig) -> Mapping[str, HiddenWeight]:
        """Return the two weights; queries and what gates their output are one matrix, as in Transformers."""
        hidden, width, groups = language.hidden_size, language.kv_channels, language.num_query_groups
        queries = language.num_attention_heads // groups * width
        projected = queries * (1 + language.attention_output_gate), width, width
        return {
            "self_attention.linear_qkv.weight": hidden_weight(hidden, *projected, periods=groups),
            "self_attention.linear_proj.weight": hidden_weight(groups * queries, hidden),
        }

    def flops(self, language: LanguageConfig, work: Workload, number: int) -> float:
        squares = work.sliding_squares if attends_in_window(language, number) else work.token_squares
        return 2.0 * squares * language.kv_channels * language.num_attention_heads


class LinearAttention(Mixer):
    """GatedDeltaNet: a state of key width × value width for each value head."""

    linear = True

    def split(self, language: LanguageConfig, tp: int) -> HeadSplit:
        return delta_split(language, tp).heads

    def rows(self, language: LanguageConfig, tp: int) -> int:
        split = delta_split(language, tp)
        return split.local_rows + split.heads.local_heads * split.width

    def others(self, language: LanguageConfig, tp: int) -> int:
        """Return those of the convolution, of the decays, and of the norm, which is replicated."""
        split = delta_split(language, tp)
        channels = split.heads.slots * split.heads.rows(*split.convolved)
        return channels * language.linear_conv_kernel_dim + 2 * split.heads.local_heads + split.width

    def model_rows(self, language: LanguageConfig) -> int:
        split = delta_split(language, 1)
        return split.heads.slots * split.heads.rows(*split.projected) + split.heads.local_heads * split.width

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
        """Return the FLOPs of the rule by chunks of C tokens, K the width of a key and V of a value: of each token and
        head 2·C·K for keys with keys, 2·C·K for queries with keys, C·(K + V) for the triangular system, 2·C·V for what
        the chunk itself adds, and 6·K·V for reading the state twice and writing it.
        """
        key, value = language.linear_key_head_dim, language.linear_value_head_dim
        each = CHUNK * (5 * key + 3 * value) + 6 * key * value
        return float(work.tokens) * language.linear_num_value_heads * each


SOFTMAX, LINEAR = SoftmaxAttention(), LinearAttention()
