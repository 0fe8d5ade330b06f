"""Answers to held-out prompts while a run trains: the same on every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import slow
from tests.support.data_files import write_held_out
from tests.support.html import told
from tests.support.pool import Pools
from tests.support.training import LEAN, train

# Larger weights than training begins with, and a high rate: answers differ from prompt to prompt and change.
RUN = [
    *LEAN,
    *"--images-per-sample 1 --image-sizes --train-iters 3 --lr 1e-2 --lr-warmup-iters 0 --seq-length 96".split(),
    *"--init-method-std 0.2 --packing-window 16 --num-workers 0 --no-save".split(),
]
ASKED = "--sample-interval 2 --eval-interval 0".split()
ASKED += "--set evaluation.sample_count=5 evaluation.sample_max_new_tokens=6".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_held_out(tmp_path_factory.mktemp("files"), samples=9, lines=4)


def sources(folder: Path) -> list[str]:
    held = folder / "held"
    training = f"{folder / 'train.jsonl'},image_root={folder / 'images'}"
    validation = [f"{held / 'chat.jsonl'},image_root={held / 'images'}", str(held / "book.txt")]
    return ["--datasets", training, "--tokenizer", str(folder / "tokenizer"), "--validation", *validation]


def said(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of answers.jsonl."""
    return [json.loads(line) for line in (run_dir / "samples" / "answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one(run_once, folder: Path):
    """A run on one process with some flags."""
    return lambda flags="": run_once(1, [*RUN, *sources(folder), *ASKED, *flags.split()])


FROZEN = "--freeze vision projector"
LORA = "--lora-rank 4 --lora-targets language --freeze vision projector"


@pytest.mark.parametrize(
    ("world", "layout", "model"),
    [
        (2, "--pp 2 --vpp 2 --micro-batch-size 2", ""),
        slow(2, "--data-parallel-sharding full --num-workers 1", ""),
        slow(4, "--pp 2 --placement colocated --encode-ahead", FROZEN),
        slow(4, "--tp 2 --data-parallel-sharding optimizer_gradients", LORA),
        slow(2, "--tp 2", "--no-packing --packing-window 2048"),
    ],
)
def test_any_layout_gives_the_same_answers(pools, folder, one, tmp_path, world, layout, model):
    pools(world).run(train, [*RUN, *sources(folder), *ASKED, *layout.split(), *model.split()], str(tmp_path))
    expected = said(one(model))
    assert [line["iteration"] for line in expected] == [0, 2, 3]
    assert [each["label"].partition(".")[0] for each in expected[0]["answers"]] == ["chat", "book"] * 2 + ["chat"]
    answers = [[each["answer"] for each in line["answers"]] for line in expected]
    assert len(set(answers[0])) > 2, "the prompts make no difference"
    assert answers[0] != answers[1] != answers[2], "training makes no difference"
    assert said(tmp_path) == expected
    assert all(answer in told((tmp_path / "samples" / "index.html").read_text()) for answer in answers[2])


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_page(pools: Pools, folder: Path, one: Any, tmp_path: Path) -> None:
    """It had gone further than its checkpoint."""
    argv = [*RUN, *sources(folder), *ASKED, "--save", "--save-interval", "1", "--train-iters", "4"]
    pools(1).run(train, argv, str(tmp_path / "whole"))
    run_dir = tmp_path / "halves"
    pools(2).run(train, [*argv, "--train-iters", "3"], str(run_dir))
    (run_dir / "checkpoints" / "iter_0000003" / "manifest.json").unlink()
    assert [line["iteration"] for line in said(run_dir)] == [0, 2, 3]
    pools(2).run(train, [*argv, "--tp", "2"], str(run_dir))
    assert said(run_dir) == said(tmp_path / "whole")
    shown = [told((path / "samples" / "index.html").read_text()) for path in (run_dir, tmp_path / "whole")]
    assert shown[0].replace("halves", "whole") == shown[1]
