"""The whole way of a user's record: a file and an image folder, a Hugging Face folder, logits.

Transformers takes the same record through its own processor (template, tokens, pixels) and model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from megavlm.config.schema import DataConfig, DatasetConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.types import Segment
from tests.support import hf
from tests.support.covering import slow
from tests.support.gates import hold
from tests.support.harness import difference
from tests.support.processors import CASES, picture
from tests.support.whole_models import PROCESSORS, whole_folder

TALK = ("Which is the largest?", "A cat and a dog.", "How many?", "7, it is blue.")


def write_record(folder: Path, sizes: list[tuple[int, int]]) -> tuple[Path, list[Image.Image]]:
    images = [Image.fromarray(picture(*size, seed=seed)) for seed, size in enumerate(sizes)]
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
    said = [("<image>\n" * len(images)) + TALK[0], *TALK[1:]]
    turns = [{"from": ("human", "gpt")[place % 2], "value": value} for place, value in enumerate(said)]
    path = folder / "train.jsonl"
    names = [f"{number}.png" for number in range(len(images))]
    path.write_text(json.dumps({"image": names, "conversations": turns}) + "\n")
    return path, images


@pytest.mark.parametrize(
    ("name", "sizes"),
    # An image among others is only looked at whole by LLaVA-OneVision; to other families it is one more image.
    [
        *((name, [(60, 90)]) for name in CASES),
        *(slow(name, [(60, 90)]) for name in PROCESSORS),
        ("onevision", [(90, 60), (90, 60)]),
        ("qwen2-vl", [(90, 60), (90, 60)]),
    ],
)
def test_a_record_gives_the_logits_that_transformers_gives(name, sizes, single, tmp_path):
    folder, theirs, processor = whole_folder(name, tmp_path)
    path, images = write_record(tmp_path, sizes)

    config = hf.config_for(folder, seq_length=640)
    config = replace(config, data=DataConfig(datasets=(DatasetConfig(path=str(path)),)))
    source = FilesSource(config)
    (encoded,) = source.encode(0).samples
    sample = source.load(Segment(0, encoded))
    batch = collate([[sample]], CollateSpec.of(config, source, seq_length=640))
    (logits,) = hf.engine_for(config, folder, single).schedule.logits([batch])

    pictures = [{"type": "image", "image": image} for image in images]
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": [{"type": "text", "text": text}]}
        for place, text in enumerate(TALK)
    ]
    messages[0]["content"] = [*pictures, *messages[0]["content"]]
    inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == sample.tokens.tolist()
    with torch.no_grad():
        expected = theirs(**inputs, use_cache=False).logits
    hold(hf.family_in(folder), "record", difference(logits[:, : len(sample)], expected, "logits"))
