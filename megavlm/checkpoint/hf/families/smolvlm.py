"""SmolVLM and Idefics3: SigLIP for any grid, 3×3 or 4×4 pixel shuffle into one linear layer, Llama. Images alone.

A user's image is cut into square tiles and a small copy of the whole, each an image of its own here. Tiles must be
full, as their processors make them where they split images (the default): Transformers hides a padded tile's padding
from attention and still makes features of it, which is not known here.
"""

from __future__ import annotations

from torch import Tensor

from megavlm.checkpoint.hf.families.inputs import pixel_values
from megavlm.checkpoint.hf.families.language import language, language_table
from megavlm.checkpoint.hf.families.vision import idefics3, siglip_table
from megavlm.checkpoint.hf.family import Family, Spelling
from megavlm.checkpoint.hf.settings import Settings
from megavlm.checkpoint.hf.table import Table, linear
from megavlm.config.schema import ModelConfig, ProjectorConfig
from megavlm.data.batch import MicroBatch


def config(settings: Settings) -> ModelConfig:
    """SmolVLMConfig, Idefics3Config. Only the outer tie_word_embeddings counts."""
    return ModelConfig(
        vision=idefics3(settings.section("vision_config")),
        projector=ProjectorConfig(kind="linear", pixel_shuffle=settings.get("scale_factor", 2), bias=False),
        language=language(settings.section("text_config"), tied=settings.get("tie_word_embeddings", False)),
        image_token=settings.get("image_token_id", 128257),
    )


def table(model: ModelConfig, spelling: Spelling) -> Table:
    return {
        **siglip_table(model.vision, spelling.vision),
        **linear("projector.linear_fc1", f"{spelling.projector}modality_projection.proj", bias=False),
        **language_table(model.language, spelling.language, head=spelling.head),
    }


def inputs(batch: MicroBatch, model: ModelConfig) -> dict[str, Tensor]:
    """Images of one size, as if all belonged to one sample: features follow each other in any case."""
    pixels = {name: images[None] for name, images in pixel_values(batch, model.vision).items()}
    return {"input_ids": batch.tokens, **pixels}


SMOLVLM = Family(
    name="smolvlm",
    model_types=("smolvlm", "idefics3"),
    config=config,
    table=table,
    inputs=inputs,
    spellings=(Spelling("model.vision_model.", "model.connector.", "model.text_model."),),
    unused=(r".*\.rotary_emb\.inv_freq", r".*\.position_ids"),
)
