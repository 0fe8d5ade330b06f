"""Write a data set for `gpu_vlm.py` like a user's: JPEG files, LLaVA records, tokenizer, processor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_model import Shape
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megavlm.arch.image_tokens import grid_of, tokens_per_grid

SAMPLES = 64
_WORDS = tuple(f"word{number}" for number in range(64))
_SPECIAL = ("<pad>", "<unk>", "<image>", "<|im_start|>", "<|im_end|>")
IMAGE_TOKEN = _SPECIAL.index("<image>")
_MOST_WORKERS = 8


def flags_of(shape: Shape, folder: Path) -> str:
    """Write a data set for a shape into a folder; return the flags of pretrain_vlm.py that read it."""
    _write_tokenizer(folder / "model")
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(_processor(shape)))
    _write_records(shape, folder)
    return (
        f"--datasets {folder / 'records.jsonl'} --tokenizer {folder / 'model'} --image-processor {folder / 'model'} "
        f"--num-workers {_workers()} --packing-window {SAMPLES}"
    )


def their_loader(shape: Shape, folder: Path, *, pin: bool) -> DataLoader[Any]:
    """Write the data set; return it as Transformers' users read it: the model's processor in the workers of torch's
    loader, as many as ours has, and batches that are padded to the longest sample. It never ends.
    """
    flags_of(shape, folder)
    return DataLoader(
        _TheirSamples(folder),
        batch_size=len(shape.images),
        num_workers=_workers(),
        collate_fn=_TheirSamples.joined,
        pin_memory=pin,
        persistent_workers=True,
    )


def _workers() -> int:
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 2))


class _TheirSamples(Dataset[dict[str, Tensor]]):
    """The records as inputs of LLaVA in Transformers; all that follows the image is trained, as little as it costs."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer, LlavaProcessor

        self.folder = folder
        self.records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
        self.processor = LlavaProcessor(
            image_processor=AutoImageProcessor.from_pretrained(folder / "model"),
            tokenizer=AutoTokenizer.from_pretrained(folder / "model"),
            patch_size=14,
            vision_feature_select_strategy="default",
            image_token="<image>",
            num_additional_image_tokens=1,
        )

    def __len__(self) -> int:
        return 1_000 * len(self.records)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        record = self.records[number % len(self.records)]
        question, answer = (turn["value"] for turn in record["conversations"])
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = self.processor.tokenizer.apply_chat_template(messages, tokenize=False)
        with Image.open(self.folder / record["image"]) as image:
            inputs = self.processor(text=text, images=image.convert("RGB"), return_tensors="pt")
        return {name: value[0] for name, value in inputs.items()}

    @staticmethod
    def joined(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return a batch with labels; padding is token 0 and not trained."""
        tokens, mask = (
            torch.nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True)
            for name in ("input_ids", "attention_mask")
        )
        labels = tokens.masked_fill((mask == 0) | (tokens == IMAGE_TOKEN), -100)
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels, "pixel_values": pixels}


def _processor(shape: Shape) -> dict[str, Any]:
    """Return preprocessor_config.json of the family: LLaVA-1.5 crops to squares, Qwen's models keep the sizes."""
    side, patch = shape.model.vision.image_size, shape.model.vision.patch_size
    if shape.model.vision.position_embedding == "learned":
        square = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        return {"image_processor_type": "CLIPImageProcessor", **square}
    most = max(height * width for height, width in shape.images)
    sizes = {"size": {"shortest_edge": 56**2, "longest_edge": most}, "patch_size": patch}
    return {"image_processor_type": "Qwen2VLImageProcessor", **sizes}


def _write_records(shape: Shape, folder: Path) -> None:
    """Write records of one photograph and one exchange; the answer is between a half and all of a sample's text."""
    random = np.random.default_rng(1)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(SAMPLES):
        height, width = shape.images[number % len(shape.images)]
        if shape.model.vision.position_embedding == "learned":
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
