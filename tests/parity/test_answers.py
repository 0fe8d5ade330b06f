"""Answers to several prompts in a batch, and their prompts as tokens: those of Transformers' processors.

PaliGemma's processor takes no chat template, and writes the text around a question itself.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from megavlm.config.schema import DataConfig, DatasetConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.types import Conversation, ImageRef, Role, Segment, Turn
from megavlm.inference.assistant import Assistant, Sampling
from megavlm.programs import preview
from megavlm.train.generate import generate
from tests.support import hf
from tests.support.covering import slow
from tests.support.gates import hold
from tests.support.harness import Single, difference
from tests.support.processors import CASES, bare, picture
from tests.support.tiny_models import tiny
from tests.support.tokenizers import tokenizers_in
from tests.support.whole_models import LIKE, PROCESSORS, answer_of_transformers, whole_folder

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


QUESTION, ANSWER = "Which is the largest?", "A cat and a dog."


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Any, Any]:
    """The folder of a tiny model, the model, and Transformers' processor."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizers_in(tmp_path)["gemma"])
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    token = tokenizer.convert_tokens_to_ids("<image>")
    theirs = tiny("paligemma", text={"vocab_size": len(tokenizer) + 3}, image_token_index=token)
    folder = hf.save(theirs, tmp_path / "hf")
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    images.save_pretrained(folder)
    tokenizer.add_bos_token = False
    processor = bare(
        transformers.PaliGemmaProcessor,
        **{"image_processor": images, "tokenizer": tokenizer, "image_seq_length": 16, "image_token": "<image>"},
        **{"image_token_id": token, "chat_template": None},
    )
    return folder, theirs, processor


def test_a_record_of_paligemma_has_the_tokens_and_logits_of_transformers(
    made: tuple[Path, Any, Any], single: Single, tmp_path: Path
) -> None:
    folder, theirs, processor = made
    image = Image.fromarray(picture(60, 90))
    image.save(tmp_path / "0.png")
    turns = [{"from": "human", "value": f"<image>\n{QUESTION}"}, {"from": "gpt", "value": ANSWER}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"image": "0.png", "conversations": turns}))
    config = hf.config_for(folder, seq_length=128)
    config = replace(config, data=DataConfig(datasets=(DatasetConfig(path=str(tmp_path / "train.jsonl")),)))
    source = FilesSource(config)
    (encoded,) = source.encode(0).samples
    sample = source.load(Segment(0, encoded))
    given = processor(images=[image], text=[f"<image>{QUESTION}"], suffix=[ANSWER], return_tensors="pt")
    assert sample.tokens.tolist() == given["input_ids"][0].tolist()
    assert sample.trained.tolist() == given["token_type_ids"][0].bool().tolist()
    batch = collate([[sample]], CollateSpec.of(config, source, seq_length=128))
    (logits,) = hf.engine_for(config, folder, single).schedule.logits([batch])
    inputs = {name: given[name] for name in ("input_ids", "token_type_ids", "pixel_values")}
    expected = theirs(**inputs, use_cache=False).logits
    hold("paligemma", "record", difference(logits[:, : len(sample)], expected.detach(), "logits"))


def test_answers_of_paligemma_are_those_of_transformers(
    made: tuple[Path, Any, Any], single: Single, tmp_path: Path
) -> None:
    """By Transformers' model, and with a key/value cache by this program's own, for which all of a prompt is prefix."""
    folder, theirs, processor = made
    image = Image.fromarray(picture(60, 90))
    image.save(tmp_path / "0.png")
    assistant = Assistant.load(folder, DataConfig(), device=torch.device("cpu"))
    talks = [Conversation((Turn("user", (ImageRef(tmp_path / "0.png"), asked)),)) for asked in (QUESTION, "How many?")]
    answers = assistant.answers([assistant.source.prompt(talk) for talk in talks], Sampling(12))
    source, config = assistant.source, hf.config_for(folder, seq_length=128)
    engine, spec = hf.engine_for(config, folder, single), CollateSpec.of(config, source, seq_length=128)
    with engine.evaluation():
        prompts = [source.prompt(talk) for talk in talks]
        own = generate(engine, spec, prompts, micro_batch_size=1, max_new_tokens=12)
    for asked, answer, tokens in zip((QUESTION, "How many?"), answers, own, strict=True):
        given = processor(images=[image], text=[f"<image>{asked}"], return_tensors="pt")
        options = transformers.GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=list(assistant.ends), suppress_tokens=[source.image_token]
        )
        inputs = {name: given[name] for name in ("input_ids", "token_type_ids", "pixel_values")}
        found = theirs.generate(**inputs, generation_config=options)[0, inputs["input_ids"].shape[1] :]
        text = processor.tokenizer.decode(found, skip_special_tokens=True).strip()
        hold("paligemma", "answers", int(answer != text), f"{answer!r} and {text!r}")
        assert tokens[: len(found)] == found.tolist()


FIRST_RUN = Path(__file__).parents[2] / "examples/first_run"
FAST = ("gemma3", "qwen2.5-vl")  # whose templates write what is no image token, and one with marks around it
OTHERS = [name for name in LIKE if name not in (*FAST, "deepseek-vl")]


@pytest.mark.parametrize("name", [*FAST, *map(slow, OTHERS)])
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
