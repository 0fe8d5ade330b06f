"""Code that the Qwen-VL families share: tower attention, M-RoPE, the merger, the image processor and `inputs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.errors import UserError
from megavlm.families.shared.experts import ExpertFiles
from megavlm.families.shared.family import NamePrefixes
from megavlm.families.shared.inputs import Batch, Given, feature_kinds, in_blocks
from megavlm.families.shared.language import language
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import FusedQKV, Rename, Table, linear
from megavlm.families.shared.vision import ACTIVATIONS, norms
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import CLIP_PIXELS, Json, ProcessorReader, has_only, require_model_value
from megavlm.inputs.resize import Pixels, Size, smart_resize

if TYPE_CHECKING:
    from torch import Tensor

IMAGE = "<|image_pad|>"
PREFIXES = (
    NamePrefixes(vision="model.visual.", language="model.language_model."),
    NamePrefixes(vision="visual.", language="model."),
)


def with_experts(*ways: ExpertFiles) -> tuple[NamePrefixes, ...]:
    """Return one set of name prefixes for each way in which files store experts."""
    return tuple(replace(PREFIXES[0], experts=way) for way in ways)


UNGATED = {hf_name: name for hf_name, name in ACTIVATIONS.items() if name != "swiglu"}


def with_defaults(settings: Settings, defaults: Mapping[str, Any]) -> Settings:
    """Return a section in which `defaults` of its configuration class replace absent and null settings."""
    given = {name: value for name, value in settings.values.items() if value is not None}
    return Settings({**defaults, **given}, settings.where)


def model_config(
    settings: Settings,
    *,
    tower: Settings,
    vision: VisionConfig,
    text: LanguageConfig,
    steps_per_second: float | None = None,
) -> ModelConfig:
    """Return the `ModelConfig` of a vision tower and a language model; `tower` is the tower's section of config.json.

    `steps_per_second`: position steps per second of video; None: one step for each group of frames.
    """
    return ModelConfig(
        vision=vision,
        projector=merger(tower, text),
        language=text,
        image_token=settings.get("image_token_id", 151655),
        video_token=settings.get("video_token_id", 151656),
        video_steps_per_second=steps_per_second,
    )


def text_model(
    settings: Settings, *, kind: str, tied: bool, section: tuple[int, ...], interleaved: bool
) -> LanguageConfig:
    """Return a language model of type `kind` with M-RoPE: channel pairs rotate with time, height or width.

    `section` is the architecture's default for mrope_section.
    """
    rope = {**settings.get("rope_scaling", {}), **settings.get("rope_parameters", {})}
    return replace(
        language(settings, kind=kind, tied=tied),
        mrope_section=tuple(rope.get("mrope_section", section)),
        mrope_interleaved=interleaved,
    )


def vision_sizes(tower: Settings) -> dict[str, Any]:
    """Return the sizes, rotary base and norm epsilon of a tower; all Qwen-VL and GLM-V towers name them the same."""
    return {
        "num_layers": tower.need("depth"),
        "hidden_size": tower.need("hidden_size"),
        "ffn_hidden_size": tower.need("intermediate_size"),
        "num_attention_heads": tower.need("num_heads"),
        "patch_size": tower.square("patch_size", 14),
        "temporal_patch_size": tower.square("temporal_patch_size", 2),
        "in_channels": tower.get("in_channels", 3),
        "rotary_base": float(tower.section("rope_parameters").get("rope_theta", 10000.0)),
        "norm_epsilon": 1e-6,
    }


def merger(tower: Settings, text: LanguageConfig) -> ProjectorConfig:
    """Return the merger: N×N patches concatenated, an inner layer of that width, an output of the text's width.

    Its norm is `vision.norm`. Raises UserError if the tower's output width is not the text's width.
    """
    if tower.need("out_hidden_size") != text.hidden_size:
        refuse(tower, "out_hidden_size", f"features must be as wide as the language model, {text.hidden_size}")
    side = tower.get("spatial_merge_size", 2)
    return ProjectorConfig(kind="mlp", hidden_size=tower.need("hidden_size") * side**2, pixel_shuffle=side)


def patch_embed_table(vision: VisionConfig, prefix: str) -> Table:
    """Return the table of the patch convolution over time, height and width; its weight is flattened here."""
    side = vision.patch_size
    view = (vision.hidden_size, vision.in_channels, vision.temporal_patch_size, side, side)
    return {
        f"patch_embed.proj.{leaf}": Rename(f"{prefix}patch_embed.proj.{leaf}", view=view if leaf == "weight" else None)
        for leaf in (("weight", "bias") if vision.patch_bias else ("weight",))
    }


def attention_table(vision: VisionConfig, layer: str, hf_layer: str) -> Table:
    """Return the table of the norms and the attention of one vision layer; each family adds the table of its MLP."""
    table: Table = {
        f"{layer}self_attention.linear_qkv.{leaf}": FusedQKV(
            f"{hf_layer}attn.qkv.{leaf}", heads=vision.num_attention_heads, groups=vision.num_query_groups
        )
        for leaf in (("weight", "bias") if vision.add_qkv_bias else ("weight",))
    }
    table |= linear(f"{layer}self_attention.linear_proj", f"{hf_layer}attn.proj", bias=vision.add_bias_linear)
    return table | norms(vision, layer, f"{hf_layer}norm1", f"{hf_layer}norm2")


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return tokens, token types (image or video), and patches in block order, with stills repeated over time.

    Batches with videos also get position_ids, because the model would otherwise need the seconds between groups.
    """
    tokens, vision = batch.text.tokens, model.vision
    if not batch.image_sizes.grids:
        return {"input_ids": tokens}
    patches = in_blocks(batch, model.projector.pixel_shuffle)
    patches = patches.unflatten(1, (vision.in_channels, -1, vision.patch_size**2))
    patches = patches.expand(-1, -1, vision.temporal_patch_size, -1).flatten(1)
    given, kinds = of_kinds(batch, model, patches)
    given |= {"input_ids": tokens, "mm_token_type_ids": kinds}
    if "video_grid_thw" in given:
        given["position_ids"] = batch.text.positions.expand(3, *tokens.shape)
    return given


