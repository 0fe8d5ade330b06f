"""Functions that lmms-eval calls on a record of questions.jsonl: its images, its question, and the first reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

_FOLDER = Path(__file__).parents[1]


def images(record: dict[str, Any]) -> list[Image.Image]:
    return [Image.open(_FOLDER / record["image"]).convert("RGB")]


def question(record: dict[str, Any]) -> str:
    text: str = record["question"]
    return text


def reference(record: dict[str, Any]) -> str:
    text: str = record["answers"][0]
    return text
