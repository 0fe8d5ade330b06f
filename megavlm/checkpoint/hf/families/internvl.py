"""InternVL2.5 and InternVL3 (the -hf checkpoints): InternViT, 2×2 pixel shuffle with a norm and an MLP, Qwen2.5."""

from __future__ import annotations

from torch import Tensor

from megavlm.checkpoint.hf.families.inputs import pixel_values
from megavlm.checkpoint.hf.families.language import language, language_table
from megavlm.checkpoint.hf.families.vision import intern, intern_table
from megavlm.checkpoint.hf.family import Family, Spelling
from megavlm.checkpoint.hf.settings import Settings, refuse
from megavlm.checkpoint.hf.table import Table, linear
from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.data.batch import MicroBatch


def config(settings: Settings) -> ModelConfig:
    """InternVLConfig."""
    settings.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    settings.require("vision_feature_select_strategy", "default", why="the class token as a feature is not known here")
    factor = 1 / settings.get("downsample_ratio", 0.5)
    if factor != int(factor):
        refuse(settings, "downsample_ratio", "it must be 1/N")
    text = settings.section("text_config")
    # The outer setting decides where it is given; checkpoints from before Transformers 5 have the inner one alone.
    tied = settings.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return ModelConfig(
        vision=intern(settings.section("vision_config"), feature_layer=settings.get("vision_feature_layer", -1)),
        projector=ProjectorConfig(kind="mlp", pixel_shuffle=int(factor), input_norm=True),
        language=language(text, tied=tied),
        image_token=settings.get("image_token_id", 151667),
    )


def table(model: ModelConfig, spelling: Spelling) -> Table:
    return {
        **intern_table(model.vision, spelling.vision),
        **linear("projector.norm", f"{spelling.projector}layer_norm", bias=True),
        **linear("projector.linear_fc1", f"{spelling.projector}linear_1", bias=True),
        **linear("projector.linear_fc2", f"{spelling.projector}linear_2", bias=True),
        **language_table(model.language, spelling.language, head=spelling.head),
    }


def inputs(batch: MicroBatch, model: ModelConfig) -> dict[str, Tensor]:
    return {"input_ids": batch.tokens, **pixel_values(batch, model.vision)}


INTERNVL = Family(
    name="internvl",
    model_types=("internvl",),
    config=config,
    table=table,
    inputs=inputs,
    spellings=(
        Spelling("vision_tower.", "multi_modal_projector.", "language_model.model.", "language_model.lm_head.weight"),
        Spelling("model.vision_tower.", "model.multi_modal_projector.", "model.language_model."),
    ),
    unused=(r".*vision_tower\.encoder\.layer\..*", r".*vision_tower\.layernorm\..*", r".*\.embeddings\.mask_token"),
)
