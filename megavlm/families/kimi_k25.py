"""Kimi-K2.5 and K2.6: MoonViT, a 2×2 merger with its norm, and DeepSeek-V3 as language model, for images.

MoonViT is a ViT at native resolution with learned and rotary positions. It rotates neighbouring channels, and published
files have its queries, keys and values in one tensor. A model loaded by Transformers has a tensor of each, and rotates
the halves of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.arch.layers import VISION_NORM
from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.errors import UserError
from megavlm.families.shared.chat import NamedTemplate
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given
from megavlm.families.shared.language import experts, language, language_table
from megavlm.families.shared.qwen_vl import UNGATED
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import FusedQKV, Rename, Table, linear
from megavlm.families.shared.vision import blocks, kernel, mlp, norms, qkv, sizes
from megavlm.inputs.layout import Layout
from megavlm.inputs.processor import Processor, pasted
from megavlm.inputs.reader import HALF_PIXELS, OPTIONS, Json, ProcessorReader, has_only, require_model_value
from megavlm.inputs.resize import Pixels, Size
from megavlm.json_files import OBJECT, check, whole

IMAGE = "<|media_pad|>"
# The names of published files, those that Transformers 5.23 saves, and those of a model that it has loaded.
PUBLISHED = NamePrefixes("vision_tower.", "mm_projector.", "language_model.model.", "language_model.lm_head.weight")
SAVED = replace(PUBLISHED, projector="model.mm_projector.")
LOADED = NamePrefixes("model.vision_tower.", "model.mm_projector.", "model.language_model.", experts="stacked")
# Transformers' names of a tower's settings for those of published files.
_TOWER = {
    **{f"vt_{name}": name for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    **{f"init_{name}": name for name in ("pos_emb_height", "pos_emb_width")},
}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Kimi_K25Config, or of the config.json of published folders."""
    text, tower = settings.section("text_config"), settings.section("vision_config")
    text.require("model_type", "deepseek_v3", "kimi_k2", why="only DeepSeek-V3 is known here")
    text = Settings({**text.values, "model_type": "deepseek_v3"}, text.where)
    vision = moonvit(Settings({_TOWER.get(name, name): value for name, value in tower.values.items()}, tower.where))
    for section, name in ((settings, "projection_hidden_size"), (tower, "mm_hidden_size")):
        section.require(name, vision.hidden_size, why=f"the projector reads the tower's {vision.hidden_size}")
    tower.require("projector_hidden_act", "gelu", why="only GELU projectors are known here")
    tower.require("mm_projector_type", "patchmerger", why="only a norm of patches and an MLP are known here")
    side = tower.square("merge_kernel_size", 2)
    return ModelConfig(
        vision=vision,
        projector=ProjectorConfig(
            kind="mlp",
            hidden_size=vision.hidden_size * side**2,
            pixel_shuffle=side,
            input_norm=True,
            norm_before_merge=True,
            norm_epsilon=settings.get("projection_layer_norm_eps", tower.get("projector_ln_eps", 1e-5)),
        ),
        language=language(text, tied=settings.get("tie_word_embeddings", True)),
        experts=experts(text),
        image_token=settings.get("image_token_id", settings.get("media_placeholder_token_id", 163605)),
    )


def moonvit(tower: Settings) -> VisionConfig:
    """Return the vision tower of a Kimi_K25VisionConfig."""
    side = tower.get("pos_emb_height", 64)
    if tower.get("pos_emb_width", 64) != side:
        refuse(tower, "pos_emb_width", f"the table of positions must be square, {side} high and wide")
    found = sizes(tower, layers=27, width=1152, inner=4304, heads=16, image=1, patch=14)
    activation = tower.choice("hidden_act", UNGATED, "gelu_pytorch_tanh")
    return VisionConfig(
        **{**found, "image_size": side * found["patch_size"], "activation": activation},
        position_embedding="learned_rope2d",
        rotary_neighbours=True,
        rotary_base=float(tower.section("rope_parameters").get("rope_theta", 10000.0)),
        norm_epsilon=1e-5,
    )


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    saved, loaded = prefixes == SAVED, prefixes.vision == LOADED.vision
    first, second = ("in_proj", "out_proj") if loaded else ("proj.0", "proj.2")
    linears = prefixes.projector if loaded else PUBLISHED.projector
    return {
        **_vision_table(model.vision, prefixes.vision, saved=saved, loaded=loaded),
        **linear("projector.norm", f"{prefixes.projector}pre_norm", bias=True),
        **linear("projector.linear_fc1", f"{linears}{first}", bias=True),
        **linear("projector.linear_fc2", f"{linears}{second}", bias=True),
        **language_table(model, prefixes, layers="blocks" if saved else "layers"),
    }


