"""What commands propose for data, files and arguments is in their message, and leads on when it is done."""

from __future__ import annotations

import gzip
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megavlm.errors import UserError
from megavlm.programs.main import COMMANDS
from megavlm.programs.train import train
from tests.support.data_files import write_tokenizer

TRAIN = "train --dry-run --tokenizer {d}/tokenizer --train-iters 2"

# A command line, and what it is once the message's advice is taken. `{d}` is a folder of data.
REMEDIES = {
    "images elsewhere": (
        "prepare {d}/records.jsonl {d}/out",
        "prepare {d}/records.jsonl,image_root={d}/images {d}/out",
    ),
    "columns": (
        f"{TRAIN} --datasets {{d}}/odd.jsonl",
        f"{TRAIN} --datasets {{d}}/odd.jsonl,columns=question:q+answer:a",
    ),
    "preferences": (
        f"{TRAIN} --datasets {{d}}/dpo.jsonl",
        f"{TRAIN} --datasets {{d}}/dpo.jsonl,columns=response:chosen",
    ),
    "pairs": (f"{TRAIN} --datasets {{d}}/pairs.jsonl", f"{TRAIN} --datasets {{d}}/pairs.jsonl --objective contrastive"),
    "no pairs": (
        f"{TRAIN} --datasets {{d}}/text.jsonl --objective contrastive",
        f"{TRAIN} --datasets {{d}}/text.jsonl",
    ),
    "packed": (f"{TRAIN} --datasets {{d}}/text.jsonl.gz", f"{TRAIN} --datasets {{d}}/text.jsonl"),
    "two with a comma": (
        f"{TRAIN} --datasets {{d}}/text.jsonl,{{d}}/more.jsonl",
        f"{TRAIN} --datasets {{d}}/text.jsonl {{d}}/more.jsonl",
    ),
    "a part": (f"{TRAIN} --datasets {{d}}/text.jsonl#100", f"{TRAIN} --datasets {{d}}/text.jsonl"),
    "tokenizer": (
        "train --dry-run --datasets {d}/text.jsonl",
        "train --dry-run --datasets {d}/text.jsonl --tokenizer {d}/tokenizer",
    ),
    "a file without --config": ("train --dry-run {d}/run.yaml", "train --dry-run --config {d}/run.yaml"),
    "a folder as --config": ("train --dry-run --config {d}", "train --dry-run --config {d}/run.yaml"),
    "a run's file as a sweep": ("sweep {d}/run.yaml --dry-run", "sweep {d}/grid.yaml --dry-run"),
    "flags of the run": (
        "launch kubernetes --image i --nodes 1 --gpus-per-node 1 --dry-run --recipe demo --run-dir /runs/a",
        "launch kubernetes --image i --nodes 1 --gpus-per-node 1 --dry-run -- --recipe demo --run-dir /runs/a",
    ),
    "a folder in a store": ("prepare {d}/text.jsonl gs://bucket/tars", "prepare {d}/text.jsonl {d}/stored"),
    "a folder that nobody can make": ("prepare {d}/text.jsonl /proc/tars", "prepare {d}/text.jsonl {d}/elsewhere"),
    "a name of the hub to plan": ("plan --gpus 1 --model acme/vlm", "plan --gpus 1 --hf acme/vlm"),
}

# What is missing then.
LATER = {
    "flags of the run": "--run-dir /runs/a is on the disk of each pod",
    "a name of the hub to plan": "--hf acme/vlm is neither",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_tokenizer(folder / "tokenizer")

    def write(name: str, **record: object) -> None:
        (folder / name).write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")

    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    write("text.jsonl", conversations=said)
    write("more.jsonl", conversations=said)
    write("records.jsonl", image="red.png", conversations=[{"from": "human", "value": "<image>?"}, said[1]])
    write("odd.jsonl", q="Hi", a="Yes")
    write("dpo.jsonl", prompt="Hi", chosen="Yes", rejected="No")
    write("pairs.jsonl", query="Hi", positive="Yes")
    (folder / "text.jsonl.gz").write_bytes(gzip.compress((folder / "text.jsonl").read_bytes()))
    (folder / "images").mkdir()
    from PIL import Image

    Image.new("RGB", (8, 8)).save(folder / "images/red.png")
    (folder / "run.yaml").write_text("train: {train_iters: 2}\n")
    (folder / "grid.yaml").write_text(
        f"run_dir: {folder}/sweep\nflags: --config {folder}/run.yaml\nproduct: {{lr: [1e-3]}}\n"
    )
    return folder


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that runs a command and returns its complaint, empty for none."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def answer(line: str) -> str:
        command, *argv = line.split()
        if command == "train":
            try:
                train(argv)
            except UserError as error:
                return str(error)
            return ""
        status = importlib.import_module(COMMANDS[command][0]).main(argv)
        said = capsys.readouterr().err.strip()
        assert status in (0, 2)
        return said.partition(": ")[2] if status else ""

    return answer


@pytest.mark.parametrize("case", REMEDIES)
def test_what_a_message_proposes_leads_on(case: str, data: Path, answer: Callable[[str], str]) -> None:
    mistaken, mended = (line.format(d=data) for line in REMEDIES[case])
    message = answer(mistaken)
    new = set(re.findall(r"(?<![\w-])--[a-z-]+|[a-z_]+(?==)", mended))
    new -= set(re.findall(r"(?<![\w-])--[a-z-]+|[a-z_]+(?==)", mistaken))
    assert message
    assert {word for word in new if word not in message} == set()
    after = answer(mended)
    assert after != message
    assert LATER[case] in after if case in LATER else not after
