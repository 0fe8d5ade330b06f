"""All tests in pieces, each a pytest of its own, with a record that says what ran, how long, and how it ended.

`make test-all` runs it. A piece that crashes or hangs costs the others nothing, and a run that was interrupted goes on
where it stopped, also on another machine to which its record was copied: pieces that have ended are in
RECORD/pieces.jsonl, with their commit, and are not run again. Three run at a time: the processes of a test wait for
each other half of their time, and for servers and clusters longer. Other flags go to pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PASSED = (0, 5)  # pytest's status where all passed, and where nothing was selected
STUCK = 1800  # seconds after which a test's stacks are written to the log and its piece is ended


@dataclass(frozen=True)
class Piece:
    """How one of the pieces ended."""

    name: str  # a folder or a file of tests
    status: int  # pytest's; negative where a signal ended it
    seconds: float
    ended: str  # date and time
    commit: str  # what ran


def pieces(root: Path = ROOT) -> list[str]:
    """Return the folders of tests, tests/dist by its files: processes of one must not stay for the next.

    Those that took longest in the committed record come first, after new ones, so that none is left over at the end.
    """
    folders = sorted(path for path in (root / "tests").iterdir() if any(path.glob("**/test_*.py")))
    found = [
        file for folder in folders for file in (sorted(folder.glob("test_*.py")) if folder.name == "dist" else [folder])
    ]
    took = {piece["name"]: piece["seconds"] for piece in lines_of(root / "benchmarks/records/test_all/pieces.jsonl")}
    return sorted((str(path.relative_to(root)) for path in found), key=lambda name: -took.get(name, inf))


def run(name: str, record: Path, arguments: Sequence[str], root: Path) -> Piece:
    """Run a piece; its output goes to PIECE.log in `record`, what each of its files cost to PIECE.jsonl."""
    stuck = ["-o", f"faulthandler_timeout={STUCK}", "-o", "faulthandler_exit_on_timeout=true"]
    recorded = ["-p", "tests.support.record", "--record", str(_file(record, name, "jsonl"))]
    _file(record, name, "jsonl").unlink(missing_ok=True)  # of a run that was interrupted
    began = time.monotonic()
    with _file(record, name, "log").open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "not gpu", *stuck, *recorded, *arguments, name],
            cwd=root,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    return Piece(name, done.returncode, round(time.monotonic() - began, 1), ended, commit_of(root))


def _file(record: Path, name: str, suffix: str) -> Path:
    return record / f"{name.removeprefix('tests/').replace('/', '-').removesuffix('.py')}.{suffix}"


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def summary(record: Path) -> str:
    """Return the record as Markdown: totals, what failed, and each file with its cost, dearest first."""
    ended, files = lines_of(record / "pieces.jsonl"), lines_of(record / "files.jsonl")
    totals = {name: sum(file[name] for file in files) for name in ("passed", "failed", "skipped")}
    failed = [f"- `{test}`" for file in files for test in file["failures"]]
    failed += [
        f"- {each['name']} ended early: status {each['status']}"
        for each in ended
        if each["status"] not in PASSED and not _failures(each["name"], files)
    ]
    skips = sum((Counter(file.get("skips", {})) for file in files), Counter())
    skipped = [f"- {count}: {reason}" for reason, count in skips.most_common()]
    rows = [
        f"| {file['file']} | {file['passed']} | {file['failed']} | {file['skipped']} | {_minutes(file['seconds'])} "
        f"| {_minutes(file['processor_seconds'])} |"
        for file in sorted(files, key=lambda file: -file["processor_seconds"])
    ]
    return "\n".join(
        [
            f"# All tests, {ended[-1]['ended'] if ended else 'none has ended'}",
            "",
            f"{', '.join(f'{count} {name}' for name, count in totals.items())}; "
            f"{_minutes(busy_seconds(ended))} minutes by the clock, "
            f"{_minutes(sum(file['processor_seconds'] for file in files))} of processor time; "
            f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
            f"commit {', '.join(dict.fromkeys(piece['commit'] for piece in ended))}.",
            *(["", "Failed:", "", *failed] if failed else []),
            *(["", "Skipped:", "", *skipped] if skipped else []),
            "",
            "| file | passed | failed | skipped | minutes | processor minutes |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def busy_seconds(ended: Iterable[dict[str, Any]]) -> float:
    """Return the seconds in which at least one piece ran: their intervals overlap, and a run may have paused."""
    ends = ((datetime.fromisoformat(each["ended"]).timestamp(), each["seconds"]) for each in ended)
    total, latest = 0.0, 0.0
    for begin, end in sorted((end - seconds, end) for end, seconds in ends):
        total += max(end - max(begin, latest), 0.0)
        latest = max(latest, end)
    return total


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"


def commit_of(root: Path) -> str:
    """Return the commit that is checked out, with -dirty where files differ from it; "unknown" outside of git."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


def _failures(piece: str, files: Iterable[dict[str, Any]]) -> list[str]:
    """Return the tests that failed in a piece; a hang or a crash leaves none."""
    return [test for file in files if _within(file["file"], piece) for test in file["failures"]]


def _within(file: str, piece: str) -> bool:
    return file == piece or file.startswith(f"{piece}/")


def run_all(
    names: Iterable[str], record: Path, arguments: Sequence[str] = (), root: Path = ROOT, *, beside: int = 3
) -> bool:
    """Run the pieces that have not ended yet, `beside` at a time, in the order of `names`; returns whether all passed.

    The summary is written after each.
    """
    record.mkdir(parents=True, exist_ok=True)
    known = {piece["name"] for piece in lines_of(record / "pieces.jsonl")}
    left = []
    for name in names:
        if name in known:
            print(f"{name}: ended before", flush=True)
        else:
            left.append(name)
    pool = ThreadPoolExecutor(beside)
    try:
        for done in as_completed([pool.submit(run, name, record, arguments, root) for name in left]):
            piece = done.result()
            costs = _file(record, piece.name, "jsonl")
            _write(record / "files.jsonl", [*lines_of(record / "files.jsonl"), *lines_of(costs)])
            costs.unlink(missing_ok=True)
            _write(record / "pieces.jsonl", [*lines_of(record / "pieces.jsonl"), asdict(piece)])
            (record / "summary.md").write_text(summary(record), encoding="utf-8")
            print(f"{piece.name}: status {piece.status}, {_minutes(piece.seconds)} minutes", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, which has ended those that ran
    return all(piece["status"] in PASSED for piece in lines_of(record / "pieces.jsonl"))


def _write(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="folder of the record (default: runs/test-all-COMMIT)")
    parser.add_argument("--only", nargs="+", help="run these pieces only (default: all)")
    options, arguments = parser.parse_known_args(argv)
    if unknown := set(options.only or ()) - set(pieces()):
        parser.error(f"--only {' '.join(sorted(unknown))}: pieces are {' '.join(pieces())}")
    record = (options.to or ROOT / f"runs/test-all-{commit_of(ROOT)}").resolve()
    passed = run_all(options.only or pieces(), record, arguments)
    print(f"{'All passed' if passed else 'NOT all passed'}: {record}/summary.md")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
