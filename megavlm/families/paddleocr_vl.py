"""PaddleOCR-VL: SigLIP for any grid with learned and rotary positions, a 2×2 merger with a norm, ERNIE-4.5 with M-RoPE.

The merger's norm applies to single patches, which the tower has already normalised. It is part of the projector.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.families.llava import whole_table
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given
from megavlm.families.shared.qwen_vl import NativeResolution, native_bounds, text_model, with_defaults
from megavlm.families.shared.settings import Settings
from megavlm.families.shared.table import Table, linear
from megavlm.families.shared.vision import siglip, siglip_table
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import CLIP_PIXELS, Json, ProcessorReader
from megavlm.inputs.resize import Size

IMAGE, START, END = "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"
_TEXT: dict[str, Any] = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
_VISION: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a PaddleOCRVLConfig.

    Published folders have the text's settings at the top level. Transformers ties their embeddings unless the output
    layer differs, as it does where tie_word_embeddings is false.
    """
    nested = "text_config" in settings.values
    text = with_defaults(settings.section("text_config") if nested else settings, _TEXT)
    text.require("use_bias", False, why="biases in ERNIE are not known here")
    tied = settings.get("tie_word_embeddings", True) or (nested and text.get("tie_word_embeddings", True))
    tower = with_defaults(settings.section("vision_config"), _VISION)
    side = tower.get("spatial_merge_size", 2)
    return ModelConfig(
        vision=_vision(tower),
        projector=ProjectorConfig(
            kind="mlp",
            hidden_size=tower.need("hidden_size") * side**2,
            pixel_shuffle=side,
            input_norm=True,
            norm_before_merge=True,
        ),
        language=text_model(text, kind="llama", tied=tied, section=(16, 24, 24), interleaved=False),
        image_token=settings.get("image_token_id", 100295),
    )


def _vision(tower: Settings) -> VisionConfig:
    """Return the vision tower of a PaddleOCRVisionConfig."""
    return replace(
        siglip(tower, feature_layer=-1, post_norm=True),
        position_embedding="learned_rope2d",
        position_interpolation="bilinear_unaligned",
        rotary_base=float(tower.section("rope_parameters").get("rope_theta", 10000.0)),
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return {
        **whole_table(siglip_table(model.vision, prefixes.vision), model, prefixes),
        **linear("projector.norm", f"{prefixes.projector}pre_norm", bias=True),
    }


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return tokens, token types (1: image), and patches in row-major order."""
    import torch

    tokens, grids, vision = batch.text.tokens, batch.image_sizes.grids, model.vision
    if batch.images is None or not grids:
        return {"input_ids": tokens}
    return {
        "input_ids": tokens,
        "mm_token_type_ids": tokens.eq(model.image_token or 0).int(),
        "pixel_values": batch.images.patches.unflatten(1, (vision.in_channels, vision.patch_size, vision.patch_size)),
        "image_grid_thw": torch.tensor([(1, *grid) for grid in grids], device=tokens.device),
    }


@dataclass(frozen=True, kw_only=True)
class Enlarged(NativeResolution):
    """Enlarges an image that is smaller than a feature, first by its height, then by its width, before resizing it."""

    start: str = START
    end: str = END

    def _resized(self, size: Size) -> Size:
        (height, width), factor = size, self.patch_size * self.projector.pixel_shuffle
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        return super()._resized((height, width))


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    return Enlarged(**native_bounds(options, model), placeholder=START + IMAGE + END, image_token=IMAGE, **shared)


FAMILY = Family(
    name="paddleocr_vl",
    model_types=("paddleocr_vl",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=(
        NamePrefixes("visual.vision_model.", "mlp_AR.", "model."),
        NamePrefixes("model.visual.vision_model.", "model.projector.", "model.language_model."),
    ),
    image_processors=(
        ProcessorReader(
            ("PaddleOCRVL",),
            {**CLIP_PIXELS, "size": {"shortest_edge": 384**2, "longest_edge": 1536**2}},
            build_processor,
        ),
    ),
    image_text=IMAGE,
    chat_template=template("paddleocr_vl", "<|begin_of_sentence|>"),
    # SigLIP's pooling head and a table of positions, neither of which affects the features.
    unused=(r".*\.vision_model\.head\..*", r".*\.packing_position_embedding\..*", r".*\.position_ids"),
)
