"""Cards: what tests measured of each Hugging Face family, as `cards/FAMILY.yaml` and docs/reports/cards.md.

    python -m tests.support.cards               # run all tests that measure gates, and write all cards (`make cards`)
    python -m tests.support.cards -k gemma3     # renew the figures of some tests; the others stay, with their dates
    python -m tests.support.cards --render      # a card for each family that is registered by now; run nothing
    python -m tests.support.cards --age         # how many commits changed the program since each card's figures

Arguments that are not listed by --help go to pytest. A gate whose test fails is written down as failed, and the exit
status is 1. A gate that no test measures is "not measured".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tests.support.card_page import page
from tests.support.gates import GATES, Gate, larger

ROOT = Path(__file__).parents[2]
CARDS, DOCUMENT = ROOT / "cards", ROOT / "docs" / "reports" / "cards.md"
TESTS = (
    *("tests/parity/test_hf_*.py", "tests/parity/test_video*.py", "tests/parity/test_files_hf.py"),
    *("tests/parity/test_answers.py", "tests/parity/test_language.py", "tests/parity/test_vision.py"),
    "tests/parity/test_lora.py",
    *("tests/dist/test_hf*.py", "tests/dist/test_compose.py", "tests/dist/test_lora.py"),
)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where there is libyaml
HEAD = "# Made by `make cards`; not edited by hand. Commands run from the root of a clone.\n"


@dataclass(frozen=True)
class Case:
    """A test that measured a gate of a family."""

    test: str  # pytest's node id
    figure: float | None  # the largest that it measured; None where it failed before
    error: str | None  # the first line of why the test failed, if it did
    date: str
    commit: str


Cases = dict[str, dict[str, dict[str, Case]]]  # by family, gate and test


def renewed(before: Cases, lines: Iterable[dict[str, Any]], *, date: str, commit: str) -> Cases:
    """Return the cases with those of the tests that ran. All gates of a test that failed have its error.

    A test that failed too early to measure has the gates that it had `before`.
    """
    after: Cases = {family: {gate: dict(cases) for gate, cases in gates.items()} for family, gates in before.items()}
    for line in lines:
        figures: dict[tuple[str, str], float | None] = {}
        for each in line["measured"]:
            key = (each["family"], each["gate"])
            figures[key] = larger(figures.get(key), each["figure"])
        for family, gates in after.items():
            for gate, cases in gates.items():
                if cases.pop(line["test"], None) is not None and line["error"] is not None:
                    figures.setdefault((family, gate), None)
        for (family, gate), figure in figures.items():
            case = Case(line["test"], figure, line["error"], date, commit)
            after.setdefault(family, {}).setdefault(gate, {})[line["test"]] = case
    return after


def unplaced(cases: Cases, lines: Iterable[dict[str, Any]]) -> list[str]:
    """Return tests that failed and are in no card, because nobody knows what they would have measured."""
    known = {test for gates in cases.values() for tests in gates.values() for test in tests}
    return [f"{line['test']}: {line['error']}" for line in lines if line["error"] and line["test"] not in known]


def card_of(family: Any, cases: dict[str, dict[str, Case]]) -> dict[str, Any]:
    """Return a card as it is written: each gate that a model of this family can have."""
    gates = {name: _entry(gate, cases.get(name, {})) for name, gate in GATES.items() if applies(gate, family)}
    return {"family": family.name, "model_types": list(family.model_types), "gates": gates}


def applies(gate: Gate, family: Any) -> bool:
    """Whether a gate is for whole models or for parts of one, as the family is, and for its experts if it has some."""
    from megavlm.families import PUBLISHED, published_model
    from megavlm.families.shared.family import ALL_PARTS

    released = [name for name, (its_family, _) in PUBLISHED.items() if its_family.name == family.name]
    if gate.experts and not any(published_model(name).experts.num_experts for name in released):
        return False
    return gate.parts == "all" or (gate.parts == "whole") == (family.parts == ALL_PARTS)


def _entry(gate: Gate, cases: dict[str, Case]) -> dict[str, Any]:
    found: dict[str, Any] = {"group": gate.group, "measured": gate.figure, "tolerance": gate.tolerance}
    if not cases:
        return {**found, "result": f"needs {gate.needs}: not run" if gate.needs else "not measured"}
    worst: float | None = None
    for case in cases.values():
        worst = worst if case.figure is None else larger(worst, case.figure)
    failed = any(case.error is not None for case in cases.values())
    listed = [
        {
            "command": f'python -m pytest "{case.test}"',
            **{name: value for name, value in asdict(case).items() if name != "test" and value is not None},
        }
        for _, case in sorted(cases.items())
    ]
    return {**found, "result": "FAILED" if failed else "passed", "figure": worst, "cases": listed}


def read(folder: Path = CARDS) -> list[dict[str, Any]]:
    """Return the cards in a folder, by name."""
    return [yaml.load(path.read_text(encoding="utf-8"), LOADER) for path in sorted(folder.glob("*.yaml"))]


def cases_in(cards: Iterable[dict[str, Any]]) -> Cases:
    """Return the cases of written cards."""
    found: Cases = {}
    for card in cards:
        for gate, entry in card["gates"].items():
            for case in entry.get("cases", ()):
                test = case["command"].split('"', 1)[1].removesuffix('"')
                made = Case(test, case.get("figure"), case.get("error"), case["date"], case["commit"])
                found.setdefault(card["family"], {}).setdefault(gate, {})[test] = made
    return found


def write(cases: Cases, folder: Path = CARDS) -> list[dict[str, Any]]:
    """Write a card for each registered family, and no others; return them."""
    from megavlm.families import FAMILIES

    folder.mkdir(exist_ok=True)
    cards = [card_of(family, cases.get(family.name, {})) for family in sorted(FAMILIES, key=lambda each: each.name)]
    for path in folder.glob("*.yaml"):
        path.unlink()
    for card in cards:
        text = yaml.safe_dump(card, sort_keys=False, width=200, allow_unicode=True)
        (folder / f"{card['family']}.yaml").write_text(HEAD + text, encoding="utf-8")
    return cards


def publish(cases: Cases) -> None:
    """Write cards and docs/reports/cards.md."""
    DOCUMENT.write_text(page(write(cases), DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


def run(arguments: Sequence[str], record: Path) -> list[dict[str, Any]]:
    """Run the tests that measure gates; return the lines that the plugin wrote."""
    record.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    files = sorted(str(path.relative_to(ROOT)) for pattern in TESTS for path in ROOT.glob(pattern))
    program = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.figures", "--figures", str(record)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*program, "-m", "not gpu", *arguments, *files], cwd=ROOT, env=environment, check=False)
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []


def _git(*arguments: str) -> str:
    asked = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def commit_here() -> str:
    """Return the commit, with "-dirty" where files differ that are not the cards' own."""
    asked = ["git", "status", "--porcelain", "--", ".", ":!cards", ":!docs/reports/cards.md"]
    changed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return _git("rev-parse", "--short=10", "HEAD") + ("-dirty" if changed else "")


