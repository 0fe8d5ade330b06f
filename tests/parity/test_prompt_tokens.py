"""Prompts as tokens, as a server gets them and as they are trained on: those of Transformers' processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image

from megavlm.programs import preview
from tests.support.covering import slow
from tests.support.whole_models import LIKE, whole_folder

FIRST_RUN = Path(__file__).parents[2] / "examples/first_run"
FAST = ("gemma3", "qwen2.5-vl")  # whose templates write what is no image token, and one with marks around it
LATER = [name for name in LIKE if name not in (*FAST, "deepseek-vl")]


@pytest.mark.parametrize("name", [*FAST, *map(slow, LATER)])
def test_both_forms_of_a_prompt(name: str, tmp_path: Path, capsys: Any) -> None:
    folder, _, processor = whole_folder(name, tmp_path)
    data = ["--datasets", str(FIRST_RUN / "train.jsonl"), "--init-from", str(folder), "--seq-length", "512"]
    assert preview.main([*data, "--samples", "1", "--tokens"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    own = json.loads(line)
    question = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    text = processor.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    begin = tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)
    assert own["served"] == tokenizer.encode(text, add_special_tokens=begin)
    image = Image.open(FIRST_RUN / "images/circle.png").convert("RGB")
    [expanded] = processor(text=[text], images=[image], add_special_tokens=begin)["input_ids"]
    assert own["expanded"] == list(map(int, expanded))

    given = tmp_path / "given.jsonl"
    for tokens in (own["served"], own["expanded"]):
        given.write_text(json.dumps({"record": own["record"], "tokens": tokens}))
        assert preview.main([*data, "--tokens", str(given)]) == 0
    at = len(own["served"]) - 2
    other = [*own["served"][:at], 3, *own["served"][at + 1 :]]
    given.write_text(json.dumps({"record": own["record"], "tokens": other}))
    capsys.readouterr()
    assert preview.main([*data, "--tokens", str(given)]) == 1
    told = capsys.readouterr().out
    assert f"{own['record']}: token {at} is 3 in place of {own['served'][at]} (of {at + 2} tokens with single" in told
    given.write_text("3")
    assert preview.main([*data, "--tokens", str(given)]) == 2
