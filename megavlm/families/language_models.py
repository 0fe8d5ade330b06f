"""Families of standalone language models, for --language-from: Llama, Mistral, Qwen2, Qwen3 (also MoE), DeepSeek-V3."""

from __future__ import annotations

from megavlm.config.schema import ModelConfig
from megavlm.families.shared.chat import CHATML, MISTRAL, NamedTemplate
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.language import experts, language, language_table
from megavlm.families.shared.settings import Settings


def config(settings: Settings) -> ModelConfig:
    return ModelConfig(language=language(settings), experts=experts(settings))


def _family(model_type: str, template: NamedTemplate | None) -> Family:
    return Family(
        name=model_type,
        model_types=(model_type,),
        config=config,
        table=language_table,
        name_prefixes=(NamePrefixes(language="model."),),
        parts=("language",),
        unused=(r".*\.rotary_emb\.inv_freq",),
        chat_template=template,
    )


LLAMA = _family("llama", None)
MISTRAL_7B = _family("mistral", MISTRAL)
QWEN2 = _family("qwen2", CHATML)
QWEN3 = _family("qwen3", CHATML)
QWEN3_MOE = _family("qwen3_moe", CHATML)
DEEPSEEK_V3 = _family("deepseek_v3", None)
