"""Reports of runs and the page that shows one."""

from __future__ import annotations

import base64
import json
import re
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from megavlm.command_line.parsing import parse
from megavlm.data.visuals import unpatchified
from megavlm.inputs.bad_sample import Reason, Skipped
from megavlm.inputs.patches import patchify
from megavlm.metrics.callback import StepEnd, Stop
from megavlm.metrics.sinks import FILE, ExpertLoadsSink
from megavlm.programs import report
from megavlm.programs.evaluation.metrics import (
    anls,
    chosen_letter,
    exact_match,
    multiple_choice,
    normalised,
    question_with_choices,
    relaxed_accuracy,
    vqa_accuracy,
)
from megavlm.programs.evaluation.scores import bootstrap, wilson
from megavlm.programs.prepare import main as prepare
from megavlm.programs.preview import _image, main, marked, page, skipped_samples
from megavlm.programs.report import Line, chart, differing, read_run
from megavlm.rules.load import to_yaml
from tests.support.data_files import record, sources_of, write_all
from tests.support.html import told


def write_run(
    folder: Path, *, steps: int, lr: str = "1e-3", speed: float = 100.0, options: tuple[str, ...] = (), **more: object
) -> Path:
    folder.mkdir()
    config = parse(["--lr", lr, *options, "--run-dir", str(folder)])
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "environment.json").write_text(json.dumps({"device": "NVIDIA <b>H100</b>"}))
    start = {"time": "2026-01-01T00:00:00+00:00", "kind": "start", "iteration": 0, "world": 4, "attempt": 0, "rank": 0}
    bad = {"time": "2026-01-01T00:00:09+00:00", "kind": "skip", "iteration": 2, "reason": "nan in <script>", "rank": 0}
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (start, bad)))
    records = [
        {
            **{
                "iteration": n,
                "time": f"2026-01-01T00:{n // 60:02}:{n % 60:02}+00:00",
                "loss": 4.0 / n,
                "tokens": 1000,
            },
            **{"step_time_s": 1.0, "data_time_s": 0.25, "tokens_per_second": speed, "mfu": 0.4, "grad_norm": 1.0},
            **{"learning_rate": 1e-3, "packing_efficiency": 0.9, "skipped_samples": 1, "skipped_steps": 1},
            **{"peak_memory_gib": 10.0 + n / 10, "updated": True},
            **more,
        }
        for n in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_page_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(
        tmp_path / "one",
        steps=40,
        **{"validation/loss": 1.5, "validation/perplexity": 4.5, "validation/trained_tokens": 9},
    )
    two = write_run(tmp_path / "two & more", steps=20, lr="5e-4", speed=180.0)
    out = tmp_path / "deep" / "report.html"
    (tmp_path / "array").mkdir()  # of a sweep on SLURM
    assert report.main([str(one), str(tmp_path / "array"), str(two), "--out", str(out)]) == 0
    left_out = f"left out: {tmp_path / 'array'} has no metrics.jsonl with steps: name the folder of a run\n"
    assert capsys.readouterr() == (f"wrote {out}\n", left_out)
    page = out.read_text()
    text = told(page)
    for expected in ("one", "two & more", "4 × NVIDIA <b>H100</b>", "40.0%", "25.0%", "14.0 GiB", "12.0 GiB", "1 skip"):
        assert expected in text, expected
    # The last 20 losses, 4 / 21 to 4 / 40, have the mean 0.1362; 4 devices share 100 tokens/s.
    assert "one 4 × NVIDIA <b>H100</b> 40 0.1362 40k 40 s 100 25 40.0% 14.0 GiB 25.0% 40 samples, 1 step" in text
    assert "optimizer.lr 0.001 0.0005" in text
    assert "run.run_dir" not in text
    assert "validation/loss" in text
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=", page)
    # Loss over three axes, held-out loss over steps, …: each run has a line in each chart for which it has values.
    assert page.count('<polyline class="run"') == 2 * (3 + 4 + 2 + 2) + 1


def test_text_from_a_run_is_escaped_wherever_it_is_shown(tmp_path: Path) -> None:
    mark = "<script>{}"
    runs = [
        write_run(
            tmp_path / mark.format(name), steps=2, options=("--tokenizer", mark.format(f"tokenizer of {name}")), **more
        )
        for name, more in {"one": {"validation/<script>loss": 1.0}, "two": {}}.items()
    ]
    with (runs[0] / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": mark.format("kind")}))
    out = tmp_path / "report.html"
    assert report.main([*map(str, runs), "--out", str(out)]) == 0
    page = out.read_text()
    assert "<script" not in page
    text = told(page)
    for name in ("one", "two", "kind"):
        assert mark.format(name) in text, name
    assert "data.tokenizer <script>tokenizer of one <script>tokenizer of two" in text
    assert "validation/<script>loss" in text


def test_one_run_shows_what_differs_from_the_defaults(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one", steps=3, lr="7e-4"))
    assert differing([run]) == {"optimizer.lr": [7e-4]}
    assert differing([run, run]) == {}


def test_a_damaged_run_is_told_with_what_can_be_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=3)
    (run / "config.yaml").write_text("train: {no_such_option: 1}")
    (run / "environment.json").write_text("[")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "loss": NaN, "tokens": 1e300, "mfu": "x", "step_time_s": null, ')
        file.write(f'"grad_norm": {10**400}, "validation/loss": NaN}}\n{{"iter')
    read = read_run(run)
    assert read.settings == {}
    assert read.values("loss") == [4.0, 2.0, 4 / 3]
    assert read.axes["tokens"] == [1000, 2000, 3000, 3000]
    assert read.axes["hours"] == [1 / 3600, 2 / 3600, 3 / 3600, 3 / 3600]
    assert read.validations == []
    out = tmp_path / "report.html"
    assert report.main([str(run), "--out", str(out)]) == 0
    assert "No config.yaml can be read." in told(out.read_text())


def write_loads(folder: Path, iterations: range, *, train_iters: int, resume: int = 0) -> list[dict[str, object]]:
    sink = ExpertLoadsSink(folder, train_iters=train_iters, resume_iteration=resume)
    for number in iterations:
        sink.on_step_end(StepEnd({"iteration": number}, expert_loads={1: (0.0, 6.0, 3.0), 4: (0.0, 0.0, 0.0)}))
    sink.on_stop(Stop(0, "finished"))
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_loads_are_written_over_their_mean_and_not_at_every_step_of_a_long_run(tmp_path: Path) -> None:
    lines = write_loads(tmp_path, range(1, 11), train_iters=1000)
    assert lines == [{"iteration": n, "layers.1": [0.0, 2.0, 1.0], "layers.4": [0.0, 0.0, 0.0]} for n in (5, 10)]
    lines = write_loads(tmp_path, range(6, 16), train_iters=1000, resume=5)
    assert [line["iteration"] for line in lines] == [5, 10, 15]


@pytest.mark.parametrize("name", ["none", "file"])
def test_what_is_no_run_is_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert report.main([str(tmp_path / name)]) == 2
    assert "name the folder of a run" in capsys.readouterr().err


def test_a_chart_places_the_extremes_at_its_edges() -> None:
    drawn = chart("loss", [Line("a", "red", [(10, 2.0), (20, 4.0)])], across="steps")
    assert 'points="0.0,1000.0 1000.0,0.0"' in drawn
    assert "2" in told(drawn)
    assert not chart("loss", [Line("a", "red", [])], across="steps")
    assert 'points="0.0,500.0' not in chart("flat", [Line("a", "red", [(1, 3.0), (2, 3.0)])], across="steps")


EVIL = "</style><script>alert(1)</script>\" ' & <img src=x onerror=alert(1)>"


def images_of(text: str) -> list[np.ndarray]:
    """The pictures of a page; nothing else may be loaded."""
    found = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(each.startswith("data:image/") for each in found)
    return [np.array(Image.open(BytesIO(base64.b64decode(each.partition(",")[2])))) for each in found]


def test_skipped_samples_have_their_reasons() -> None:
    skipped = [
        Skipped("a:3", "a", Reason.MISSING, EVIL),
        Skipped("a:2", "a", Reason.TOO_LONG, "2 of its turns", partly=True),
    ]
    text = skipped_samples(skipped, 5)
    assert "1 of 5 samples (20.0%)" in told(text)
    assert "a:3" in text
    assert "2 of its turns" in text
    assert "<script" not in text
    assert "all 5 samples can be used" in skipped_samples([], 5)


def test_text_keeps_its_spaces_and_its_image_tokens_are_counted() -> None:
    words = {0: "<i>", 1: "a", 2: "b", 3: EVIL}

    def decode(ids: list[int]) -> str:  # as SentencePiece: no space at the start
        return " ".join(words[token] for token in ids)

    text = marked([1, 0, 0, 2, 3], [False, False, False, False, True], features={0: "image"}, decode=decode)
    assert re.sub("<mark>.*</mark>", "M", text) == 'a<span class="image">image × 2</span> bM'
    assert "<mark> &lt;/style&gt;" in text
    assert "<script" not in text
    of_video = marked([0, 4, 4, 0], [False] * 4, features={0: "image", 4: "video"}, decode=decode)
    assert told(of_video) == "image × 1 video × 2 image × 1"


def test_pixels_come_back_from_patches() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    patches = patchify(pixels, 4, mean=mean, std=std)
    assert isinstance(patches, torch.Tensor)
    assert (unpatchified(patches, (2, 3), patch=4, mean=mean, std=std) == pixels).all()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_all(tmp_path_factory.mktemp("data"), samples=40)
    with (folder / "train.jsonl").open("a") as file:
        file.write("garbage {\n" + record("<image>\na cat ?", image="none.png") + "\n")
    return folder


def flags(data: Path) -> list[str]:
    return [*sources_of(data), "--seq-length", "96", "--packing-window", "64", "--no-shuffle"]


def test_what_is_found_in_files(data: Path) -> None:
    text = page(parse(flags(data)), most=6, title=EVIL)
    assert "<script" not in text
    said = told(text)
    assert "samples looked at 64" in said
    assert str(Reason.NOT_A_RECORD) in said
    assert str(Reason.MISSING) in said
    filled = re.search(r"positions filled ([\d.]+)%", said)
    assert filled is not None
    assert 50 < float(filled[1]) <= 100
    articles = text.split("<article>")[1:]
    assert len(articles) == 6
    assert {re.findall(r"--source-(\d)", article)[0] for article in articles} == {"0", "1"}
    pictured = next(article for article in articles if "<img" in article)
    assert images_of(pictured)[0].shape == (32, 32, 3)
    answers = re.findall(r"<mark>(.*?)</mark>", pictured, re.DOTALL)
    assert answers
    assert all(answer.endswith("&lt;|im_end|&gt;") for answer in answers)


def test_what_is_found_in_tars(data: Path, tmp_path: Path) -> None:
    tars = tmp_path / "tars"
    assert prepare([f"{data / 'train.jsonl'},image_root={data / 'images'}", str(tars)]) == 0
    given = ["--datasets", f"{tars},weight=3", str(data / "book.txt"), "--tokenizer", str(data / "tokenizer")]
    options = ["--seq-length", "96", "--packing-window", "48", "--run-dir", str(tmp_path / "run")]
    text = page(parse([*given, *options]), most=5, title="t")
    assert "samples looked at 48" in told(text)
    assert "tars 40 75.0% 75.0% book 20 25.0% 25.0%" in told(text)
    assert images_of(text)


def test_the_tool(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "page.html"
    assert main([*flags(data), "--out", str(out), "--samples", "3"]) == 0
    assert "train.jsonl:1" in told(out.read_text(encoding="utf-8"))
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{tokenizer: {data / 'tokenizer'}, datasets: [{{path: {data / 'book.txt'}}}]}}\n")
    assert main([str(config), "--out", str(out), "--packing-window", "32"]) == 0
    assert "book" in told(out.read_text(encoding="utf-8"))
    capsys.readouterr()
    assert main(["--seq-length", "64"]) == main(["--seq-length", "64", "--tokens"]) == 2
    assert main([str(tmp_path / "none.yaml")]) == 2
    assert main([f"{tmp_path}/none.json,image_root={tmp_path}"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 4
    assert all("--datasets" in each for each in said[:2])
    assert said[3].startswith("megavlm preview: --datasets")


def test_frames_of_a_video_have_their_times() -> None:
    frames = np.arange(3, dtype=np.uint8)[:, None, None, None].repeat(4, 1).repeat(4, 2).repeat(3, 3)  # [3, 4, 4, 3]
    pairs = np.stack([frames[[0, 1]], frames[[2, 2]]])  # two frames in a patch, the last one twice
    patches = pairs.reshape(2, 2, 2, 2, 2, 2, 3).transpose(0, 2, 4, 6, 1, 3, 5).reshape(8, 3 * 2 * 4) / 255
    normal = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    video = SimpleNamespace(
        film=SimpleNamespace(frames=(0, 5, 10), seconds=(0.0, 0.5, 1.0)),
        grids=((2, 2), (2, 2)),
        patches=lambda: torch.from_numpy(patches),
    )
    processor = SimpleNamespace(patch_size=2, video=SimpleNamespace(frames_per_patch=2, **normal))
    text = _image(SimpleNamespace(processor=processor), SimpleNamespace(images=[video]), 0)  # type: ignore[arg-type]
    assert [int(each.mean()) for each in images_of(text)] == [0, 1, 2]
    assert told(text) == "video: 3 frames of 4×4 pixels 0.00 s 0.50 s 1.00 s"


@pytest.mark.parametrize(
    ("agree", "score"),
    [
        (1, 0.3),  # nine ways to leave out another: min(1, 1/3), one to leave it out: 0 → 9/10 · 1/3
        (2, 0.6),  # (8 · 2/3 + 2 · 1/3) / 10
        (3, 0.9),  # (7 · 1 + 3 · 2/3) / 10
        (4, 1.0),
    ],
)
def test_vqa_accuracy_leaves_each_annotator_out(agree: int, score: float) -> None:
    assert vqa_accuracy("Red.", ["red"] * agree + ["blue"] * (10 - agree)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Two", "2"),
        ("none", "0"),
        ("A red, and the blue", "red and blue"),
        ("1,000", "1000"),
        ("U.S.A.", "usa"),
        ("yes/no", "yes no"),  # no space beside it: a space takes its place
        ("yes/ no", "yes no"),  # a space beside it: it goes
        ("1,000 (about)", "1000 about"),
        ("dont", "don't"),
        ("couldn'tve", "couldn't've"),
        ("y'allll", "y'all'll"),
        ("ow's'at", "'ow's'at"),
        ("somebody'd", "somebodyd"),
        ("shes", "shes"),  # not among those that the evaluation knows
        ("two\nthirds\t", "2 thirds"),
    ],
)
def test_answers_are_normalised_as_in_vqas_evaluation(answer: str, expected: str) -> None:
    assert normalised(answer) == expected


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        ("Coca Cola", ["coca  cola"], 1.0),
        ("cola", ["cole"], 0.75),
        ("ab", ["ax"], 0.0),  # distance 1/2 is not below the threshold
        ("abc", ["abx"], 2 / 3),
        ("kitten", ["fitting", "mitten"], 5 / 6),  # the best reference counts
        ("", ["x"], 0.0),
    ],
)
def test_anls(answer: str, references: list[str], score: float) -> None:
    assert anls(answer, references) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("95", "100", True),
        ("105.1", "100", False),
        ("-10.4", "-10", True),
        ("0.1", "0", False),  # a reference of 0 must be met
        ("0.0", "0", False),  # as a text
        ("12%", "0.12", True),
        ("12", "0.12", False),
        ("nan", "5", False),
        ("7", "infinity", False),  # every number is within 5 % of infinity
        ("Germany", "germany", True),
        ("2019", "2019.", True),
    ],
)
def test_relaxed_accuracy(answer: str, reference: str, right: bool) -> None:
    assert relaxed_accuracy(answer, [reference]) == float(right)


