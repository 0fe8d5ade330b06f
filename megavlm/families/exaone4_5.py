"""EXAONE 4.5: Qwen2.5-VL's tower with grouped-query attention, and EXAONE 4 without M-RoPE, also for videos.

The language model normalises only the outputs of attention and MLP. Three of four layers have a sliding window and
rotary embeddings; the others attend to all tokens without them. Layers that predict further tokens (`mtp.*`) are not
trained, and are exported unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megavlm.config.schema import LanguageConfig, ModelConfig
from megavlm.families import qwen2_vl
from megavlm.families.shared import qwen_vl
from megavlm.families.shared.chat import template
from megavlm.families.shared.family import Family
from megavlm.families.shared.inputs import Batch, Given
from megavlm.families.shared.language import language, types_of_layers
from megavlm.families.shared.qwen_vl import IMAGE, PREFIXES, with_defaults
from megavlm.families.shared.settings import Settings, refuse
from megavlm.families.shared.videos import VIDEOS, build_video
from megavlm.inputs.processor import Processor
from megavlm.inputs.reader import Json
from megavlm.inputs.video import VideoProcessor

# Defaults of the configuration class beyond Qwen3's.
_TEXT: dict[str, Any] = {
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
_VISION: dict[str, Any] = {**qwen2_vl.WINDOWED_VISION, "num_key_value_heads": 8}
_TYPE = ("exaone4_5",)
_MARKS = {"start": "<vision>", "end": "</vision>"}


def config(settings: Settings) -> ModelConfig:
    """Return the `ModelConfig` of an Exaone4_5_Config."""
    tower = with_defaults(settings.section("vision_config"), _VISION)
    return qwen_vl.model_config(
        with_defaults(settings, {"image_token_id": 67, "video_token_id": 68}),
        tower=tower,
        vision=replace(qwen2_vl.windowed(tower), num_query_groups=tower.need("num_key_value_heads")),
        text=_language(settings.section("text_config"), tied=settings.get("tie_word_embeddings", False)),
    )


def _language(text: Settings, *, tied: bool) -> LanguageConfig:
    """Return the language model of an Exaone4Config.

    A null sliding_window needs full attention in all layers, and all layers then have rotary embeddings.
    """
    base = language(with_defaults(text, _TEXT), kind="qwen3", tied=tied)
    window = text.get("sliding_window", 4096) if text.values.get("sliding_window", 4096) is not None else None
    every = text.get("sliding_window_pattern", 4) if "layer_types" not in text.values else 4
    usual = ["sliding_attention" if (number + 1) % every else "full_attention" for number in range(base.num_layers)]
    full = types_of_layers(text, usual, "full_attention", "sliding_attention")
    if window is None and len(full) < base.num_layers:
        refuse(text, "sliding_window", "layer_types has layers with a window: give its number of tokens")
    return replace(
        base,
        input_norms=False,
        post_norms=True,
        window_size=window,
        full_attention_layers=full if window else (),
        no_rope_layers=full if window else (),
    )


def inputs(batch: Batch, model: ModelConfig) -> Given:
    """Return tokens and patches. The model finds images and videos by their tokens, and counts positions itself."""
    given = qwen_vl.inputs(batch, model)
    return {name: value for name, value in given.items() if name not in ("mm_token_type_ids", "position_ids")}


def processor(options: Json, model: ModelConfig, shared: dict[str, Any]) -> Processor:
    built: Any = qwen_vl.build_processor(options, model, shared)
    return replace(built, **_MARKS, placeholder=IMAGE.join(_MARKS.values()))


def video(options: Json, model: ModelConfig, shared: dict[str, Any]) -> VideoProcessor | None:
    built: Any = build_video(options, model, shared)
    return None if built is None else replace(built, **_MARKS)


FAMILY = Family(
    name="exaone4_5",
    model_types=_TYPE,
    config=config,
    table=qwen2_vl.table,
    inputs=inputs,
    image_processors=(replace(qwen_vl.PROCESSOR, classes=("Qwen2VL",), build=processor, model_types=_TYPE),),
    videos=replace(VIDEOS, classes=(), model_types=_TYPE, build=video),
    image_text=IMAGE,
    chat_template=template("exaone4_5", "<|user|> <|assistant|> <|endofturn|>"),
    name_prefixes=PREFIXES,
    unused=(r"mtp\..*",),
)
