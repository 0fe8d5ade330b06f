"""Gemma 4 (31B and 26B-A4B): a tower with 2-D positions, pooled patches, and layers of two kinds in the language model.

Layers without a sliding window have wider and fewer key heads, whose keys serve as values. In the other layers alone,
tokens of an image attend to one another in both directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.families.shared.chat import template
from megavlm.families.shared.experts import gemma_experts
from megavlm.families.shared.family import Family, NamePrefixes
from megavlm.families.shared.inputs import Batch, Given, feature_kinds
from megavlm.families.shared.language import language_table, types_of_layers
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.table import ChannelsLast, Concat, Rename, Table, linear
from megavlm.families.shared.vision import blocks, norms, qkv
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.layout import Layout, Prompt
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import Json, ProcessorReader, VideoReader, require_model_value
from megavlm.inputs.resize import Pixels, Size
from megavlm.inputs.video import Budget, Clip, VideoProcessor, first_of_parts, taken

IMAGE, VIDEO, START, END = "<|image|>", "<|video|>", "<|image>", "<image|>"


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of a Gemma4Config."""
    if settings.values.get("audio_config") is not None:
        refuse(settings, "audio_config", "Gemma 4 E2B and E4B, which take audio, are not known here")
    if settings.values.get("vision_config") is None:
        refuse(settings, "vision_config", "a model without images is not known here")
    tower = settings.section("vision_config")
    vision, side = tower_of(tower), tower.get("pooling_kernel_size", 3)
    standardize = tower.get("standardize", False)
    return ModelConfig(
        vision=vision,
        projector=ProjectorConfig(
            kind="linear",
            pixel_shuffle=side,
            merge="standardized_average" if standardize else "average",
            input_norm=True,
            normalization="UnitRMSNorm",
            # Transformers multiplies features x by √H first: √H·x / √(H·mean(x²) + ε) = x / √(mean(x²) + ε/H).
            norm_epsilon=vision.norm_epsilon / (1 if standardize else vision.hidden_size),
            bias=False,
        ),
        language=language(settings.section("text_config"), tied=settings.get("tie_word_embeddings", True)),
        experts=gemma_experts(settings.section("text_config")),
        image_token=settings.get("image_token_id", 258880),
        video_token=settings.get("video_token_id", 258884),
    )