def of_kinds(batch: Batch, model: ModelConfig, patches: Tensor) -> tuple[Given, Tensor]:
    """Return the patches and grids of images and of videos, apart, and the kind of each token (`feature_kinds`)."""
    import torch

    kinds, kind_of_grid = feature_kinds(batch, model)
    grids, device = batch.image_sizes.grids, patches.device
    counts = torch.tensor([rows * columns for rows, columns in grids], device=device)
    kind_of_patch = kind_of_grid.repeat_interleave(counts)
    given: Given = {}
    for kind, pixels, thw in ((1, "pixel_values", "image_grid_thw"), (2, "pixel_values_videos", "video_grid_thw")):
        seen = [(1, *grid) for grid, its_kind in zip(grids, kind_of_grid.tolist(), strict=True) if its_kind == kind]
        if seen:
            given |= {pixels: patches[kind_of_patch == kind], thw: torch.tensor(seen, device=device)}
    return given, kinds


@dataclass(frozen=True, kw_only=True)
class NativeResolution(Processor):
    """Resizes an image to nearby sides that are multiples of a feature. Patches stay row-major and single-frame."""

    min_pixels: int
    max_pixels: int
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(*self._resized((height, width)))
        prompt = Prompt(self.image_token, (self.start, self.end), (tokens_per_grid(tile.grid, self.projector),))
        return Layout((height, width), (tile,), (0, 0), prompt)

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        return [self._resize(pixels, *self._resized(pixels.shape[:2]))]

    def _resized(self, size: Size) -> Size:
        factor = self.patch_size * self.projector.pixel_shuffle
        return smart_resize(size, factor=factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)


def native_bounds(options: Json, model: ModelConfig, *, file: str = "preprocessor_config.json") -> dict[str, Any]:
    """Return the pixel bounds of a processor's file. Raises UserError if its patch or merge size is not the model's.

    Files from before Transformers 4.50 repeat the bounds in `size`, under their own names.
    """
    require_model_value(options, "patch_size", model.vision.patch_size)
    require_model_value(options, "merge_size", model.projector.pixel_shuffle)
    size, edges = options["size"], {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    bounds = {name: options[name] for name in edges if name in options}
    if not has_only(size, *edges.values()) and not (has_only(size, *edges) and len(bounds) == 2):
        raise UserError(f"size in {file} must give shortest_edge and longest_edge, as areas in pixels")
    return {name: size[edge] for name, edge in edges.items() if edge in size} | bounds


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    placeholder = f"<|vision_start|>{IMAGE}<|vision_end|>"
    return NativeResolution(**native_bounds(options, model), placeholder=placeholder, image_token=IMAGE, **shared)


PROCESSOR = ProcessorReader(
    ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL"),
    {**CLIP_PIXELS, "size": {"shortest_edge": 56**2, "longest_edge": 28**2 * 1280}},
    build_processor,
)
