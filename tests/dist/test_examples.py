"""The commands of the documents, page by page, as they are printed there."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.examples import PAGES, Example, environment, examples, write_folder
from tests.support.forked import PATIENCE

# Runs are shorter than a user's: three steps, of which each saves.
SHORT = ("--train-iters", "3", "--save-interval", "2", "--num-workers", "0")
FIRST = ("python", "pretrain_vlm.py", "--init-from", "HF_DIR", "--datasets", "train.jsonl", "--seq-length", "128")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples")
    write_folder(path)
    run(path, (*FIRST, *SHORT, "--run-dir", "RUN_DIR"))
    other = ("--train-iters", "4", "--no-save", "--num-workers", "0", "--run-dir", "OTHER_RUN")
    run(path, ("torchrun", "--nproc-per-node", "2", *FIRST[1:], *other))
    return path


def run(folder: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["bash", "-c", shlex.join(words)],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"


def shortened(example: Example) -> tuple[str, ...]:
    name, argv = example.command
    trains = name == "train" and not {"--dry-run", "--help"} & set(argv)
    profiled = ("--train-iters", "12") if "--profile" in argv else ()
    short = SHORT[2:] if "--epochs" in argv else SHORT
    warm = ("--lr-warmup-iters", "0") if "--lr-warmup-iters" in argv else ()  # a user's is longer than three steps
    split = ("--validation-split", "0.5") if "--validation-split" in argv else ()  # of a few records
    return (*example.words, *short, *profiled, *warm, *split) if trains or "local" in argv else example.words


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page: Path, folder: Path) -> None:
    shutil.rmtree(folder / "runs/latest", ignore_errors=True)  # of another page: commands without --run-dir resume it
    for example in examples(page):
        if example.elsewhere or example.words[1] == "examples/first_run/small_model.py":
            continue
        run(folder, shortened(example))