def _vision_table(vision: VisionConfig, prefix: str, *, saved: bool, loaded: bool) -> Table:
    """Return the table of a tower whose file names begin with `prefix`, with the names of `SAVED` or `LOADED`."""
    side = vision.image_size // vision.patch_size
    encoder = prefix if loaded else f"{prefix}encoder."
    first, grid = f"{encoder if saved else prefix}patch_embed.proj", (side, side, vision.hidden_size)
    position = f"{prefix}patch_embed.pos_emb.{'position_embeddings' if loaded else 'weight'}"
    width = vision.hidden_size // vision.num_attention_heads
    in_halves = tuple(channel % 2 * (width // 2) + channel // 2 for channel in range(width))
    names: Table = {
        "patch_embed.proj.weight": Rename(f"{first}.weight", view=kernel(vision)),
        "patch_embed.proj.bias": Rename(f"{first}.bias"),
        "patch_embed.position": Rename(position, view=grid),
        **linear(VISION_NORM, f"{encoder}final_layernorm", bias=True),
    }
    for layer, hf_layer in blocks(vision, f"{encoder}{'layers' if loaded else 'blocks'}."):
        attention = f"{layer}self_attention.linear_"
        if loaded:
            names |= qkv(f"{attention}qkv", f"{hf_layer}attn.{{}}_proj", vision, bias=True, order=in_halves)
        else:
            for leaf in ("weight", "bias"):
                names[f"{attention}qkv.{leaf}"] = FusedQKV(f"{hf_layer}wqkv.{leaf}", heads=vision.num_attention_heads)
        names |= linear(f"{attention}proj", f"{hf_layer}{'attn.proj' if loaded else 'wo'}", bias=True)
        one, two = (1, 2) if loaded else (0, 1)
        names |= norms(vision, layer, f"{hf_layer}norm{one}", f"{hf_layer}norm{two}")
        names |= mlp(layer, hf_layer, (f"fc{one}", f"fc{two}"))
    return names


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return tokens, and patches in row-major order."""
    import torch

    tokens, grids, vision = batch.text.tokens, batch.image_sizes.grids, model.vision
    if batch.images is None or not grids:
        return {"input_ids": tokens}
    return {
        "input_ids": tokens,
        "pixel_values": batch.images.patches.unflatten(1, (vision.in_channels, vision.patch_size, vision.patch_size)),
        "image_grid_thw": torch.tensor([(1, *grid) for grid in grids], device=tokens.device),
    }


@dataclass(frozen=True, kw_only=True)
class Padded(Processor):
    """Shrinks an image to bounds of patches, in total and on a side, and pads it with black to whole features."""

    most: int  # patches of an image
    most_of_side: int

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(*self._padded(self._shrunk((height, width))))
        return Layout((height, width), (tile,), (0, 0), self._one_run(tokens_per_grid(tile.grid, self.projector)))

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        size = self._shrunk(pixels.shape[:2])
        return [pasted(self._resize(pixels, *size), self._padded(size), at=(0, 0))]

    def _shrunk(self, size: Size) -> Size:
        longest = self.most_of_side * self.patch_size
        count = math.prod(max(1, side // self.patch_size) for side in size)
        scale = min(1.0, math.sqrt(self.most / count), *(longest / side for side in size))
        height, width = (min(max(1, int(side * scale)), longest) for side in size)
        return height, width

    def _padded(self, size: Size) -> Size:
        factor = self.patch_size * self.projector.pixel_shuffle
        return -(-size[0] // factor) * factor, -(-size[1] // factor) * factor


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor. Raises UserError for a patch or merge size other than the model's.

    Published folders have the options in `media_proc_cfg`, some of them under other names.
    """
    names = {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}
    nested = options.get("media_proc_cfg", {}).items()
    given = {names.get(name, name): value for name, value in nested if value is not None}
    check(given, {**OPTIONS, **_RANGES}, "preprocessor_config.json: media_proc_cfg")
    options = {**options, **given}
    if "fixed_output_tokens" in options:
        raise UserError("fixed_output_tokens in preprocessor_config.json is not supported: remove it")
    require_model_value(options, "patch_size", model.vision.patch_size)
    require_model_value(options, "merge_size", model.projector.pixel_shuffle)
    if not has_only(options["size"], "max_height", "max_width") or len({*options["size"].values()}) > 1:
        raise UserError("size in preprocessor_config.json must give max_height and max_width, equal numbers of patches")
    return Padded(
        **{**shared, "mean": tuple(options["image_mean"]), "std": tuple(options["image_std"])},
        most=options["max_patches"],
        most_of_side=options.get("patch_limit_on_one_side", options["size"]["max_height"]),
        placeholder=IMAGE,
        image_token=IMAGE,
    )


_RANGES = {
    "max_patches": whole(1, 2**20),
    "patch_limit_on_one_side": whole(1, 2**14),
    "media_proc_cfg": OBJECT,
}
CHAT = NamedTemplate(
    "kimi",
    """\
{% for message in messages %}\
{{ '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}\
{% if message.role == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ message.content + '<|im_end|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|><think></think>' }}{% endif %}""",
    needs=("<|im_user|>", "<|im_middle|>", "<|im_end|>"),
)

FAMILY = Family(
    name="kimi_k25",
    model_types=("kimi_k25",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=(PUBLISHED, SAVED, LOADED),
    image_processors=(
        ProcessorReader(
            ("Kimi_K25", "KimiK25VisionProcessor"),
            {
                **HALF_PIXELS,
                **{"size": {"max_height": 512, "max_width": 512}, "max_patches": 16384},
                **{"patch_size": 14, "merge_size": 2},
            },
            build_processor,
            ranges=_RANGES,
        ),
    ),
    image_text=IMAGE,
    chat_template=CHAT,
    not_in_peft=("gate_proj", "up_proj", "down_proj"),
)
