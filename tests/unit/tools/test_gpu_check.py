"""Checks on GPUs, run here without one: the script, its half hour, its summary, and the start."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from tests.support import forked
from tools import gpu_half_hour
from tools.gpu_half_hour import ITEMS, MOST_MINUTES, Check, Item, parsed
from tools.gpu_summary import main, rows_of, table

SCRIPT = Path(__file__).parents[3] / "tools/gpu_check.sh"

# It knows of the devices and of NCCL what $FOUND says, writes down how pytest is started, and prints the table.
INTERPRETER = f"""#!/bin/sh
case "$1 $2" in
    "-c import xdist") exit 1 ;;
    -c*) echo "$FOUND" ;;
    "-m pytest") env >"$SEEN/environment"; echo "$@" >"$SEEN/words"; exit "$STATUS" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
MPS = """#!/bin/sh
if [ "$1" = -d ]; then echo "started, devices ${CUDA_VISIBLE_DEVICES-all}" >>"$SEEN/mps"; else cat >>"$SEEN/mps"; fi
"""


class Shell:
    """The script's part 5 in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, folder / "seen"
        self.seen.mkdir()
        for name, text in (("python", INTERPRETER), ("nvidia-cuda-mps-control", MPS)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "temporary").mkdir()

    def run(self, *argv: str, found: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "NCCL_"))}
        env = kept | {
            "PYTHON": "./python",
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "TMPDIR": str(self.folder / "temporary"),
            "FOUND": found,
            "SEEN": str(self.seen),
            "STATUS": str(status),
        }
        command = [str(SCRIPT), "--part", "5", "--out", "out", *argv]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)

    def environment(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in (self.seen / "environment").read_text().splitlines() if "=" in line)


@pytest.fixture
def check(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("", "needs a CUDA device"),
        ("0 23102", "needs a CUDA device"),
        ("1 22809", "this is 22809: name a newer one with --nccl"),
        ("3 22809", "this is 22809: name a newer one with --nccl"),
    ],
)
def test_where_ranks_cannot_share_a_device_one_line_says_why(check: Shell, found: str, reason: str) -> None:
    ended = check.run(found=found)
    assert ended.returncode == 0
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("== "))
    assert line.startswith("== layouts: skipped: ")
    assert reason in line
    assert not list(check.seen.iterdir()), "neither tests nor MPS"
    assert (check.folder / "out/steps.tsv").exists(), "paths are those of the caller's folder"


def test_ranks_share_the_first_device_under_mps_that_ends_with_the_check(check: Shell) -> None:
    (nccl := check.folder / "libnccl.so.2").touch()
    ended = check.run("--nccl", nccl.name, found="1 23102")
    assert ended.returncode == 0, ended.stderr
    found = check.environment()
    assert found["LD_PRELOAD"] == str(nccl)
    assert found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found
    assert found["CUDA_MPS_PIPE_DIRECTORY"].startswith(str(check.folder / "temporary"))
    assert (check.seen / "mps").read_text() == "started, devices all\nquit\n"
    assert not list((check.folder / "temporary").iterdir())
    assert "-m not slow and not gpu tests/dist/test_parity.py" in (check.seen / "words").read_text()


def test_ranks_with_a_device_each_need_neither(check: Shell) -> None:
    assert check.run(found="4 22809").returncode == 0
    assert not {name for name in check.environment() if name.startswith(("NCCL_", "CUDA_"))}
    assert not (check.seen / "mps").exists()


@pytest.mark.parametrize("options", ["--rehearse", "--items engine", "--minutes 30"])
def test_options_of_the_half_hour_and_of_the_parts_do_not_mix(check: Shell, options: str) -> None:
    ended = check.run(*options.split(), found="4 22809")
    assert ended.returncode == 2
    assert ended.stderr == "gpu_check.sh: --items and --rehearse need --minutes, which takes no --part or --device\n"


JUNIT = """<testsuites><testsuite>
<testcase name="test_a" time="1.25"/>
<testcase name="test_b" time="0.5"><failure message="boom">long</failure></testcase>
<testcase name="test_c" time="0"><skipped message="needs a CUDA device">x</skipped></testcase>
<testcase name="test_d" time="0"><skipped message="needs a CUDA device">x</skipped></testcase>
<testcase time="0.002" />
</testsuite></testsuites>"""


def write(folder: Path, *, steps: str) -> None:
    facts = {"devices": [{"name": "NVIDIA H200"}]}
    finding = {"level": "warning", "what": "slow", "remedy": "fix"}
    (folder / "steps.tsv").write_text(steps)
    (folder / "doctor.json").write_text(json.dumps({"facts": facts, "problems": [finding]}))
    (folder / "tests.log").write_text("tests/gpu/test_x.py::test_b FAILED")
    (folder / "tests.xml").write_text(JUNIT)
    rows = [
        {"what": "LLaVA, language part", "figure": "510 TFLOP/s", "target": "≥ 500", "met": True},
        {"what": "LLaVA, memory", "figure": "1.10", "target": "< 1", "met": False},
        {"what": "LLaVA, layers", "figure": "19 of 32", "target": "", "met": None},
    ]
    (folder / "llava.json").write_text(json.dumps({"rows": rows}))


def test_everything_has_a_row(tmp_path: Path) -> None:
    write(tmp_path, steps="doctor\t0\t12\t60\ntests\t1\t100\t220\nbenchmark\t0\t180\t230\n")
    found = {row.what: (row.result, row.figure, row.target) for row in rows_of(tmp_path)}
    assert found == {
        "doctor": ("ok", "12 s", "< 60 s"),
        "tests": ("FAILED: status 1", "100 s", "< 220 s"),
        "benchmark": ("ok", "180 s", "< 230 s"),
        "device": ("", "1 × NVIDIA H200", ""),
        "doctor: slow": ("warning", "", "fix"),
        "test: test_a": ("ok", "1.2 s", ""),
        "test: test_b": ("FAILED", "0.5 s", ""),
        "2 test(s)": ("skipped", "needs a CUDA device", ""),
        "LLaVA, language part": ("ok", "510 TFLOP/s", "≥ 500"),
        "LLaVA, memory": ("missed", "1.10", "< 1"),
        "LLaVA, layers": ("", "19 of 32", ""),
    }
    lines = table(rows_of(tmp_path)).splitlines()
    assert lines[0].split() == ["what", "result", "figure", "target"]
    assert len(lines) == 1 + len(found)


@pytest.mark.parametrize(
    ("status", "code", "result"),
    [("0", 0, "ok"), ("124", 1, "FAILED: out of time"), ("running", 1, "FAILED: ended from outside")],
)
def test_steps_that_ended_early_leave_a_table_all_the_same(tmp_path, status, code, result, capsys):
    (tmp_path / "steps.tsv").write_text(f"doctor\t1\t9\t60\ndoctor\t{status}\t60\t60\ntes")
    (tmp_path / "doctor.json").write_text("")
    (tmp_path / "llava.json").write_text('{"rows": [')
    assert main([str(tmp_path)]) == code
    assert [line.split("  ")[0] for line in capsys.readouterr().out.split("\n")[1:] if line] == ["what", "doctor"]
    assert rows_of(tmp_path)[0].result == result


@pytest.mark.parametrize(
    "log",
    [
        "tests/gpu/test_x.py::test_a PASSED   [ 25%]\ntests/gpu/test_x.py::test_b[1-x] FAILED   [ 50%]\n"
        "tests/gpu/test_x.py::test_c SKIPPED (needs a CUDA device)   [ 75%]\ntests/gpu/test_x.py::test_d ",
        "tests/gpu/test_x.py::test_a \n[gw1] [ 25%] PASSED tests/gpu/test_x.py::test_a \n"
        "tests/gpu/test_x.py::test_b[1-x] \ntests/gpu/test_x.py::test_c \ntests/gpu/test_x.py::test_d \n"
        "[gw0] [ 50%] FAILED tests/gpu/test_x.py::test_b[1-x] \n[gw3] [ 75%] SKIPPED tests/gpu/test_x.py::test_c \n",
    ],
    ids=["alone", "workers"],
)
def test_tests_that_were_ended_are_read_from_what_was_printed(log: str, tmp_path: Path) -> None:
    (tmp_path / "tests.log").write_text(f"collecting ... collected 4 items\n\n{log}")
    found = {row.what.removeprefix("test: "): row.result for row in rows_of(tmp_path)}
    expected = {"test_a": "ok", "test_b[1-x]": "FAILED", "test_d": "FAILED: not finished", "1 test(s)": "skipped"}
    assert found == expected


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
    if file == "-m":
        assert options[:2] == ["megavlm", "calibrate"]
        importlib.import_module("megavlm.programs.calibrate")._parser().parse_args(options[2:])
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
        chosen = [name for name in names if name.split("::")[0] in words]
        if "-k" in words:
            asked = Expression.compile(words[words.index("-k") + 1])
            chosen = [
                name for name in chosen if asked.evaluate(lambda word, name=name, **_: word.lower() in name.lower())
            ]
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

    def ran() -> list[str]:
        lines = (tmp_path / "ran").read_text().splitlines()
        return [line for line in lines if line != "ran slow"]  # whose time may be over before Python has begun

    assert run() == 1
    assert ran() == ["ran a", "ran b", "ran instead-of-b"]
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
    assert ran()[3:] == ["ran a"], "the one that was lost"
    run("--rehearse")
    assert ran()[4:] == [f"ran {name}" for name in ("a", "b", "instead-of-b", "many")]
    run("--items", "instead-of-a")
    assert "ran instead-of-a" in ran()[8:], "what is named runs"


GIB = 2**30


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("start")


def test_a_layout_has_its_processes_and_flags(start: Any) -> None:
    layout = start.layout_of("tp8,pp2,dp4,vpp2")
    assert start.ranks_of(layout) == 64
    assert start.flags(layout) == "--tp 8 --pp 2 --vpp 2 --no-save --mbs 1 --gbs 16"
    assert start.flags({"tp": 2}) == "--tp 2"
    with pytest.raises(ValueError, match="'ep2' is no degree"):
        start.layout_of("tp2,ep2")


def test_processes_that_do_not_fit_are_refused(start: Any) -> None:
    assert start.refusal(64, int(0.5 * GIB), 21 * GIB) is None
    told = "64 processes would take 17.6 GiB, by the 0.5 of two, and 17.0 GiB are free: use --world 60"
    assert start.refusal(64, int(0.5 * GIB), 17 * GIB) == told
    assert 10 * 2**20 < start.memory_of(os.getppid()) < GIB * 16
    assert 0 < start.free_memory() < 2**50