def tower_of(tower: Settings) -> VisionConfig:
    """Return the options of the vision encoder that a Gemma4VisionConfig describes."""
    tower.require("hidden_activation", "gelu_pytorch_tanh", why="only GeGLU towers are known here")
    tower.require("attention_bias", False, why="biases in the tower are not known here")
    tower.require("use_clipped_linears", False, why="clipped layers, those of E2B and E4B, are not known here")
    width, heads = tower.get("hidden_size", 768), tower.get("num_attention_heads", 12)
    tower.require("num_key_value_heads", heads, why="each head of the tower has a key of its own here")
    tower.require("head_dim", width // heads, why="heads are known that are hidden_size wide together")
    patch, side = tower.square("patch_size", 16), tower.get("pooling_kernel_size", 3)
    positions = tower.get("position_embedding_size", 10240)
    return VisionConfig(
        num_layers=tower.get("num_hidden_layers", 16),
        hidden_size=width,
        ffn_hidden_size=tower.get("intermediate_size", 3072),
        num_attention_heads=heads,
        image_size=min(16, positions // side) * side * patch,  # typical: about the image processor's 280 features
        patch_size=patch,
        position_embedding="axes_rope2d",
        axis_positions=positions,
        rotary_base=float(tower.section("rope_parameters").get("rope_theta", 100.0)),
        normalization="RMSNorm",
        norm_epsilon=tower.get("rms_norm_eps", 1e-6),
        activation="geglu",
        softmax_scale=1.0,
        add_bias_linear=False,
        add_qkv_bias=False,
        qk_norm="head_and_values",
        post_norms=True,
        patch_bias=False,
        post_norm=False,
    )


def language(text: Settings, *, tied: bool) -> LanguageConfig:
    """Return the language model of a Gemma4TextConfig."""
    text.require("hidden_activation", "gelu_pytorch_tanh", why="only GeGLU language models are known here")
    text.require("attention_bias", False, why="biases in attention are not known here")
    text.require("num_kv_shared_layers", 0, why="layers without keys of their own, those of E2B and E4B, are not known")
    if text.get("hidden_size_per_layer_input", 256):
        refuse(text, "hidden_size_per_layer_input", "embeddings for each layer (E2B and E4B) are not known here")
    both_ways = text.get("use_bidirectional_attention", False)
    if both_ways not in (False, "vision"):
        refuse(text, "use_bidirectional_attention", "text that attends to later text is not known here")
    layers, width = text.get("num_hidden_layers", 30), text.get("hidden_size", 2304)
    pattern = ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(layers)]
    full = types_of_layers(text, pattern, "full_attention", "sliding_attention")
    full = tuple(sorted({*full, layers - 1}))  # the last layer is one whatever its type, as in Transformers
    rope = text.section("rope_parameters")
    everywhere, local = rope.section("full_attention"), rope.section("sliding_attention")
    if local.get("rope_type", "default") != "default" or everywhere.get("rope_type", "proportional") != "proportional":
        refuse(text, "rope_parameters", "known are default for sliding_attention and proportional for full_attention")
    everywhere.require("factor", 1.0, why="scaled frequencies are not known here")
    shared, groups = text.get("attention_k_eq_v", False), text.get("num_key_value_heads", 4)
    heads = _of_full_layers(text, full)
    return LanguageConfig(
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=text.get("intermediate_size", 9216),
        num_attention_heads=text.get("num_attention_heads", 8),
        num_query_groups=groups,
        kv_channels=text.get("head_dim", 256),
        global_kv_channels=heads.get("head_dim", 512),
        global_query_groups=heads.get("num_key_value_heads", groups),
        keys_as_values=shared,
        vocab_size=text.get("vocab_size", 262144),
        max_positions=text.get("max_position_embeddings", 131072),
        rotary_base=float(everywhere.get("rope_theta", 1e6)),
        rope_scaling="proportional",
        rotary_percent=everywhere.get("partial_rotary_factor", 0.25 if not everywhere.values else 1.0),
        local_rotary_base=float(local.get("rope_theta", 1e4)),
        norm_epsilon=text.get("rms_norm_eps", 1e-6),
        qk_norm=True,
        value_norm=True,
        post_norms=True,
        layer_scalar=True,
        activation="geglu",
        softmax_scale=1.0,
        final_softcap=text.get("final_logit_softcapping", None),
        embedding_scale=width**0.5,
        window_size=text.get("sliding_window", 512),
        full_attention_layers=full,
        bidirectional_windows=both_ways == "vision",
        tie_embeddings=tied,
    )


def _of_full_layers(text: Settings, full: tuple[int, ...]) -> Settings:
    """Return the settings of heads in layers of full attention; Transformers 5.23 writes them layer by layer."""
    if not text.get("per_layer_config", {}):
        names = {"head_dim": "global_head_dim"}
        if text.get("attention_k_eq_v", False):
            names["num_key_value_heads"] = "num_global_key_value_heads"
        return Settings({name: text.get(given, None) for name, given in names.items()}, text.where)
    layers = text.section("per_layer_config")
    found = layers.section(str(full[0])) if full else Settings({}, text.where)
    if layers.values != {str(number): found.values for number in full}:
        refuse(text, "per_layer_config", "heads are known that are alike in all layers of full_attention")
    return found


def table(model: ModelConfig, prefixes: NamePrefixes) -> Table:
    """Return a rule for each tensor of the model. The tower's tensors hold the numbers that standardize features."""
    vision, projector, tower = model.vision, prefixes.projector, prefixes.vision
    found: Table = {
        "patch_embed.proj.weight": ChannelsLast(f"{tower}patch_embedder.input_proj.weight", vision.in_channels),
        "patch_embed.position": Rename(f"{tower}patch_embedder.position_embedding_table"),
    }
    for layer, stored in blocks(vision, f"{tower}encoder.layers."):
        attention, mlp = f"{layer}self_attention.", f"{stored}mlp."
        found |= qkv(f"{attention}linear_qkv", f"{stored}self_attn.{{}}_proj.linear", vision, bias=False)
        found |= linear(f"{attention}linear_proj", f"{stored}self_attn.o_proj.linear", bias=False)
        for name in "qk":
            found |= linear(f"{attention}{name}_layernorm", f"{stored}self_attn.{name}_norm", bias=False)
        found |= norms(vision, layer, f"{stored}input_layernorm", f"{stored}pre_feedforward_layernorm")
        found |= linear(f"{layer}self_attn_bda.norm", f"{stored}post_attention_layernorm", bias=False)
        found |= linear(f"{layer}mlp_bda.norm", f"{stored}post_feedforward_layernorm", bias=False)
        gate_and_up = Concat((f"{mlp}gate_proj.linear.weight", f"{mlp}up_proj.linear.weight"))
        found |= {f"{layer}mlp.linear_fc1.weight": gate_and_up}
        found |= linear(f"{layer}mlp.linear_fc2", f"{mlp}down_proj.linear", bias=False)
    if model.projector.merge == "standardized_average":
        found |= {f"projector.{name}": Rename(f"{tower}{name}") for name in ("std_scale", "std_bias")}
    found |= linear("projector.linear_fc1", f"{projector}embedding_projection", bias=False)
    return found | language_table(model, prefixes)


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return tokens, token types (1: image, 2: video), and the pixels of images and of frames, from 0 to 1, with the
    columns and rows of patches.

    A pixel has its channels last. Images are padded to one number of patches, at columns and rows −1.
    """
    import torch
    from torch.nn.functional import pad
    from torch.nn.utils.rnn import pad_sequence

    tokens, grids = batch.text.tokens, batch.image_sizes.grids
    if batch.images is None or not grids:
        return {"input_ids": tokens}
    kinds, kind_of_grid = feature_kinds(batch, model)
    given = {"input_ids": tokens, "mm_token_type_ids": kinds}
    patches = batch.images.patches.unflatten(1, (model.vision.in_channels, -1)).mT.flatten(1)
    if not model.vision.encoder_free:  # whose pixels are from 0 to 1 here, too
        patches = patches / 2 + 0.5
    pixels = pad_sequence([*patches.split([rows * columns for rows, columns in grids])], batch_first=True)
    places = [torch.cartesian_prod(*map(torch.arange, grid)).view(-1, 2).flip(1) for grid in grids]
    padded = torch.stack([pad(place, (0, 0, 0, pixels.shape[1] - len(place)), value=-1) for place in places])
    for kind, name, of_places in ((1, "pixel_values", "image"), (2, "pixel_values_videos", "video")):
        chosen = kind_of_grid == kind
        if chosen.any():
            given |= {name: pixels[chosen], f"{of_places}_position_ids": padded.to(tokens.device)[chosen]}
            if kind == 2:  # as if each frame were a video
                given["num_frames_per_video"] = torch.ones_like(kind_of_grid[chosen])
    return given


@dataclass(frozen=True, kw_only=True)
class Budgeted(Processor):
    """Resizes an image to the most whole features, up to `most`, at about its aspect ratio, and marks both ends."""

    most: int
    positions: int  # learned columns and rows of the tower
    start: str = START
    end: str = END

    def layout(self, height: int, width: int, *, images: int = 1) -> Layout:
        tile = self._tile(*self._resized((height, width)))
        if max(tile.grid) > self.positions:
            raise BadSample(
                Reason.TOO_LARGE, f"{max(tile.grid)} patches a side, and the model has {self.positions} positions"
            )
        features = math.prod(tile.grid) // self.projector.pixel_shuffle**2
        return Layout((height, width), (tile,), (0, 0), Prompt(self.image_token, (self.start, self.end), (features,)))

    def views(self, pixels: Pixels, *, images: int = 1) -> list[Pixels]:
        return [self._resize(pixels, *self._resized((pixels.shape[0], pixels.shape[1])))]

    def _resized(self, size: Size) -> Size:
        return budgeted(size, self.most, self.patch_size * self.projector.pixel_shuffle)


def budgeted(size: Size, most: int, unit: int) -> Size:
    """Return the resized (height, width) of at most `most` features of `unit` pixels a side: both sides are rounded
    down to whole features, but a side of none to one.

    Raises BadSample if both sides have none.
    """
    height, width = size
    factor = math.sqrt(most * unit**2 / (height * width))
    rows, columns = (math.floor(factor * side / unit) for side in size)
    if not rows and not columns:
        raise BadSample(Reason.TOO_NARROW, f"{height}×{width} pixels would shrink to nothing")
    if not rows:
        rows, columns = 1, min(width // height, most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    return rows * unit, columns * unit


@dataclass(frozen=True, kw_only=True)
class BudgetedFrames(VideoProcessor):
    """Resizes frames like images, to fewer features, and writes minutes and seconds before each frame."""

    most: int
    number: int  # the video token

    def numbers(self, clip: Clip, budget: Budget) -> tuple[int, ...]:
        return taken(clip, budget, first_of_parts)

    def frame_size(self, size: Size, frames: int, budget: Budget) -> Size:
        groups, tokens = self.groups(frames), budget.max_tokens
        most = self.most if tokens is None else min(self.most, max(tokens // groups, 1))
        return self._fitted(size, most, self.patch_size * self.projector.pixel_shuffle)

    def _fitted(self, size: Size, most: int, unit: int) -> Size:
        return budgeted(size, most, unit)

    def most_groups(self, tokens: int) -> int:
        return tokens // self.most

    def prompt(self, clip: Clip, numbers: tuple[int, ...], tokens: int) -> Prompt:
        seconds = [int(clip.seconds(number)) for number in numbers]
        marks = [f"{second // 60:02d}:{second % 60:02d} {START}" for second in seconds]
        texts = (marks[0], *(f"{END} {mark}" for mark in marks[1:]), END)
        return Prompt(self.text, texts, (tokens,) * len(numbers), self.number)


def build_processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    """Return the image processor."""
    positions = model.vision.axis_positions
    return Budgeted(**_fields(options, model, shared), positions=positions, placeholder=IMAGE, image_token=IMAGE)


def build_video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor | None:
    """Return the video processor; None for a model without a video token."""
    if model.video_token is None:
        return None
    return BudgetedFrames(**_fields(options, model, shared), text=VIDEO, number=model.video_token)


def _fields(options: Json, model: ModelConfig, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of both processors. A tower maps pixels from [0, 1] to [−1, 1], after any normalization.

    Raises UserError if patches and features are not the model's.
    """
    side, most = options["pooling_kernel_size"], {"most": options["max_soft_tokens"]}
    if model.vision.encoder_free:
        require_model_value({"patch_size": options["patch_size"] * side}, "patch_size", model.vision.patch_size)
        return shared | most
    require_model_value(options, "patch_size", model.vision.patch_size)
    require_model_value(options, "pooling_kernel_size", model.projector.pixel_shuffle)
    mean = tuple(mean + std / 2 for mean, std in zip(shared["mean"], shared["std"], strict=True))
    return {**shared, **most, "mean": mean, "std": tuple(std / 2 for std in shared["std"])}


PIXELS: dict[str, Any] = {
    **{"resample": 3, "image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0), "do_normalize": False},
    **{"patch_size": 16, "pooling_kernel_size": 3},
}
FAMILY = Family(
    name="gemma4",
    model_types=("gemma4",),
    config=config,
    table=table,
    inputs=inputs,
    name_prefixes=(NamePrefixes("model.vision_tower.", "model.embed_vision.", "model.language_model."),),
    image_processors=(
        ProcessorReader(("Gemma4", "Gemma4Unified"), {**PIXELS, "max_soft_tokens": 280}, build_processor),
    ),
    videos=VideoReader(
        ("Gemma4", "Gemma4Unified"),
        ("gemma4", "gemma4_unified"),
        {**PIXELS, "max_soft_tokens": 70, "num_frames": 32},
        Budget(min_frames=1),
        build_video,
    ),
    image_text=IMAGE,
    chat_template=template("gemma4", "<|turn> <turn|>"),
)
