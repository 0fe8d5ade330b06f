"""`--profile`: a trace that can be read, of the iterations and ranks that were asked for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import Pools
from tests.support.training import LEAN, metrics, train, without_wall_time

ASKED = "--train-iters 4 --no-save --profile --profile-step-start 1 --profile-step-end 3".split()


def ranges(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    """Our named stretches in a rank's trace, by beginning."""
    with gzip.open(run_dir / "profile" / f"rank-{rank}.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    return sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: float(e["ts"]))


@pytest.fixture(scope="module")
def interleaved(run_once) -> Path:
    return run_once(2, [*LEAN, *ASKED, *"--pp 2 --vpp 2 --profile-ranks 1".split()])


def test_only_what_was_asked_for_is_traced(interleaved: Path) -> None:
    assert sorted(file.name for file in (interleaved / "profile").iterdir()) == ["rank-1.json.gz", "rank-1.txt"]
    names = [event["name"] for event in ranges(interleaved, 1)]
    assert names.count("optimizer") == 2
    assert names.count("data") == 2
    assert names.count("forward of chunk 3, micro-batch 2") == 2
    assert names.count("backward of chunk 1, micro-batch 0") == 2


def test_tracing_changes_no_number_and_names_the_encoder(pools: Pools, tmp_path: Path) -> None:
    argv = [*LEAN, *"--train-iters 4 --no-save --placement colocated".split()]
    pools(1).run(train, argv, str(tmp_path / "plain"))
    traced = [*argv, *"--profile --profile-step-start 2 --profile-step-end 99".split()]
    pools(1).run(train, traced, str(tmp_path / "traced"))
    assert without_wall_time(metrics(tmp_path / "traced")) == without_wall_time(metrics(tmp_path / "plain"))
    names = {event["name"] for event in ranges(tmp_path / "traced", 0)}  # the run's end ends the trace
    assert {"forward of the encoder", "backward of the encoder", "vision.layers.0"} <= names
