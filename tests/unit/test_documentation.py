"""Documents name only what exists: files, `make` targets, commands, extras, flags and figures."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from megavlm.command_line import parsing
from megavlm.planner.advice import ERROR
from megavlm.programs.main import COMMANDS
from megavlm.rules.extensions import load_extensions
from megavlm.rules.fields import options
from tests.support import extensions

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "benchmarks/README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TAKES_RUN_FLAGS = ("convert", "launch", "logprobs", "plan", "preview")
# Flags of other programs: torchrun, tensorboard, mlflow, pip, docker, SLURM.
FOREIGN_FLAGS = {
    *"--nproc-per-node --nnodes --max-restarts --rdzv-backend --rdzv-endpoint --rdzv-id --shutdown-timeout".split(),
    *"--logdir --backend-store-uri --local-dir".split(),
    *"--signals-to-handle --signal --no-build-isolation --build-arg".split(),
    *"--tensor-parallel-size --limit-mm-per-prompt --enable-lora --lora-modules --model-path --tp".split(),  # servers
    *"--model --tasks --include --output --batch".split(),  # lmms-eval's, up to the underscore
    "--to",  # of `make test-all`
    *"--time --partition --exclude --batch --ntasks-per-node --gpus-per-task --kill-on-bad-exit".split(),
}
# Flags in messages alone: torchrun's, SLURM's, those of pip and of Hugging Face's hub, and examples.
FOREIGN_IN_MESSAGES = {
    *"--shutdown --jobs --shm-size --force-reinstall --no-deps --no-cache-dir --index-url".split(),
    *"--repo-type --revision".split(),
    "--flag",
}
SUFFIXES = (".py", ".md", ".sh", ".toml", ".cpp")
MODEL_KEY = re.compile(
    r"(?<![\w./])(model\.(?:(?:vision|projector|language|experts|objective)\.)(?:[a-z_]+\.)*)([a-z_0-9]+)\b(?!\.)"
)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


@cache
def commands_of(name: str) -> set[str]:
    """Return the words that the arguments of a command may begin with, if it has commands of its own."""
    if name == "train":
        return set()
    parser = importlib.import_module(COMMANDS[name][0])._parser()
    return set().union(*(each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)))


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the flags of a parser and of its subcommands."""
    found = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*(flags_of(each) for each in action.choices.values()))
    return found


@cache
def programs() -> dict[str, set[str]]:
    """Return the flags of each program, by its path."""
    extensions.install()  # docs/extensions.md shows those of examples/
    load_extensions(extensions.PACKAGES)
    run = flags_of(parsing._parser(all_options=True))
    extensions.forget()
    found = {"pretrain_vlm.py": run, "megavlm train": run}
    for name in COMMANDS.keys() - {"train"}:
        own = flags_of(importlib.import_module(COMMANDS[name][0])._parser())
        found[f"megavlm {name}"] = own | (run if name in TAKES_RUN_FLAGS else set())
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        own = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', path.read_text(encoding="utf-8")))
        found[f"benchmarks/{path.name}"] = {*own, "--help"}
    # The branches of a shell script's `case` that take options are its parser.
    branches = re.findall(r"^ +(--[a-z |-]+)\)", (ROOT / "tools/gpu_check.sh").read_text(), flags=re.MULTILINE)
    return {**found, "tools/gpu_check.sh": set(" | ".join(branches).split(" | "))}


@cache
def files() -> set[str]:
    """Return the files of the repository and their folders, relative to its root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {*listed, *(str(parent) for path in listed for parent in Path(path).parents)}


def code_of(text: str) -> Iterator[str]:
    """Yield the code spans and the lines of code blocks of a document, continued lines joined."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    .*$", text, flags=re.MULTILINE)
    for block in (*fenced, *indented):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def unknown_flags(text: str) -> Iterator[str]:
    """Yield flags that no program has, and flags of commands whose program does not have them."""
    known = set().union(*programs().values(), FOREIGN_FLAGS)
    for flag in FLAG.findall(text):
        # `--projector-…` names all flags that begin so.
        if flag not in known and not (flag.endswith("-") and any(each.startswith(flag) for each in known)):
            yield flag
    for code in code_of(text):
        for program, own in programs().items():
            _, found, arguments = code.partition(f"{program} ")
            for flag in FLAG.findall(re.split("#|&&", arguments)[0]) if found else ():
                if flag not in own | FOREIGN_FLAGS:
                    yield f"{flag} of {program}"


@cache
def known_keys() -> set[str]:
    extensions = {"model.objective.losses", "model.projector.connectors.pooled.tokens"}  # of examples/
    return {option.key for option in options()} | extensions


