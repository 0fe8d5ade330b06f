"""Answers to prompts, from folders and from runs: the text that Transformers generates with its processors."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from megavlm.config.schema import DataConfig, DatasetConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.types import Conversation, ImageRef, Role, Segment, Turn, VideoRef
from megavlm.errors import UserError
from megavlm.inference.assistant import Assistant, Sampling
from megavlm.inference.folders import _of_training
from megavlm.programs import chat, preview
from megavlm.programs.evaluation import evaluate
from megavlm.programs.model_options import memory_reported
from megavlm.rules.fields import with_values
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
LATER = "qianfan lighton cosmos3 glm4.6v glm-ocr minicpmv-4.6 cohere2-vision qwen3.5 qwen3.5-moe".split()  # others'
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


@pytest.mark.parametrize(
    "name",
    ["glm4v", *map(slow, "qwen2.5-vl qwen3-vl internvl onevision gemma4 exaone4.5 minicpmv-4.7 kimi".split())],
)
def test_a_server_is_given_a_video_as_its_template_writes_it(name: str, tmp_path: Path, capsys: Any) -> None:
    folder, _, processor = whole_folder(name, tmp_path)
    (tmp_path / "clip").mkdir()
    for number in range(4):
        Image.fromarray(picture(60, 90, seed=number)).save(tmp_path / f"clip/{number}.png")
    turns = [{"from": "human", "value": f"<video>\n{QUESTION}"}, {"from": "gpt", "value": ANSWER}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"video": "clip", "conversations": turns}))
    data = ["--datasets", str(tmp_path / "train.jsonl"), "--init-from", str(folder), "--seq-length", "512"]
    assert preview.main([*data, "--samples", "1", "--tokens"]) == 0
    own = json.loads(capsys.readouterr().out)
    asked = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}]
    text = processor.apply_chat_template(asked, add_generation_prompt=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    begin = tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)
    assert own["served"] == tokenizer.encode(text, add_special_tokens=begin)
    assert len(own["expanded"]) > len(own["served"])


SHORT = ["--max-new-tokens", "6", "--device", "cpu"]
ASKED = "Which is the largest?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    folder, _, _ = whole_folder("qwen2.5-vl", root)
    for number, size in enumerate([(60, 90), (97, 53)]):
        Image.fromarray(picture(*size, seed=number)).save(root / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def run(model: Path, single: Single) -> Path:
    return hf.run_of(model, model.parent / "run", single)


@pytest.fixture(scope="module")
def assistant(model: Path) -> Assistant:
    return Assistant.load(model, DataConfig(), device=torch.device("cpu"))


def expected(assistant: Assistant, *turns: Turn) -> str:
    (answer,) = assistant.answers([assistant.source.prompt(Conversation(turns))], Sampling(6))
    return answer


def test_one_answer_of_a_folder_and_of_a_run(model, run, assistant, tmp_path, capsys):
    run = shutil.copytree(run, tmp_path / "run")
    image = model.parent / "0.png"
    answer = expected(assistant, Turn("user", (ImageRef(image), ASKED)))
    asked = ["--image", str(image), "--prompt", ASKED, *SHORT]
    assert chat.main([str(model), *asked]) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    assert chat.main([str(run), *asked]) == 0
    first = capsys.readouterr()
    assert first.out == f"{answer}\n"
    assert "exporting" in first.err
    export = run / "exports/iter_0000000"
    assert chat.main([str(export), *asked]) == chat.main([str(run), *asked]) == 0
    assert "exporting" not in capsys.readouterr().err, "the export is there"
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("chat_template: auto", "chat_template: plain"))
    plain = Assistant.load(model, DataConfig(chat_template="plain"), device=torch.device("cpu"))
    answer = expected(plain, Turn("user", (ImageRef(image), ASKED)))
    assert chat.main([str(run), *asked]) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    (run / "exports/iter_0000000.sha256").write_text("of other weights")
    (export / "model.safetensors").unlink()
    assert chat.main([str(run), *asked]) == 0
    assert "exporting" in capsys.readouterr().err


def test_a_conversation_of_several_turns(model, assistant, monkeypatch, capsys):
    files = [model.parent / "0.png", model.parent / "1.png"]
    first = Turn("user", (ImageRef(files[0]), ASKED))
    said = expected(assistant, first)
    second = Turn("user", (ImageRef(files[1]), "How many?"))
    answers = [
        said,
        expected(assistant, first, Turn("assistant", (said,)), second),
        expected(assistant, Turn("user", ("How many?",))),
    ]
    lines = [f"/image {files[0]}", ASKED, "/image nowhere.png", "/loudly", "", f"/image {files[1]}", "How many?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*lines, "/reset", "How many?", "/quit", "not read"])))
    assert chat.main([str(model), *SHORT]) == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(f"{answer}\n" for answer in answers)
    assert "nowhere.png is not a file" in printed.err
    assert "unknown command /loudly" in printed.err


def test_questions_about_a_video(model, assistant, tmp_path, monkeypatch, capsys):
    """Chat and evaluation show the model what a training sample shows it."""
    pytest.importorskip("av", reason="pip install av (the extra `video`)")
    from tests.support.clips import clip

    frames = [picture(60, 90, seed=number) for number in range(12)]
    (video := tmp_path / "it.mp4").write_bytes(clip(12, rate=6, frames=frames))
    answer = expected(assistant, Turn("user", (VideoRef(video), ASKED)))
    assert answer != expected(assistant, Turn("user", (ASKED,))), "the model looks at its prompt"
    assert chat.main([str(model), "--video", str(video), "--prompt", ASKED, *SHORT]) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/video {video}\n{ASKED}\n/video {tmp_path}\n/quit\n"))
    assert chat.main([str(model), *SHORT]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{answer}\n"
    assert "(4 frames, to 1.5 s, with the next message)" in printed.err
    assert "holds 0 images" in printed.err
    lines = [{"video": "it.mp4", "question": ASKED, "answers": [answer]}, {"question": ASKED, "answers": [answer]}]
    (tmp_path / "task.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    argv = [str(model), "--task", str(tmp_path / "task.jsonl"), "--out", str(tmp_path / "out"), *SHORT]
    assert evaluate.main(argv) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert [each["score"] for each in results["tasks"]["task"]["answers"]] == [1, 0]
    shorter, longer = (
        assistant.source.prompt(Conversation((Turn("user", (VideoRef(video), text)),)))
        for text in (ASKED, f"What is seen {'again ' * 20}in it?")
    )
    with torch.inference_mode():
        alone, beside = (
            assistant.model.module(**assistant.inputs(asked)).logits[0, -1] for asked in ([shorter], [shorter, longer])
        )
    torch.testing.assert_close(beside, alone, rtol=1e-4, atol=1e-5, msg="padding moves positions with their tokens")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("nowhere --prompt x", "nowhere is not a folder"),
        ("{root} --prompt x", "neither a config.json nor a complete checkpoint"),
        ("{model} --prompt x --image {root}/none.png", "none.png is not a file: name another file"),
        ("{model} --prompt x --image {root}/none.png", "megavlm chat: --image "),
        ("{model} --prompt x --image {model}/config.json", "not of a known image format"),
        ("{model} --prompt x --video {root}/none.mp4", "none.mp4 is not a file or folder"),
        ("{model} --prompt x --video {model}/config.json", "config.json: it is not of a known video format"),
        ("{model} --prompt x --temperature -1", "--temperature -1.0 must be 0 or more"),
        ("{model} --prompt x --max-new-tokens 0", "--max-new-tokens: 0 must be a whole number from 1"),
        ("{model} --prompt x --device cuda:7", "--device cuda:7: this machine has"),
        ("{model} --prompt x --device gpu", "--device gpu is unknown"),
        ("{model} --prompt x --chat-template latin", "--chat-template latin is unknown"),
        ("{model} --prompt x<|image_pad|>", "marks images"),
    ],
)
def test_a_mistake_is_one_line(model: Path, flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [word.format(model=model, root=model.parent) for word in flags.split()]
    assert chat.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megavlm chat: ")
    assert says in line


@pytest.mark.parametrize(("batch", "says"), [(8, "give a smaller --batch-size than 8, --dty"), (1, "y: use --dty")])
def test_a_device_without_memory_is_told_with_what_can_be_smaller(batch: int, says: str) -> None:
    with pytest.raises(UserError, match=says), memory_reported(batch):
        raise torch.OutOfMemoryError


def test_an_answer_is_what_follows_its_thoughts(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, decode = SimpleNamespace(thought_ends=(7,)), lambda ids: "".join(map(str, ids))
    model: Any = SimpleNamespace(source=SimpleNamespace(chat=chat, decode_answer=decode))
    monkeypatch.setattr(Assistant, "_generate", lambda *_: [[1, 7, 2, 7, 3, 9, 7, 4]])
    assistant: Any = Assistant(model, None, (9,))
    assert assistant.answers([], Sampling()) == [assistant.stream(None, Sampling(), str)] == ["3"]
    assert assistant.text([1, 7, 2]) == "172"


def test_sampling_takes_the_likeliest_tokens_that_transformers_takes() -> None:
    model: Any = None
    assistant = Assistant(model, transformers.GenerationConfig(), ())
    assert assistant._chosen(torch.arange(100).expand(300, -1) / 1000, 1.0).min() >= 50


def test_answers_near_the_last_position_are_not_cut_for_a_longer_prompt(assistant: Assistant) -> None:
    asked = [Conversation((Turn("user", (text,)),)) for text in ("How many?", "How many? " * 9)]
    prompts = [assistant.source.prompt(each) for each in asked]
    whole = assistant.answers(prompts[:1], Sampling(6))
    places = {("model", "language", "max_positions"): len(prompts[1]) + 2}
    near = replace(assistant, model=replace(assistant.model, config=with_values(assistant.model.config, places)))
    assert near.answers(prompts, Sampling(6)) == whole + near.answers(prompts[1:], Sampling(6))


def test_a_run_has_the_options_of_data_that_it_was_trained_with(tmp_path: Path) -> None:
    assert _of_training(tmp_path) == (DataConfig(), None)
    for given, expected in (("", 300), ("data: {enable_thinking: false, video_max_tokens: 50}", 50)):
        (tmp_path / "config.yaml").write_text(f"train: {{seq_length: 600}}\n{given}\n")
        found, length = _of_training(tmp_path)
        assert length == 600
        assert (found.video_max_tokens, found.enable_thinking) == (expected, False if given else None)


def questions(model: Path, assistant: Assistant) -> Path:
    """Six questions: two that the model answers as the reference says, one whose image, other.png, is missing."""
    right = expected(assistant, Turn("user", (ImageRef(model.parent / "0.png"), ASKED)))
    records: list[dict[str, Any]] = [
        {"image": "0.png", "question": ASKED, "answers": [right]},
        {"image": "other.png", "question": ASKED, "answers": [right]},
        {"question": "How many?", "answers": [expected(assistant, Turn("user", ("How many?",)))]},
        *({"image": ["0.png", "1.png"], "question": f"{number}?", "answers": ["no"]} for number in range(3)),
    ]
    path = model.parent / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_a_task_is_scored_and_continued_by_any_number_of_processes(model, assistant, tmp_path, monkeypatch, capsys):
    argv = [str(model), "--task", str(questions(model, assistant)), "--out", str(tmp_path), "--batch-size", "2", *SHORT]
    assert evaluate.main(argv) == 2
    told = capsys.readouterr().err
    assert "1 of 6 questions could not be asked: 1 × missing_file, as questions.jsonl:2" in told
    assert "as PATH,image_root=DIR" in told
    assert not list(tmp_path.iterdir()), "nothing was asked"
    Image.fromarray(picture(60, 90, seed=0)).save(model.parent / "other.png")
    for rank in (1, 0):  # as torchrun starts them; rank 1 has answered all of its questions when rank 0 begins
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        assert evaluate.main(argv) == 0
    for name in place:
        monkeypatch.delenv(name)
    printed = capsys.readouterr().out
    assert "questions: exact_match 50.0% (18.8% to 81.2% with 95% confidence), 6 questions" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert [each["score"] for each in results["tasks"]["questions"]["answers"]] == [1, 1, 1, 0, 0, 0]
    assert (tmp_path / "failures.html").read_text().count("<article>") == 3

    lines = (tmp_path / "answers-0.jsonl").read_text().splitlines()
    (tmp_path / "answers-0.jsonl").write_text("\n".join([lines[0], lines[1][:10]]))
    (tmp_path / "results.json").unlink()
    asked: list[int] = []
    answer = Assistant.answers
    monkeypatch.setattr(
        Assistant, "answers", lambda self, samples, how: asked.append(len(samples)) or answer(self, samples, how)
    )
    assert evaluate.main(argv) == 0
    assert asked == [2], "only what is missing"
    assert json.loads((tmp_path / "results.json").read_text()) == results
    capsys.readouterr()
    assert evaluate.main([*argv, "--temperature", "1"]) == 2
    assert "another temperature" in capsys.readouterr().err


def test_a_run_has_its_results_beside_its_checkpoints(model: Path, run: Path, assistant: Assistant) -> None:
    file = questions(model, assistant)
    shutil.copy(file, model.parent / "more.jsonl")
    for task in (file, model.parent / "more.jsonl"):  # one after the other
        assert evaluate.main([str(run), "--task", str(task), "--limit", "1", *SHORT]) == 0
    results = json.loads((run / "evaluations/iter_0000000/results.json").read_text())
    assert [task["scores"][0]["mean"] for task in results["tasks"].values()] == [1.0, 1.0]