def age(cards: Iterable[dict[str, Any]]) -> str:
    """Return a line for each commit of which there are figures: how many commits changed the program since then."""
    commits: dict[str, set[str]] = {}
    for card in cards:
        for entry in card["gates"].values():
            for case in entry.get("cases", ()):
                commits.setdefault(case["commit"], set()).add(card["family"])
    lines = []
    for commit, families in commits.items():
        since = _git("rev-list", "--count", f"{commit.removesuffix('-dirty')}..HEAD", "--", "megavlm")
        lines.append(f"{commit}: {since} commits have changed the program since; {', '.join(sorted(families))}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--age", action="store_true", help="print how old the figures are; run nothing")
    parser.add_argument("--render", action="store_true", help="write all cards from the figures that there are")
    parser.add_argument("--workers", default="0", help="how many tests run at a time (default: 0, in one process)")
    options, arguments = parser.parse_known_args(argv)
    if options.age:
        print(age(read()))
        return 0
    if options.render:
        publish(cases_in(read()))
        return 0
    commit, date = commit_here(), datetime.now(UTC).date().isoformat()
    began = time.monotonic()
    lines = run(["-n", options.workers, *arguments], ROOT / "runs" / "figures.jsonl")
    before = cases_in(read())
    cases = renewed(before, lines, date=date, commit=commit)
    if not arguments:  # all ran: what no test measures any more leaves the cards
        ran = {line["test"] for line in lines}
        cases = {
            family: {gate: {test: case for test, case in tests.items() if test in ran} for gate, tests in gates.items()}
            for family, gates in cases.items()
        }
    publish(cases)
    failed = [line["test"] for line in lines if line["error"]]
    minutes = (time.monotonic() - began) / 60
    print(f"{len(lines)} tests, {len(failed)} failed, {minutes:.1f} minutes on {os.cpu_count()} cores, {commit}")
    for test in unplaced(cases, lines):
        print(f"in no card: {test}")
    return 1 if failed or not lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