def unknown_keys(text: str) -> Iterator[str]:
    """Yield each key after --set, and each key of `model`, that no option has; `model.projector.…` means a section."""
    keys = known_keys()
    for section, key in re.findall(r"--set '?((?:[a-z_]+\.)+)([a-z_0-9]+)", text) + MODEL_KEY.findall(text):
        if section + key not in keys and not any(each.startswith(f"{section}{key}.") for each in keys):
            yield section + key


def missing_files(text: str, folder: Path) -> Iterator[str]:
    """Yield paths in code spans and targets of links that name no file of the repository."""
    for code in code_of(text):
        for word in re.findall(r"(?<![\w./:*-])[\w./*-]+", code):
            path = word.rstrip(".").removesuffix("/")
            ours = path.split("/")[0] in ("docs", "tests", "tools", "benchmarks", "megavlm") and "/" in path
            if (ours or path.endswith(SUFFIXES)) and not exists(path):
                yield path
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        if not (folder / target).exists():
            yield target


def missing_headings(text: str, document: Path) -> Iterator[str]:
    """Yield anchors of links that no heading of the linked document has."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        linked = document.parent / target if target else document
        headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if anchor not in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}:
            yield f"{target}#{anchor}"


def exists(path: str) -> bool:
    """Whether a path, from the root or from any folder below it, is one of the repository's."""
    pattern = re.compile(rf"(.*/)?{re.escape(path).replace(chr(92) + '*', '[^/]*')}")
    return any(pattern.fullmatch(each) for each in files())


