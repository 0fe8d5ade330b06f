"""`tools/chat.py` and `tools/evaluate.py` on a tiny Qwen2.5-VL: a Hugging Face folder, and a run that began with it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megavlm.config.schema import DataConfig
from megavlm.data.types import Conversation, ImageRef, Turn, VideoRef
from megavlm.inference.assistant import Assistant, Sampling
from megavlm.inference.folders import _data_options
from megavlm.programs.evaluation import evaluate
from megavlm.programs.inference import chat
from tests.support import hf
from tests.support.harness import Single
from tests.support.processors import picture
from tests.support.whole_models import whole_folder

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


def test_a_run_has_the_budget_of_a_video_that_it_was_trained_with(tmp_path: Path) -> None:
    assert _data_options(tmp_path).video_max_tokens is None
    for given, expected in (("", 300), ("data: {video_max_tokens: 50}", 50)):
        (tmp_path / "config.yaml").write_text(f"train: {{seq_length: 600}}\n{given}\n")
        assert _data_options(tmp_path).video_max_tokens == expected


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
    assert evaluate.main([str(run), "--task", str(file), str(model.parent / "more.jsonl"), "--limit", "1", *SHORT]) == 0
    results = json.loads((run / "evaluations/iter_0000000/results.json").read_text())
    assert [task["scores"][0]["mean"] for task in results["tasks"].values()] == [1.0, 1.0]
