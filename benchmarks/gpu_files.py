"""Write a data set for `gpu_vlm.py` like a user's: JPEG files, LLaVA records, tokenizer, processor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from gpu_model import Shape
from PIL import Image

from megavlm.arch.image_tokens import grid_of, tokens_per_grid

SAMPLES = 64
_WORDS = tuple(f"word{number}" for number in range(64))
_SPECIAL = ("<pad>", "<unk>", "<image>", "<|im_start|>", "<|im_end|>")
_MOST_WORKERS = 8


def flags_of(shape: Shape, folder: Path) -> str:
    """Write a data set for a shape into a folder; return the flags of pretrain_vlm.py that read it."""
    _write_tokenizer(folder / "model")
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(_processor(shape)))
    _write_records(shape, folder)
    workers = max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 2))
    return (
        f"--datasets {folder / 'records.jsonl'} --tokenizer {folder / 'model'} --image-processor {folder / 'model'} "
        f"--num-workers {workers} --packing-window {SAMPLES}"
    )


def _processor(shape: Shape) -> dict[str, Any]:
    """Return preprocessor_config.json of the family: LLaVA-1.5 crops to squares, Qwen2.5-VL keeps the sizes."""
    side = shape.model.vision.image_size
    if shape.model.vision.window_size is None:
        square = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        return {"image_processor_type": "CLIPImageProcessor", **square}
    most = max(height * width for height, width in shape.images)
    return {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 56**2, "longest_edge": most}}


def _write_records(shape: Shape, folder: Path) -> None:
    """Write records of one photograph and one exchange; the answer is between a half and all of a sample's text."""
    random = np.random.default_rng(1)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(SAMPLES):
        height, width = shape.images[number % len(shape.images)]
        if shape.model.vision.window_size is None:
            height, width = 3 * height // 2, 2 * width  # a photograph that is larger than what is cut out of it
        name = f"{number}.jpg"
        Image.fromarray(_photograph(height, width, random)).save(folder / "images" / name, quality=90)
        most = max(2, shape.sample - _features(shape, number) - 24)
        answer = " ".join(random.choice(_WORDS, int(random.integers(most // 2, most))))
        turns = [{"from": "human", "value": "<image>\nword1 word2"}, {"from": "gpt", "value": answer}]
        lines.append(json.dumps({"id": number, "image": f"images/{name}", "conversations": turns}))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")


def _features(shape: Shape, number: int) -> int:
    height, width = shape.images[number % len(shape.images)]
    return tokens_per_grid(grid_of(height, width, shape.model.vision.patch_size), shape.model.projector)


def _photograph(height: int, width: int, random: np.random.Generator) -> Any:
    """Return areas of colour with a little noise, [height, width, 3] bytes, which compress like photographs."""
    coarse = random.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    return np.clip(smooth + random.integers(-8, 9, (height, width, 1)), 0, 255).astype(np.uint8)


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are words, with ChatML as template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = (*_SPECIAL, *_WORDS, "user", "assistant", "\n")
    words = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<image>", "<|im_start|>"],
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
