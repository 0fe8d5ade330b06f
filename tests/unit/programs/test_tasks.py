"""Task files: what they may hold, which files their images may be, and answers that outlive an interruption."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megavlm.data.types import ImageRef, VideoRef
from megavlm.errors import UserError
from megavlm.inference.folders import model_folder
from megavlm.inputs.bad_sample import Reason
from megavlm.programs.evaluation.answers import Answer, AnswerFolder, refuse_unreadable, remaining
from megavlm.programs.evaluation.evaluate import _as_named
from megavlm.programs.evaluation.scores import failures_page, results_json, scored, scores_of
from megavlm.programs.evaluation.task import check_names, read_task, task_option
from megavlm.programs.model_options import add_folder_options
from tests.support.hostile import reason_of

RECORDS: list[dict[str, Any]] = [
    {"image": "cat.png", "question": "What is it?", "answers": ["cat", "a cat"]},
    {"image": ["cat.png", "cat.png"], "question": "Which?", "choices": ["cat", "dog"], "answers": "A"},
    {"question": "6 · 7?", "answer": 42, "metric": "relaxed"},
    {"image": "../secret.png", "question": "<script>?", "answers": ["<b>x</b>"], "metric": "anls"},
]


def written(folder: Path, records: list[Any], name: str = "task.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder / name


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Image.new("RGB", (700, 500), "red").save(tmp_path / "secret.png")
    path = written(tmp_path / "data", RECORDS)
    Image.new("RGB", (700, 500), "red").save(path.parent / "cat.png")
    return path


def test_records_become_questions_with_a_metric_each(file: Path) -> None:
    task = read_task(task_option(str(file)))
    assert [question.metric for question in task.questions] == ["exact_match", "multiple_choice", "relaxed", "anls"]
    assert [len(task.pictures(question)) for question in task.questions[:3]] == [1, 2, 0]
    assert task.questions[2].score("41") == 1.0
    (turn,) = task.conversation(task.questions[1], None).turns
    assert turn.parts[2] == task.questions[1].asked
    assert task.conversation(task.questions[0], "Be brief.").turns[0].role == "system"
    array = file.with_name("array.json")
    array.write_text(json.dumps(RECORDS))
    assert read_task(task_option(str(array))).digest == task.digest
    changed = written(file.parent, [{**RECORDS[0], "question": "What?"}, *RECORDS[1:]], "other.jsonl")
    assert read_task(task_option(str(changed))).digest != task.digest


def test_questions_of_a_table_are_those_of_json_lines(file: Path) -> None:
    """A cell may be a list, and what `--datasets` takes behind a path, `--task` takes."""
    pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow (the extra `hf`)")
    from pyarrow import parquet

    picture = (file.parent / "cat.png").read_bytes()
    rows = [{"scan": {"bytes": picture, "path": None}, "question": "What?", "answers": ["cat", "a cat"]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file.parent / "table.parquet")
    (file.parent / "table.csv").write_text('scan,question,answers,metric\ncat.png,What?,"[""cat"", ""a cat""]",anls\n')
    for name, source in (("table.csv", (file.parent / "cat.png").resolve()), ("table.parquet", picture)):
        task = read_task(task_option(f"{file.parent / name},columns=image:scan,name=it"))
        assert (task.name, task.questions[0].references) == ("it", ("cat", "a cat"))
        assert task.pictures(task.questions[0]) == [ImageRef(source)]


def test_a_question_about_videos(file: Path) -> None:
    pytest.importorskip("av", reason="pip install av (the extra `video`)")
    from tests.support.clips import clip

    (file.parent / "it.mp4").write_bytes(clip(4))
    (file.parent / "frames").mkdir()
    Image.new("RGB", (70, 50), "blue").save(file.parent / "frames/1.png")
    asked = {"image": "cat.png", "videos": ["it.mp4", "frames"], "fps": 2, "question": "What?", "answers": ["a cat"]}
    task = read_task(task_option(str(written(file.parent, [asked, {**asked, "fps": 1}], "videos.jsonl"))))
    image, clip_of, frames = task.pictures(task.questions[0])
    assert isinstance(clip_of, VideoRef)
    assert isinstance(frames, VideoRef)
    assert (image, clip_of.source, clip_of.fps) == (
        ImageRef((file.parent / "cat.png").resolve()),
        (file.parent / "it.mp4").resolve(),
        2.0,
    )
    assert frames.source == (ImageRef((file.parent / "frames/1.png").resolve()),)
    assert task.conversation(task.questions[0], None).turns[0].parts == (image, clip_of, frames, "What?")
    assert replace(task, questions=task.questions[:1]).digest != replace(task, questions=task.questions[1:]).digest
    found = scored(task, {(task.name, number): Answer(task.name, number, "dog") for number in range(2)})
    page = failures_page("x", [], [(task, found)], most=1)
    assert [page.count(alt) for alt in ('alt="500×700 pixels"', 'alt="48×80 pixels"', 'alt="50×70 pixels"')] == [1] * 3


def test_images_outside_of_the_root_are_refused(file: Path) -> None:
    task = read_task(task_option(str(file)))
    assert reason_of(task.pictures, task.questions[3]) is Reason.OUTSIDE


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([], "a question is an object"),
        ({"answers": ["x"]}, "no field `question`"),
        ({"conversations": []}, "no field `question` with a text: write one, or add columns=question:NAME"),
        ({"question": "x?"}, "needs a field `answers`"),
        ({"question": "x?", "answers": []}, "needs a field `answers`"),
        ({"question": "x?", "answers": ["x"], "metric": "bleu"}, "metric 'bleu' is not one of exact_match"),
        ({"question": "x?", "answers": ["x"], "metric": "vqa"}, "10 annotators, and there are 1"),
        ({"question": "x?", "answers": ["C"], "choices": ["a", "b"]}, "neither the letter nor the text"),
        ({"question": "x?", "answers": ["A"], "choices": ["a"]}, "needs 2 to 26"),
        ({"question": "x?", "answers": ["A"], "metric": "multiple_choice"}, "needs 2 to 26"),
    ],
)
def test_a_bad_record_is_named_in_one_line(tmp_path: Path, record: Any, says: str) -> None:
    path = written(tmp_path, [RECORDS[2], record])
    with pytest.raises(UserError, match=r"--task task\.jsonl:2") as error:
        read_task(task_option(str(path)))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{file},metric=bleu", "bleu"),
        ("{file},images=x", "has no images: use path, image_root, columns, metric, name"),
        ("{file},image_root=nowhere", "image_root=nowhere, which is not a folder"),
        ("{file}x", "is not a file or folder: check the path"),
    ],
)
def test_a_mistake_in_an_option_is_named(file: Path, given: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"--task.*{re.escape(says)}"):
        read_task(task_option(given.format(file=file)))
    with pytest.raises(UserError, match="two tasks named task"):
        check_names([task_option(str(file))] * 2)


def test_answers_are_continued_after_a_line_was_cut_short(file: Path, tmp_path: Path) -> None:
    task = read_task(task_option(str(file)))
    first = AnswerFolder(tmp_path / "out", rank=0)
    first.claim({"weights": "x"})
    assert [number for _, number in remaining([task], first, rank=1, world=2)] == [1, 3]
    first.append([Answer(task.name, 0, "\ud800\u2028cat\n"), Answer(task.name, 1, "A")])
    path = tmp_path / "out/answers-0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])  # killed while it wrote
    assert [number for _, number in remaining([task], first)] == [1, 2, 3]
    assert [number for _, number in remaining([task], first, rank=1, world=2)] == [1, 3]  # its own, as before
    AnswerFolder(tmp_path / "out", rank=1).append([Answer(task.name, 3, "", "missing_file: x")])
    first.append([Answer(task.name, 1, "B"), Answer(task.name, 2, "40")])
    assert remaining([task], first) == []
    assert first.read()[task.name, 0].text == "\ud800\u2028cat\n"
    for tasks in ({"task a": "1"}, {"task b": "2"}):  # questions of another task are no others
        first.claim({"weights": "x", **tasks})
    for changed, settings in (("weights", {"weights": "y"}), ("task a", {"weights": "x", "task a": "3"})):
        with pytest.raises(UserError, match=f"another {changed}"):
            first.claim(settings)


OF_ANSWERS = "model.safetensors chat_template.jinja tokenizer.json tokenizer.model preprocessor_config.json"


@pytest.mark.parametrize("name", [*OF_ANSWERS.split(), "generation_config.json"])
def test_answers_of_a_folder_that_was_changed_are_others(tmp_path: Path, name: str) -> None:
    for file in ("config.json", name, "README.md"):
        (tmp_path / file).write_text("{}")
    before, named = model_folder(tmp_path).digest, _as_named(str(tmp_path / name))
    (tmp_path / "README.md").write_text("{ }")
    assert model_folder(tmp_path).digest == before
    assert (_as_named(str(tmp_path / name)), _as_named("vicuna")) == (named, "vicuna")
    (tmp_path / name).write_text("{ }")
    assert model_folder(tmp_path).digest != before
    assert _as_named(str(tmp_path / name)) != named


def test_a_model_may_be_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    monkeypatch.setenv("MEGAVLM_CACHE", str(tmp_path / "cache"))
    add_folder_options(parser := argparse.ArgumentParser())
    found = model_folder(parser.parse_args([f"file://{tmp_path}/model"]).model)
    assert (found.folder / "config.json").read_text() == "{}"
    assert found.results == Path("evaluations/model")


def test_scores_and_the_page_of_failures(file: Path) -> None:
    task = read_task(task_option(str(file)))
    texts = ["cat", "B: <i>dog</i>", "40", ""]
    answers = {(task.name, number): Answer(task.name, number, text) for number, text in enumerate(texts)}
    answers[task.name, 3] = Answer(task.name, 3, "", "path_outside_root: it leaves")
    found = scored(task, answers)
    assert [each.score for each in found] == [1.0, 0.0, 1.0, 0.0]
    assert [(score.metric, score.mean, score.not_asked) for score in scores_of(found)] == [
        ("exact_match", 1.0, 0),
        ("anls", 0.0, 1),
        ("relaxed", 1.0, 0),
        ("multiple_choice", 0.0, 0),
    ]
    assert json.loads(json.dumps(results_json([(task, found)], {})))["tasks"]["task"]["answers"][1]["score"] == 0.0
    page = failures_page("x", [("model", "y")], [(task, found)], most=5)
    assert page.count("<article>") == 2
    assert "<mark class=wrong>B: &lt;i&gt;dog" in page  # a plain mark, green, is right or trained
    assert "<script>" not in page.partition("</style>")[2]
    assert page.count('src="data:image/jpeg;base64,') == 2
    assert 'width="320" height="229"' in page
    assert "leads out of image_root" in page
    assert failures_page("x", [], [(task, found)], most=1).count("<article>") == 1


def test_a_task_of_which_more_than_a_twentieth_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    records = [{"question": "What?", "answers": ["it"], "image": "cat.png"}] * 40
    records[:2] = [{**records[0], "image": "none.png"}] * 2
    Image.new("RGB", (7, 5)).save(tmp_path / "cat.png")
    refuse_unreadable([read_task(task_option(str(written(tmp_path, records))))])
    records[2] = records[0]
    task = read_task(task_option(str(written(tmp_path, records))))
    with pytest.raises(UserError, match=r"task: 3 of 40 questions could not be asked: 3 × missing_file"):
        refuse_unreadable([task])


def test_shares_of_right_answers_have_wilsons_interval_and_other_means_a_bootstraps(tmp_path: Path) -> None:
    records = [{"question": "x?", "answers": ["cola"], "metric": metric} for metric in ("exact_match", "anls")]
    task = read_task(task_option(str(written(tmp_path, records * 20))))
    found = scored(task, {(task.name, number): Answer(task.name, number, "cole") for number in range(40)})
    assert {score.interval: (score.low, score.high) for score in scores_of(found)} == {
        "wilson": pytest.approx((0.0, 0.1611), abs=5e-5),  # 0 of 20, as in Newcombe's table
        "bootstrap": (0.75, 0.75),  # all are alike
    }
