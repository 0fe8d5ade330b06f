"""From images and a conversation to tokens, end to end: ours, and Transformers' whole processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from megavlm.data.chat import ChatFormat
from megavlm.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megavlm.data.types import Conversation, ImageRef, Turn
from megavlm.families import processor_from
from tests.support.processors import CASES, bare, picture, tokenizers_in

QUESTION, ANSWER, MORE, LAST = "Which is the largest?", "A cat and a dog.", "How many?", "7, it is blue."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tokenizers_in(tmp_path_factory.mktemp("tokenizers"))


@pytest.mark.parametrize("sizes", [[(60, 90)], [(97, 53), (40, 120)]], ids=["one image", "two"])
@pytest.mark.parametrize("name", CASES)
def test_the_tokens_are_those_of_the_whole_processor(
    name: str, sizes: list[tuple[int, int]], folders: dict[str, Path]
) -> None:
    case = CASES[name]
    images = [Image.fromarray(picture(*size)) for size in sizes]
    loaded = transformers.AutoTokenizer.from_pretrained(folders[case.tokenizer])
    theirs = bare(
        case.kind,
        **case.attributes,
        image_processor=case.image_processor,
        tokenizer=loaded,
        chat_template=case.template,
        image_token_id=loaded.convert_tokens_to_ids(case.attributes["image_token"]),
    )

    def said(role: str, text: str, pictures: list[Image.Image]) -> dict[str, Any]:
        shown = [{"type": "image", "image": image} for image in pictures]
        return {"role": role, "content": [*shown, {"type": "text", "text": text}]}

    messages = [
        said("user", QUESTION, images),
        said("assistant", ANSWER, []),
        said("user", MORE, []),
        said("assistant", LAST, []),
    ]
    found = theirs.apply_chat_template(messages, tokenize=True, return_dict=True)
    expected = np.asarray(found["input_ids"]).ravel()

    ours = processor_from(case.image_processor.to_dict(), case.model)
    tokenizer = HuggingFaceTokenizer.of(folders[case.tokenizer], image_text=ours.image_token)
    tokenizer.chat_template = case.template
    chat = ChatFormat.of(tokenizer, placeholder=ours.placeholder)
    conversation = Conversation(
        (
            Turn("user", (*(ImageRef(b"") for _ in images), f"\n{QUESTION}")),
            Turn("assistant", (ANSWER,)),
            Turn("user", (MORE,)),
            Turn("assistant", (LAST,)),
        )
    )
    prompts = [ours.layout(*size, images=len(sizes)).prompt for size in sizes]
    encoded = chat.encode(conversation, prompts)
    assert encoded.tokens.tolist() == expected.tolist()