def test_exact_match_ignores_case_space_and_a_full_stop() -> None:
    assert exact_match(" A  Dog. ", ["cat", "a dog"]) == 1.0
    assert exact_match("a dog..", ["a dog"]) == 0.0
    assert exact_match("dog", ["a dog"]) == 0.0


CHOICES = ["a cat", "a dog", "the apple tree", "dogs"]


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        *((text, "B") for text in ("B", "b", "(B)", "[B]", "B.", "B: a dog", "b) a dog")),
        *((text, "B") for text in ("The answer is B", "Answer: (b).", "Option B", "The correct choice is B, I think")),
        *((text, "B") for text in ("A dog.", "It is a dog", "The answer is a dog", "I think B")),
        ("A", "A"),
        ("It must be A", "A"),
        *((text, "A") for text in ("**A** it is", "The answer is **A** as it purrs", "<answer>A</answer> is mine")),
        ("A picture of D is there", "D"),  # "A" is an article
        *((text, None) for text in ("", "maybe", "E", "B or C", "both a cat and a dog", "the answer is not clear")),
        ("The answer is B. Or the answer is D.", None),
    ],
)
def test_the_letter_of_an_answer(answer: str, letter: str | None) -> None:
    assert chosen_letter(answer, CHOICES) == letter


def test_multiple_choice_takes_letters_and_texts_as_references() -> None:
    assert multiple_choice("B", ["a dog"], CHOICES) == multiple_choice("it is a dog", ["B"], CHOICES) == 1.0
    assert multiple_choice("maybe", ["B"], CHOICES) == 0.0
    assert question_with_choices("Which?", ["x", "y"]).splitlines()[:3] == ["Which?", "A. x", "B. y"]


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I: the score method
        (0, 20, 0.0, 0.1611),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilsons_interval(successes: int, total: int, low: float, high: float) -> None:
    assert wilson(successes, total) == pytest.approx((low, high), abs=5e-5)


def test_wilsons_interval_stays_within_0_and_1_although_floats_are_rounded() -> None:
    assert wilson(0, 38)[0] == 0.0  # -1.4e-17 without care, told as -0.0 %
    assert wilson(16, 16)[1] == 1.0


def test_the_bootstrap_is_near_the_normal_interval_of_many_scores() -> None:
    scores = [0.0, 0.3, 0.6, 1.0] * 250  # mean 0.475, standard deviation 0.3700, of the mean 0.01170
    low, high = bootstrap(scores)
    assert (low, high) == pytest.approx((0.475 - 1.96 * 0.0117, 0.475 + 1.96 * 0.0117), abs=1e-3)
    assert bootstrap(scores) == (low, high)
    assert bootstrap([0.5] * 7) == (0.5, 0.5)
