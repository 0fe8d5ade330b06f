"""Fuzz readers for a time: `python -m tests.fuzz.campaign --seconds 3600 --out found [READER …]`.

Inputs come from a reader's seeds and its corpus, by damage of bytes and by hypothesis's kind of damage of values. An
input that a reader answers in words that it has not used before is damaged further. Each reader gets an equal share of
the time. Inputs that failed are written to OUT/READER; put the smallest of them into tests/fuzz/corpus/READER once its
cause is mended.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.child import Reader, attempts, failing_input
from tests.fuzz.mutations import mutated

CORPUS = Path(__file__).parent / "corpus"
_AT_ONCE = 64  # inputs of a child
_MOST_SEEDS = 400


@dataclass(frozen=True)
class Failure:
    """An input that was not answered as it should be, and how it was answered."""

    reader: str
    data: bytes
    how: str

    @property
    def last_line(self) -> str:
        return self.how.strip().splitlines()[-1]

    @property
    def kind(self) -> str:
        """What distinguishes it from others: its last words, and the places of our code in its traceback."""
        places = re.findall(r'File "[^"]*((?:megavlm|tests/fuzz)/[^"]*)", line (\d+)', self.how)
        return f"{self.reader} {places[-3:]} {re.sub('[0-9]+', '0', self.last_line)[:60]}"


def corpus_of(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def fuzz(name: str, reader: Reader, *, seconds: float, seed: object) -> tuple[int, list[Failure]]:
    """Return how many inputs were tried within a time, and what failed, one of each kind."""
    random, end = Random(f"{name} {seed}"), time.monotonic() + seconds
    seeds = [*reader.seeds(), *corpus_of(name)]
    words: set[str] = set()
    found: dict[str, Failure] = {}
    tried = 0
    while time.monotonic() < end:
        batch = seeds if not tried else [mutated(random.choice(seeds), random, others=seeds) for _ in range(_AT_ONCE)]
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            outcome = attempts(reader, _until(batch, end), Path(folder), words)
            if outcome.how:
                failure = Failure(name, failing_input(Path(folder)), outcome.how)
                found.setdefault(failure.kind, failure)
        words |= outcome.words
        if tried and len(seeds) < _MOST_SEEDS:
            seeds = [*seeds, *outcome.new]
        tried += len(batch)
    return tried, list(found.values())


def _until(batch: Sequence[bytes], end: float) -> Iterator[bytes]:
    for number, data in enumerate(batch):
        if number and time.monotonic() > end:
            return
        yield data


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if nothing failed, 1 otherwise."""
    from tests.fuzz.readers import READERS

    parser = argparse.ArgumentParser(description="Fuzz the readers of other people's files.")
    parser.add_argument("readers", nargs="*", metavar="READER", help="Names of readers; default: all.")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="Seconds for all; default: 60.")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), metavar="DIR", help="Where failures go.")
    options = parser.parse_args(argv)
    names = options.readers or list(READERS)
    failed = 0
    for name in names:
        seconds = options.seconds / len(names)
        tried, found = fuzz(name, READERS[name], seconds=seconds, seed=time.time_ns())
        print(f"{name}: {tried} inputs in {seconds:.0f} s, {len(found)} kinds of failure", flush=True)
        for failure in found:
            failed += 1
            target = options.out / name / hashlib.sha256(failure.data).hexdigest()[:12]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(failure.data)
            target.with_suffix(".txt").write_text(failure.how)
            print(f"  {target}: {failure.last_line[:200]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
