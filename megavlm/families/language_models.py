"""Families of language models: Llama, Mistral, Qwen2, Qwen3 (also MoE), DeepSeek-V3, gpt-oss.

--init-from trains one alone, --language-from joins it to a vision tower.
"""

from __future__ import annotations

from megavlm.config.schema import ModelConfig, VisionConfig
from megavlm.families.shared.chat import CHATML, MISTRAL, NamedTemplate
from megavlm.families.shared.family import LANGUAGE_ALONE, Family, NamePrefixes
from megavlm.families.shared.inputs import tokens_and_pixels
from megavlm.families.shared.language import experts, language, language_table
from megavlm.families.shared.settings import Settings


def config(settings: Settings) -> ModelConfig:
    return ModelConfig(vision=VisionConfig(num_layers=0), language=language(settings), experts=experts(settings))


def _family(model_type: str, template: NamedTemplate | None, *unused: str) -> Family:
    return Family(
        name=model_type,
        model_types=(model_type,),
        config=config,
        table=language_table,
        name_prefixes=(NamePrefixes(language="model."),),
        parts=LANGUAGE_ALONE,
        inputs=tokens_and_pixels,
        unused=(r".*\.rotary_emb\.inv_freq", *unused),
        chat_template=template,
    )


LLAMA = _family("llama", None)
MISTRAL_7B = _family("mistral", MISTRAL)
QWEN2 = _family("qwen2", CHATML)
QWEN3 = _family("qwen3", CHATML)
QWEN3_MOE = _family("qwen3_moe", CHATML)
GPT_OSS = _family("gpt_oss", None)
DEEPSEEK_V3 = _family("deepseek_v3", None, r"model\.layers\.61\..*")  # which predicts a further token
