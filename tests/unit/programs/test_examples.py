"""Every command that a page prints is one that its program takes; `tests/dist/test_examples.py` runs them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from megavlm.command_line.configuration import configured
from megavlm.command_line.parsing import parse
from megavlm.programs.main import COMMANDS
from tests.support.examples import ELSEWHERE, PAGES, Example, examples, write_folder

EXAMPLES = [example for page in PAGES for example in examples(page)]
TAKES_MORE = ("convert", "plan", "preview", "launch", "logprobs", "sweep")  # flags of a run, options of a scheduler


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples")
    write_folder(path)
    return path


def test_every_page_is_read() -> None:
    assert len(EXAMPLES) > 30
    assert {"README.md", "data.md", "models.md", "planner.md", "layouts.md"} <= {each.page for each in EXAMPLES}
    for start in ELSEWHERE:
        assert any(each.text.startswith(start) for each in EXAMPLES), f"{start} is on no page any more"


def test_every_example_is_taken_as_printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are checked for the number of processes that the page starts, with the models that it names."""
    monkeypatch.chdir(folder)
    made = {"best.yaml", "mine.yaml"}  # by the commands before
    for example in EXAMPLES:
        if example.elsewhere or example.words[:2] == ("python", "examples/first_run/small_model.py"):
            continue
        name, argv = example.command
        if name == "train" and "--help" not in argv and not made & set(argv):
            configured(argv, world=max(example.world, replica(argv)))
        elif name != "train":
            parser = importlib.import_module(COMMANDS[name][0])._parser()
            _, rest = parser.parse_known_args(argv[: argv.index("--")] if "--" in argv else argv)
            assert not rest or name in TAKES_MORE, f"{example.page}: {rest} in {example.text}"


def replica(argv: tuple[str, ...]) -> int:
    """Return the number of processes of a model replica, which --dry-run assumes."""
    parallel = parse(argv).parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size


def test_a_command_is_found_in_every_spelling() -> None:
    spellings = ("python -m megavlm plan -x", "megavlm plan -x", "torchrun --nproc-per-node 2 -m megavlm plan -x")
    assert {Example("", tuple(text.split())).command for text in spellings} == {("plan", ("-x",))}
