"""Language models by themselves, which --language-from takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megavlm.config.schema import ModelConfig
from megavlm.families.shared.chat import CHATML, MISTRAL, NamedTemplate
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.language import experts, language, language_table
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table


def config(settings: Settings) -> ModelConfig:
    return ModelConfig(language=language(settings), experts=experts(settings))


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return language_table(
        model.language, prefixes.language, head=prefixes.head, experts=model.experts, stored=prefixes.experts
    )


def _family(
    model_type: str, template: NamedTemplate | None, published: Mapping[str, Mapping[str, Any]] | None = None
) -> Family:
    return Family(
        name=model_type,
        model_types=(model_type,),
        config=config,
        table=table,
        name_prefixes=(NamePrefixes(language="model."),),
        parts=("language",),
        unused=(r".*\.rotary_emb\.inv_freq",),
        chat_template=template,
        published=published or {},
    )


_LLAMA3_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_LLAMA3_8B = {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
# 7.1e9 parameters for the check against Megatron-LM's scaling table: 32 × 4096 and its vocabulary of 131,072. GPT's MLP
# has two matrices of 4·H; here there are three: 8/3·H is as much work and as many weights.
_GPT_7_1B = {"intermediate_size": 10912, "vocab_size": 131072, "tie_word_embeddings": True}

LLAMA = _family(
    "llama",
    None,
    # What a folder does not say is Llama 2's.
    {"llama2_7b": {}, "llama3_8b": _LLAMA3_8B, "llama3_70b": _LLAMA3_70B, "gpt_7_1b": _GPT_7_1B},
)
MISTRAL_7B = _family("mistral", MISTRAL)
QWEN2 = _family("qwen2", CHATML)
QWEN3 = _family("qwen3", CHATML)
QWEN3_MOE = _family("qwen3_moe", CHATML)
