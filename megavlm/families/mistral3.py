"""Mistral 3 (Mistral Small 3.1 and 3.2, Ministral 3): Pixtral's tower, a learned merger of 2×2 patches, and Mistral."""

from __future__ import annotations

from typing import Any

from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.families import pixtral
from megavlm.families.pixtral import IMAGE, PROCESSOR, inputs, vision, vision_table
from megavlm.families.shared.chat import NamedTemplate
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.language import language, language_table
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Rename, Table, linear


def config(settings: Settings) -> ModelConfig:
    """Mistral3Config."""
    text, tower = settings.section("text_config"), settings.section("vision_config")
    tower.require("model_type", "pixtral", why="only Pixtral's tower is known here")
    settings.require("vision_feature_layer", -1, why="only features of the last layer are known here")
    settings.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    language_model = language(
        text,
        kind=text.get("model_type", "mistral"),
        # Transformers 5 writes it at the top; files from before have it in the text's section, or leave out false.
        tied=settings.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
    )
    return ModelConfig(
        vision=vision(tower),
        projector=ProjectorConfig(
            kind="mlp",
            pixel_shuffle=settings.get("spatial_merge_size", 2),
            merge="convolution",
            input_norm=True,
            norm_before_merge=True,
            normalization="RMSNorm",
            norm_epsilon=language_model.norm_epsilon,
            bias=settings.get("multimodal_projector_bias", False),
        ),
        language=language_model,
        image_token=settings.get("image_token_index", settings.get("image_token_id", 10)),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    projector, bias = prefixes.projector, model.projector.bias
    return {
        **vision_table(model.vision, prefixes.vision),
        "projector.norm.weight": Rename(f"{projector}norm.weight"),
        "projector.convolution.weight": Rename(f"{projector}patch_merger.merging_layer.weight"),
        **linear("projector.linear_fc1", f"{projector}linear_1", bias=bias),
        **linear("projector.linear_fc2", f"{projector}linear_2", bias=bias),
        **language_table(model.language, prefixes.language, head=prefixes.head),
    }


# Version 7 of Mistral's format: a system turn of its own, and no spaces around what is said.
CHAT = NamedTemplate(
    "mistral_v7",
    """\
{{ bos_token }}{% for message in messages %}\
{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]{% endif %}\
{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]{% endif %}\
{% if message.role == 'assistant' %}{{ message.content }}{{ eos_token }}{% endif %}\
{% endfor %}""",
    needs=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
)


def _released(kind: str, layers: int, width: int, inner: int, *, tied: bool = False) -> dict[str, Any]:
    text = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "num_attention_heads": 32}
    heads = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "rms_norm_eps": 1e-5}
    return {
        "text_config": {"model_type": kind, "sliding_window": None, **text, **heads},
        "vision_config": {"hidden_act": "silu", "image_size": 1540, "patch_size": 14},
        "tie_word_embeddings": tied,
    }


FAMILY = Family(
    name="mistral3",
    model_types=("mistral3",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=pixtral.FAMILY.name_prefixes,
    unused=pixtral.FAMILY.unused,
    image_processors=(PROCESSOR,),
    image_text=IMAGE,
    chat_template=CHAT,
    published={
        "mistral_small_3_24b": _released("mistral", 40, 5120, 32768),
        "ministral_3_3b": _released("ministral3", 26, 3072, 9216, tied=True),
        "ministral_3_8b": _released("ministral3", 34, 4096, 14336),
        "ministral_3_14b": _released("ministral3", 40, 5120, 16384),
    },
)
