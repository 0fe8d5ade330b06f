"""Pixtral (a LLaVA with a Pixtral tower): RMSNorm, SwiGLU and 2-D rotary embeddings, any image size, Mistral."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.errors import UserError
from megavlm.families import llava
from megavlm.families.shared.chat import MISTRAL
from megavlm.families.shared.family import Family, NamePrefixes, llava_prefixes
from megavlm.families.shared.inputs import Batch, Given, unpatchify
from megavlm.families.shared.language import is_tied, language
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import Rename, Table, gated, linear
from megavlm.families.shared.vision import blocks, kernel, norms, qkv, sizes
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import CLIP_PIXELS, Json, ProcessorReader, has_only
from megavlm.inputs.resize import Pixels, Size

IMAGE = "[IMG]"


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a LlavaConfig with a PixtralVisionConfig."""
    text, tower = settings.section("text_config"), settings.section("vision_config")
    settings.require("vision_feature_layer", -1, why="only features of the last layer are known here")
    settings.require("vision_feature_select_strategy", "full", why="Pixtral has no class token to drop")
    settings.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    return ModelConfig(
        vision=vision(tower),
        projector=ProjectorConfig(kind="mlp", bias=settings.get("multimodal_projector_bias", True)),
        language=language(text, kind=text.get("model_type", "mistral"), tied=is_tied(settings, text)),
        image_token=settings.get("image_token_index", settings.get("image_token_id", 32000)),
    )


def vision(tower: Settings) -> VisionConfig:
    """Return the vision tower of a PixtralVisionConfig."""
    if tower.get("hidden_act", "gelu") != "silu":
        refuse(tower, "hidden_act", "only SwiGLU (silu) is known here")
    rope = tower.section("rope_parameters")
    return VisionConfig(
        **sizes(tower, layers=24, width=1024, inner=4096, heads=16, image=1024, patch=16),
        position_embedding="rope2d",
        rotary_interleaved=True,
        rotary_base=float(rope.get("rope_theta", tower.get("rope_theta", 10000.0))),
        normalization="RMSNorm",
        norm_epsilon=1e-5,
        activation="swiglu",
        add_bias_linear=False,
        add_qkv_bias=False,
        patch_bias=False,
        pre_norm=True,
        post_norm=False,
    )


def vision_table(vision: VisionConfig, prefix: str) -> Table:
    """Return the table of a PixtralVisionModel whose file names begin with `prefix`."""
    table: Table = {"patch_embed.proj.weight": Rename(f"{prefix}patch_conv.weight", view=kernel(vision))}
    table |= linear("patch_embed.norm", f"{prefix}ln_pre", bias=False)
    for layer, hf_layer in blocks(vision, f"{prefix}transformer.layers."):
        table |= qkv(f"{layer}self_attention.linear_qkv", f"{hf_layer}attention.{{}}_proj", vision, bias=False)
        table |= linear(f"{layer}self_attention.linear_proj", f"{hf_layer}attention.o_proj", bias=False)
        table |= norms(vision, layer, f"{hf_layer}attention_norm", f"{hf_layer}ffn_norm")
        table |= gated(f"{layer}mlp", f"{hf_layer}feed_forward", bias=False)
    return table


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    return llava.whole_table(vision_table(model.vision, prefixes.vision), model, prefixes)


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return the model's inputs. Images are padded at the right and bottom to one size, as Transformers does."""
    import torch
    from torch.nn.functional import pad

    images = unpatchify(batch, model.vision)
    if not images:
        return {"input_ids": batch.text.tokens}
    sizes = [image.shape[-2:] for image in images]
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    padded = [pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2])) for image in images]
    return {
        "input_ids": batch.text.tokens,
        "pixel_values": torch.stack(padded),
        "image_sizes": torch.tensor(sizes, device=batch.text.tokens.device),
    }


@dataclass(frozen=True, kw_only=True)
class RowsOfFeatures(Processor):
    """Shrinks an image to at most `edge` pixels a side, rounded up to whole features; a marker ends each row."""

    edge: int
    row_end: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"

    @property
    def factor(self) -> int:
        """Return the side of a feature in pixels; sides of resized images are multiples of it."""
        return self.patch_size * self.projector.pixel_shuffle

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(*self._resized((height, width)))
        rows, columns = (patches // self.projector.pixel_shuffle for patches in tile.grid)
        texts = ("", *(self.row_end,) * (rows - 1), self.end)
        return Layout((height, width), (tile,), (0, 0), Prompt(self.image_token, texts, (columns,) * rows))

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        return [self._resize(pixels, *self._resized((pixels.shape[0], pixels.shape[1])))]

    def _resized(self, size: Size) -> Size:
        """Return the resized (height, width), multiples of `factor`. Raises BadSample if a side shrinks to zero."""
        ratio = max(size[0] / self.edge, size[1] / self.edge, 1)
        height, width = (int(side / ratio) for side in size)
        if not height or not width:
            raise BadSample(Reason.TOO_NARROW, f"{size[0]}×{size[1]} pixels would shrink to {height}×{width}")
        return -(-height // self.factor) * self.factor, -(-width // self.factor) * self.factor


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor with the file's size and the model's patch size, as in Transformers."""
    size = options["size"]
    if not has_only(size, "longest_edge"):
        raise UserError("size in preprocessor_config.json must give longest_edge, and nothing else")
    return RowsOfFeatures(edge=size["longest_edge"], placeholder=IMAGE, image_token=IMAGE, **shared)


PROCESSOR = ProcessorReader(("Pixtral",), {**CLIP_PIXELS, "size": {"longest_edge": 1024}}, build_processor)

FAMILY = Family(
    name="pixtral",
    model_types=("llava/pixtral",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=llava_prefixes("vision_tower."),
    unused=(r".*\.rotary_emb\.inv_freq", r".*\.patch_positional_embedding\.inv_freq"),
    image_processors=(PROCESSOR,),
    image_text=IMAGE,
    chat_template=MISTRAL,
)
