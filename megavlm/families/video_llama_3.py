"""VideoLLaMA 3: SigLIP with rotary embeddings instead of learned positions, an MLP, and Qwen2, for images alone.

Each patch of an image is a token. Videos are not supported: 2 × 2 patches of a frame become one token, and the pixels
decide which of these tokens are kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.families.llava import whole_table
from megavlm.families.shared.chat import CHATML
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given
from megavlm.families.shared.language import is_tied, language
from megavlm.families.shared.qwen_vl import IMAGE, NativeResolution, native_bounds
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table
from megavlm.families.shared.vision import siglip, siglip_table
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import HALF_PIXELS, Json, ProcessorReader


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a VideoLlama3Config."""
    text = settings.section("text_config")
    text.require("model_type", "qwen2", why="only Qwen2 is known here")
    return ModelConfig(
        vision=_vision(settings.section("vision_config")),
        projector=ProjectorConfig(kind="mlp"),
        language=language(text, kind="qwen2", tied=is_tied(settings, text)),
        image_token=settings.get("image_token_id", 151655),
    )


def _vision(tower: Settings) -> VisionConfig:
    """Return the vision tower of a VideoLlama3VisionConfig."""
    base = tower.section("rope_parameters").get("rope_theta", 10000.0)
    vision = siglip(tower, feature_layer=-1, post_norm=True)
    return replace(vision, position_embedding="rope2d", rotary_base=float(base))


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return whole_table(siglip_table(model.vision, prefixes.vision), model, prefixes, ("readout.0", "readout.2"))


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return tokens, and patches in row-major order; each patch is one feature."""
    import torch

    tokens, grids = batch.text.tokens, batch.image_sizes.grids
    if batch.images is None or not grids:
        return {"input_ids": tokens}
    return {
        "input_ids": tokens,
        "pixel_values": batch.images.patches,
        "image_grid_thw": torch.tensor([(1, *grid) for grid in grids], device=tokens.device),
        "image_merge_sizes": torch.ones(len(grids), dtype=torch.long, device=tokens.device),
    }


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. Raises UserError if its patch size is not the model's, or if it merges patches."""
    bounds = native_bounds(options, model)
    return NativeResolution(**bounds, start="", end="", placeholder=IMAGE, image_token=IMAGE, **shared)


FAMILY = Family(
    name="video_llama_3",
    model_types=("video_llama_3",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=(NamePrefixes("model.vision_model.", "model.projector.", "model.language_model."),),
    image_processors=(
        ProcessorReader(
            ("VideoLlama3",),
            {**HALF_PIXELS, "size": {"shortest_edge": 56**2, "longest_edge": 28**2 * 1280}},
            build_processor,
        ),
    ),
    image_text=IMAGE,
    chat_template=CHATML,
    unused=(r".*\.rotary_emb\.inv_freq", r".*\.rotary_pos_emb\.inv_freq"),
)
