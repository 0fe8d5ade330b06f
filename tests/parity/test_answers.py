"""Answers to several prompts in a batch: the text that Transformers generates with its processor for each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megavlm.config.schema import DataConfig
from megavlm.data.types import Conversation, ImageRef, Role, Turn
from megavlm.inference.assistant import Assistant, Sampling
from tests.support import hf
from tests.support.covering import slow
from tests.support.gates import hold
from tests.support.processors import CASES, picture
from tests.support.whole_models import PROCESSORS, answer_of_transformers, whole_folder

LENGTH = 12
LATER = ("qianfan", "lighton", "cosmos3", "glm-ocr", "minicpmv-4.6", "cohere2-vision")  # their parts are others'
Said = tuple[Role, tuple[str | int, ...]]  # a number is an image
TALKS: list[list[Said]] = [
    [("user", (0, "Which is the largest?"))],
    [("user", ("How many?",))],
    [("user", (1, 0, "Which is the largest?")), ("assistant", ("A cat and a dog.",)), ("user", ("How many?",))],
]


@pytest.mark.parametrize("name", [slow(name) if name in LATER else name for name in (*CASES, *PROCESSORS)])
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, theirs, processor = whole_folder(name, tmp_path)
    files = [tmp_path / "0.png", tmp_path / "1.png"]
    for number, (file, size) in enumerate(zip(files, [(60, 90), (97, 53)], strict=True)):
        Image.fromarray(picture(*size, seed=number)).save(file)

    assistant = Assistant.load(folder, DataConfig(), device=torch.device("cpu"))
    talks = [Conversation(tuple(Turn(role, _parts(parts, files)) for role, parts in talk)) for talk in TALKS]
    prompts = [assistant.source.prompt(talk) for talk in talks]
    answers = assistant.answers(prompts, Sampling(LENGTH))
    expected = [_theirs(theirs, processor, assistant, talk, files) for talk in TALKS]
    differing = [pair for pair in zip(answers, expected, strict=True) if pair[0] != pair[1]]
    hold(hf.family_in(folder), "answers", len(differing), f"answers and Transformers' {differing}")
    assert len({*answers}) > 1, "the model looks at its prompt"

    shown: list[str] = []
    assert assistant.stream(prompts[2], Sampling(LENGTH), shown.append) == "".join(shown) == answers[2]


def _parts(parts: tuple[str | int, ...], files: list[Path]) -> tuple[str | ImageRef, ...]:
    return tuple(ImageRef(files[part]) if isinstance(part, int) else part for part in parts)


def _theirs(model: Any, processor: Any, assistant: Assistant, talk: list[Said], files: list[Path]) -> str:
    def content(part: str | int) -> dict[str, Any]:
        return (
            {"type": "image", "image": Image.open(files[part])}
            if isinstance(part, int)
            else {"type": "text", "text": part}
        )

    messages = [{"role": role, "content": list(map(content, parts))} for role, parts in talk]
    return answer_of_transformers(
        model, processor, messages, ends=assistant.ends, never=assistant.source.feature_tokens, length=LENGTH
    )