def missing_targets(text: str) -> Iterator[str]:
    """Yield targets of `make` in code spans that the Makefile does not have."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for code in code_of(text):
        yield from (target for target in re.findall(r"\bmake ([a-z-]+)", code) if target not in targets)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_names_what_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert list(unknown_flags(text)) == []
    assert list(unknown_keys(text)) == []
    assert list(missing_files(text, document.parent)) == []
    assert list(missing_targets(text)) == []
    assert list(missing_headings(text, document)) == []


def test_what_does_not_exist_is_found() -> None:
    text = (
        "Run `make tset` or `megavlm chat --lora-rank 4 --seed 8`, `--projector-…`, `--projektor-…`, `--nope`;"
        " see `megavlm/data/nothing.py`, `nothing.py`, `data/loader.py`, `tests/nowhere/`, [there](docs/nothing.md),"
        " [here](docs/gpu.md#fp8), [not here](docs/gpu.md#fp9)."
    )
    assert set(unknown_flags(text)) == {"--projektor-", "--nope", "--lora-rank of megavlm chat"}
    assert set(
        unknown_keys("`model.language.nope`, `--set data.nope=1 `, `model.vision.qk_norm`, `model.projector.…`")
    ) == {"model.language.nope", "data.nope"}
    nowhere = {"megavlm/data/nothing.py", "nothing.py", "tests/nowhere", "docs/nothing.md"}
    assert set(missing_files(text, ROOT)) == nowhere
    assert list(missing_targets(text)) == ["tset"]
    assert list(missing_headings(text, ROOT / "README.md")) == ["docs/gpu.md#fp9"]


def messages_of(path: Path) -> Iterator[str]:
    """Yield the sentences among the strings of a module, without docstrings: an f-string with … for each value, but
    with the name of a command that `program` returns.
    """
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    strings = [node for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]
    inside = {id(part) for node in strings if isinstance(node, ast.JoinedStr) for part in node.values}
    inside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in strings:
        text = said(node)
        if id(node) not in inside and " " in text and not re.search(r"--[\w-]+[:)]", text):  # styles have such names
            yield text


def said(node: ast.expr) -> str:
    match node:
        case ast.JoinedStr():
            return "".join(map(said, node.values))
        case ast.Constant(value=str()):
            return str(node.value)
        case ast.FormattedValue(value=ast.Call(func=ast.Name(id="program"), args=[ast.Constant(value=command)])):
            return f"megavlm {command}"
    return "…"


@cache
def known_flags() -> set[str]:
    return set().union(*programs().values(), FOREIGN_FLAGS, FOREIGN_IN_MESSAGES)


@cache
def choices_of() -> dict[str, tuple[str, ...]]:
    return {flag: option.kind.choices for option in options() for flag in option.flags if option.kind.choices}


@cache
def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


def wrong_in_message(text: str) -> Iterator[str]:
    """Yield what a message names and what does not exist: flags, their values, commands, extras, files."""
    known, choices = known_flags(), choices_of()
    yield from unknown_keys(text)
    for flag in FLAG.findall(text):
        # `--no-…` and `--vision-…` stand for flags that begin so.
        if flag not in known and not (flag.endswith("-") and any(each.startswith(flag) for each in known)):
            yield flag
    for flag, value in re.findall(r"\b(?:use|add|write|with|or|is) (--[a-z-]+) ([a-z][\w-]*)", text):
        if flag in choices and value not in (*choices[flag], "or", "and", "to", "out"):
            yield f"{flag} {value}"
    for command, rest in re.findall(r"\b(?:`|python -m )?megavlm (?=[a-z]+\b)([a-z]+)((?: [a-z-]+)?)", text):
        if command not in COMMANDS:
            if f"`megavlm {command}" in text or f"run megavlm {command}" in text:
                yield f"megavlm {command}"
        elif rest and commands_of(command) and rest.strip() not in commands_of(command):
            yield f"megavlm {command}{rest}"
    for command, arguments in re.findall(r"\bmegavlm ([a-z]+)\b([^`;:,\n]*)", text):
        for flag in FLAG.findall(arguments):
            if flag not in programs().get(f"megavlm {command}", known) | FOREIGN_FLAGS:
                yield f"{flag} of megavlm {command}"
    for named in re.findall(r"megavlm\[([a-z,-]+)\]", text):
        yield from (f"megavlm[{extra}]" for extra in named.split(",") if extra not in extras())
    for file in re.findall(r"(?<![\w./-])(?:docs|tools|benchmarks|examples|launch|recipes)/[\w./-]*\w", text):
        if not exists(file):
            yield file


def test_messages_name_what_exists() -> None:
    paths = ROOT.glob("megavlm/**/*.py")
    wrong = [(path.name, each) for path in paths for text in messages_of(path) for each in wrong_in_message(text)]
    assert wrong == []


def test_what_a_message_invents_is_found() -> None:
    text = (
        "give --nope, add --precision fp61 or --lr-decay-style WSD, run `megavlm exprot`, megavlm convert exprot RUN,"
        " megavlm chat --lora-rank 4, pip install 'megavlm[vido]', see docs/nothing.md and docs/data.md"
    )
    assert set(wrong_in_message(text)) == {
        "--nope",
        "--precision fp61",
        "megavlm exprot",
        "megavlm convert exprot",
        "--lora-rank of megavlm chat",
        "megavlm[vido]",
        "docs/nothing.md",
    }


MEASURED = ROOT / "docs/reports/measured.md"
# `1.05 ×` but not the `4 ×` of a size (`4 × 4 pixels`) or of a layout (`TP × PP`).
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)? (?:×(?! [A-Z\d])|%|s\b|ms\b|min\b|MiB\b|GiB\b|TFLOP/s)")
TOLERANCE = re.compile(r"\b1e-\d+\b")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("measured")


def test_the_table_is_made_of_the_records(measured: Any) -> None:
    text = MEASURED.read_text(encoding="utf-8")
    assert "| CPU training step, one process" in text
    assert measured.documented(text) == text, "renew it: python benchmarks/measured.py --write"


def test_readme_shows_only_measured_figures() -> None:
    figures = FIGURE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert figures
    assert set(figures) <= set(FIGURE.findall(MEASURED.read_text(encoding="utf-8")))


def test_a_figure_is_the_median_of_the_runs_of_an_idle_machine(measured: Any) -> None:
    row = measured.Row("speed", "x", "run", lambda record: record.get("speed"), by_the_clock=True, since="2026-11-02")
    common = {"cpu": "Some", "cores": 2, "python": "3.11", "torch": "2", "megatron-core": "1", "transformers": "5"}
    found = [
        {**common, "date": f"2026-11-0{day}", "load_average_before": load, **speed}
        for day, load, speed in (
            (1, 0.1, {"speed": 9.0}),  # of another program
            (2, 0.1, {"speed": 1.0}),
            (3, 9.0, {"speed": 8.0}),  # of a busy machine
            (4, 0.2, {"speed": 1.5}),
            (5, 0.3, {"speed": 1.1}),
            (6, 0.3, {}),
        )
    ]
    cells = measured.line(row, measured.samples(row, found), [measured.machine(found[0])])
    assert cells == "| speed | 1.10 × (1.00 to 1.50) | 3 runs, 2026-11-05, A 0.1–0.3 |"
    busy = measured.line(row, measured.samples(row, found[2:3]), [measured.machine(found[0])])
    assert busy == "| speed | 8.00 × | one run, 2026-11-03, A 9.0, **busy** |"
    assert list(measured.once([cells, busy, busy])) == [cells, busy, "| speed | 8.00 × | |"]


def rows() -> dict[str, tuple[str, str]]:
    """Return the figure and the number of runs of each row of the tables, which are made of the records."""
    lines = MEASURED.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    found = [row for row in cells if len(row) == 3]
    runs = accumulate((row[2] for row in found), lambda above, own: own or above)  # an empty cell repeats the one above
    return {row[0]: (row[1].partition(" (")[0], made.split(",")[0]) for row, made in zip(found, runs, strict=True)}


LLAVA = "LLaVA-1.5-7B, bf16"
# Where README shows one of these figures, the same sentences show all of them, and say how many runs there were.
TOGETHER = (
    (
        f"{LLAVA}: speed over Transformers with autocast",
        f"{LLAVA}: speed over Transformers wholly in bf16",
        f"{LLAVA}: step",
        f"{LLAVA} of JPEG files: step",
        f"{LLAVA}: whole step",
        f"{LLAVA}: whole step, MFU",
        f"{LLAVA}: language part",
        "LLaVA-1.5-7B, fp8: whole step",
        "LLaVA-1.5-7B, fp8: speed over Transformers with autocast",
    ),
    (
        "the same: throughput of iterations that stay, over a run without",
        "ten faults in 20 minutes, two processes: time in steps that stay, over a run without",
    ),
    ("CPU training step, one process: throughput over Transformers'",),
    ("median error of step times, 16 configurations of two processes",),
)


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_readme_shows_a_figure_with_those_that_qualify_it(names: tuple[str, ...]) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What is measured")[2]
    known = rows()
    figure, runs = known[names[0]]
    bullets = [" ".join(bullet.split()) for bullet in section.split("\n- ")]
    (said,) = (bullet for bullet in bullets if figure in bullet)
    assert runs in said, f"README does not say that {figure} is of {runs}"
    for name in names:
        assert known[name][0] in said, f"README shows {figure} without {known[name][0]}: {name}"
    if names[0].startswith("median error"):
        assert figure == f"{ERROR:.1%}".replace("%", " %"), "ties of `megavlm plan` are by the error of a record"
        assert "2026-11-21" in said
        assert "until it is measured again" in said


def test_the_whole_step_stands_before_its_language_part() -> None:
    for name in ("README.md", "docs/reports/measured.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert text.index("430 TFLOP/s") < text.index("611 TFLOP/s"), name


def test_what_is_said_of_all_tests_is_their_record() -> None:
    record = (ROOT / "benchmarks/records/test_all/summary.md").read_text(encoding="utf-8")
    passed, failed, skipped = re.findall(r"(\d+) (?:passed|failed|skipped)", record)[:3]
    assert len(re.findall(r"\bcommits? ([\da-f, ]+)\.", record)[0].split(", ")) == 1
    left = [line for line in record.splitlines() if line.startswith("- `") and ": passed at " not in line]
    assert left == [], "the page says that what failed has passed since"
    said = " ".join(MEASURED.read_text(encoding="utf-8").split())
    expected = (f"{int(passed):,} have passed", f"{skipped} were skipped", f"{failed} failed")
    assert [words for words in expected if words not in said] == []


def test_each_fault_has_its_tests() -> None:
    page = re.sub(r"^\|.+\n\|-.+\n", "", (ROOT / "docs/faults.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    told = re.split(r"\n(?! )", (ROOT / "tests/unit/faults.txt").read_text(encoding="utf-8").strip())
    named = {row: tests for row, *tests in (each.split("\n    ") for each in told)}
    assert list(named) == re.findall(r"^\| (.+?) \|", page, flags=re.MULTILINE)
    for row, tests in named.items():
        assert tests, f"no test of: {row}"
        for path, name in (test.split("::") for test in tests):
            assert f"\ndef {name}(" in (ROOT / "tests" / path).read_text(encoding="utf-8"), f"{path} has no {name}"


def claims() -> Iterator[tuple[str, str]]:
    """Yield the tolerance and the test of each row of the table of tests."""
    section = MEASURED.read_text(encoding="utf-8").partition("## What tests hold")[2]
    for _, tolerance, test in re.findall(r"^\| (.+) \| (.+) \| `(tests/.+)` \|$", section, flags=re.MULTILINE):
        yield tolerance, test


def test_tolerances_are_those_of_the_tests() -> None:
    found = list(claims())
    assert len(found) > 10
    for tolerance, tests in found:
        text = "".join((ROOT / test).read_text(encoding="utf-8") for test in tests.split("`, `"))
        for helper in re.findall(r"^from (tests[.\w]+) import", text, flags=re.MULTILINE):
            path = ROOT / (helper.replace(".", "/") + ".py")
            text += path.read_text(encoding="utf-8") if path.exists() else ""
        for number in TOLERANCE.findall(tolerance):
            assert number in text, f"{tests} do not say {number}"
