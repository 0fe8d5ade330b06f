"""Folders of tiny models of each family, with tokenizer, chat template and image processor, as they are published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from tests.support import hf
from tests.support.processors import CASES, PINPOINTS, bare
from tests.support.tiny_models import MODELS, tiny
from tests.support.tokenizers import tokenizers_in

# The tower of each, for the images of its processor, and what else is another than in MODELS.
LIKE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("llava", {"image_size": 28, "patch_size": 14}, {}),
    "llava-next": ("llava-next", {"image_size": 28, "patch_size": 14}, {"image_grid_pinpoints": PINPOINTS}),
    "onevision": (
        *("llava-onevision", {"image_size": 28, "patch_size": 14}),
        {"image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": "anyres_max_9"},
    ),
    "internvl": ("internvl", {"image_size": [28, 28], "patch_size": [14, 14]}, {}),
    "qianfan": ("qianfan-ocr", {"image_size": [28, 28], "patch_size": [14, 14]}, {}),
    "aya": ("aya", {"image_size": 28, "patch_size": 7}, {}),
    "cohere2-vision": ("cohere2-vision", {"image_size": 28, "patch_size": 7}, {}),
    "lighton": ("lighton-ocr", {"image_size": 28, "patch_size": 7}, {"tie_word_embeddings": False}),
    "gemma3": ("gemma3", {"image_size": 56, "patch_size": 7}, {}),
    "gemma4": ("gemma4", {"position_embedding_size": 210}, {}),
    "gemma4-unified": ("gemma4-unified", {"mm_posemb_size": 70}, {}),
    "mistral3": ("mistral3", {"image_size": 28, "patch_size": 7}, {}),
    "deepseek-vl": ("deepseek-vl", {"image_size": 28, "patch_size": 14}, {}),
    "smolvlm": ("smolvlm", {"image_size": 32, "patch_size": 8}, {}),
    "qwen2-vl": ("qwen2-vl", {"patch_size": 14}, {}),
    "qwen2.5-vl": ("qwen2.5-vl", {"patch_size": 14, "window_size": 56}, {}),
    "qwen3-vl": ("qwen3-vl", {"patch_size": 16}, {}),
    "qwen3-vl-moe": ("qwen3-vl-moe", {"patch_size": 16}, {}),
    "cosmos3": ("cosmos3", {"patch_size": 16}, {}),
    "qwen3.5": ("qwen3.5", {"patch_size": 16}, {}),
    "qwen3.5-moe": ("qwen3.5-moe", {"patch_size": 16}, {}),
    "paddleocr-vl": ("paddleocr-vl", {"patch_size": 14, "image_size": 56}, {}),
    "video-llama-3": ("video-llama-3", {"patch_size": 14}, {}),
    "kimi": ("kimi-moe", {"patch_size": 14}, {}),
    "exaone4.5": ("exaone4.5", {"patch_size": 14, "window_size": 56}, {}),
    "muse": ("muse-glimmer", {"patch_size": 14}, {}),
    "minicpmv-4.6": ("minicpmv-4.6", {}, {}),
    "minicpmv-4.7": ("minicpmv-4.7", {}, {}),
    "glm4v": ("glm4v", {"patch_size": 14, "image_size": 56}, {}),
    "glm4.6v": ("glm4v", {"patch_size": 14, "image_size": 56}, {}),
    "glm-ocr": ("glm-ocr", {"patch_size": 14}, {}),
    "glm4v-moe": ("glm4v-moe", {"patch_size": 14, "image_size": 56}, {}),
}
# Whose processor a model has that has none of its own.
PROCESSORS = {
    **dict.fromkeys(("qwen3-vl-moe", "cosmos3", "qwen3.5", "qwen3.5-moe"), "qwen3-vl"),
    **dict.fromkeys(("glm4.6v", "glm4v-moe", "glm-ocr"), "glm4v"),
}


def whole_folder(name: str, root: Path) -> tuple[Path, Any, Any]:
    """Write the folder `root`/hf of a tiny model of LIKE; return it with Transformers' model and whole processor."""
    case = CASES[PROCESSORS.get(name, name)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizers_in(root)[case.tokenizer])
    model = model_of(name, tokenizer)
    folder = hf.save(model, root / "hf")
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(case.template)
    case.image_processor.save_pretrained(folder)
    processor = bare(
        case.kind,
        **case.attributes,
        image_processor=case.image_processor,
        tokenizer=tokenizer,
        chat_template=case.template,
        image_token_id=model.config.image_token_id,
        **({"video_token_id": model.config.video_token_id} if name.startswith("minicpmv") else {}),
    )
    return folder, model, processor


def model_of(name: str, tokenizer: Any) -> transformers.PreTrainedModel:
    """Return a tiny model whose tokens are those of the tokenizer."""
    like, vision, top = LIKE[name]
    marks = CASES[PROCESSORS.get(name, name)].attributes
    words = {
        "image_token_index": {"gemma3": "<image_soft_token>", "aya": "<|IMG_PATCH|>"}.get(name, marks["image_token"]),
        "image_token_id": marks["image_token"],
        "video_token_index": "<video>",
        "video_token_id": "<|video|>" if name.startswith(("gemma4", "muse")) else "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        **{"image_start_id": "<image>", "image_end_id": "</image>", "newline_id": "Ċ"},
        **{"slice_start_id": "<slice>", "slice_end_id": "</slice>"},
    }
    known, size = tokenizer.get_vocab(), len(tokenizer)
    ids = {key: known.get(word, size + 1) for key, word in words.items() if key in MODELS[like]}
    return tiny(
        like, vision=vision, text={"vocab_size": size + 3, "eos_token_id": tokenizer.eos_token_id}, **top, **ids
    )


def answer_of_transformers(
    model: Any,
    processor: Any,
    messages: Sequence[dict[str, Any]],
    *,
    ends: Sequence[int],
    never: Sequence[int],
    length: int,
) -> str:
    """The text that Transformers generates greedily, up to one of the tokens `ends` and without those of `never`."""
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    options = transformers.GenerationConfig(
        max_new_tokens=length, do_sample=False, eos_token_id=list(ends), suppress_tokens=list(never)
    )
    made = model.generate(**inputs, generation_config=options)[0, inputs["input_ids"].shape[1] :]
    text: str = processor.tokenizer.decode(made, skip_special_tokens=True)
    return text.strip()
