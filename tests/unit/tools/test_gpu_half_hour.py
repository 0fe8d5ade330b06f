"""`tools/gpu_check.sh --minutes`: its commands exist, their limits fit, and a record lets it go on."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from tests.support import forked
from tools import gpu_half_hour
from tools.gpu_half_hour import ITEMS, MOST_MINUTES, Check, Item, parsed

ROOT = Path(__file__).parents[3]
TESTS = [item for item in ITEMS if item.command.startswith("pytest")]


def words_of(item: Item, *, rehearsed: bool) -> list[str]:
    return item.words("python", scratch=Path("/scratch"), kept=Path("/kept"), rehearsed=rehearsed)[1:]


def test_the_limits_of_all_items_fit_in_half_an_hour() -> None:
    assert sum(item.minutes for item in ITEMS) <= MOST_MINUTES
    names = [item.name for item in ITEMS]
    assert len(set(names)) == len(names)
    assert {item.instead_of for item in ITEMS} - {""} <= set(names)


@pytest.mark.parametrize("rehearsed", [False, True])
@pytest.mark.parametrize("item", [item for item in ITEMS if item not in TESTS], ids=lambda item: item.name)
def test_programs_know_their_options(item: Item, rehearsed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    file, *options = words_of(item, rehearsed=rehearsed)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", [file, *options])
    if file == "tools/calibrate.py":
        importlib.import_module("megavlm.programs.calibrate")._parser().parse_args(options)
        return
    module = importlib.import_module(Path(file).stem)
    found = module.parsed()
    assert found.out.startswith("/scratch/")
    if "sides" in vars(found):
        assert module.chosen(precision="bf16", ablate=found.ablate, their_compile=False, names=found.sides)


def collect(files: list[str], out: str) -> None:
    """Write the names of the tests of these files that are not slow."""
    found = []

    class Names:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            found.extend(item.nodeid for item in session.items)

    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files], plugins=[Names()])
    Path(out).write_text("\n".join(found))


@pytest.mark.slow  # it collects most tests
def test_every_expression_chooses_tests(tmp_path: Path) -> None:
    lines = {(item.name, small): words_of(item, rehearsed=small) for item in TESTS for small in (False, True)}
    files = {word for words in lines.values() for word in words if word.endswith(".py")}
    process = forked.context().Process(target=collect, args=(sorted(files), str(tmp_path / "names")))
    process.start()
    process.join(timeout=forked.PATIENCE)
    names = (tmp_path / "names").read_text().splitlines()
    for where, words in lines.items():
        asked = Expression.compile(words[words.index("-k") + 1])
        mine = [name for name in names if name.split("::")[0] in words]
        chosen = [name for name in mine if asked.evaluate(lambda word, name=name, **_: word.lower() in name.lower())]
        assert 1 <= len(chosen) <= (4 if where[1] else 40), f"{where}: {chosen}"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A program that writes a figure, notes that it ran, and ends as it is told."""
    file = tmp_path / "script.py"
    file.write_text(
        "import json, sys, time\nscratch, name, status, seconds = sys.argv[1:]\n"
        f"print('ran', name, file=open({str(tmp_path / 'ran')!r}, 'a'))\n"
        "json.dump({'speed': 7}, open(scratch + '/figures.json', 'w'))\nprint('said', name, flush=True)\n"
        "time.sleep(float(seconds))\nsys.exit(int(status))\n"
    )
    return file


def test_what_has_ended_is_recorded_and_not_run_again(script, tmp_path, monkeypatch, capsys):
    def item(name: str, status: int = 0, seconds: float = 0, minutes: float = 1, **more: Any) -> Item:
        return Item(name, minutes, f"why {name}", f"{script} {{scratch}} {name} {status} {seconds}", **more)

    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setenv("OUT", str(copies))
    monkeypatch.setattr(gpu_half_hour, "_cannot_share", lambda nccl: "no NCCL")
    items = [
        item("a"),
        item("b", status=3),
        item("instead-of-a", instead_of="a"),
        item("instead-of-b", instead_of="b"),
        item("many", ranks=True),
        item("slow", seconds=60, minutes=0.004),
        item("long", minutes=100),
    ]

    def run(*flags: str) -> int:
        return Check(parsed(["--minutes", "5", "--out", str(tmp_path / "out"), *flags])).run(items)

    assert run() == 1
    ran = (tmp_path / "ran").read_text().splitlines()
    assert ran == ["ran a", "ran b", "ran instead-of-b", "ran slow"]
    said = capsys.readouterr().out
    assert "many: skipped: no NCCL" in said
    assert "long: 100 minutes do not fit" in said
    record = [json.loads(line) for line in (copies / "record.jsonl").read_text().splitlines()]
    assert [each["result"] for each in record] == ["ok", "FAILED", "ok", "FAILED: out of time"]
    assert record[0]["figures"] == {"figures": {"speed": 7}}
    assert record[1]["last_lines"] == ["said b"]
    assert record[1]["status"] == 3
    (tmp_path / "out/record.jsonl").write_text("\n".join(map(json.dumps, [*record[1:], {"cut": 1}])) + '\n{"item": "x')
    run()
    assert (tmp_path / "ran").read_text().splitlines() == [*ran, "ran a"], "the one that was lost"
    run("--rehearse")
    again = [f"ran {name}" for name in ("a", "b", "instead-of-b", "many", "slow")]
    assert (tmp_path / "ran").read_text().splitlines()[5:] == again
