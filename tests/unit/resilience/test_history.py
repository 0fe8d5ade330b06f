"""What a run's time went to, and what is said of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from megavlm.resilience.history import HUNG, KILLED, LOST, OTHER, RESTART, SAVES, SKIPPED, SLOW, TRAINING, history_of
from megavlm.resilience.why import findings

BEGIN = datetime(2026, 11, 22, tzinfo=UTC)


def event(second: float, kind: str, **more: Any) -> dict[str, Any]:
    return {"time": (BEGIN + timedelta(seconds=second)).isoformat(), "kind": kind, **more}


def steps(number: int, seconds: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    return [
        {"iteration": i + 1, "step_time_s": seconds, "data_time_s": 0.0, "updated": True, **more} for i in range(number)
    ]


def test_what_is_after_the_checkpoint_is_lost_to_what_ended_the_attempt():
    past = history_of(
        [
            event(0, "start", iteration=0),
            event(12, "save", iteration=10, seconds=2.0),
            event(90, "hang", iteration=17, seconds=70.0),
            event(100, "start", iteration=10),
            event(112, "save", iteration=20, seconds=2.0),
            event(122, "start", iteration=20),  # killed somewhere in between
            event(132, "finish", iteration=30),
        ],
        steps(30),
    )
    assert past is not None
    assert past.seconds == {TRAINING: 30.0, SAVES: 4.0, LOST: 8.0, HUNG: 70.0, RESTART: 10.0, KILLED: 10.0}
    assert sum(past.seconds.values()) == past.wall == 132.0
    assert past.restarts == 2
    assert past.recoveries == (80.0,)
    assert past.goodput == pytest.approx(30 / 132)


def test_slow_and_skipped_steps_are_no_training():
    slow = {
        "slowest_rank": 3,
        "slowest_rank_excess": 1.0,
        "slowest_rank_s": 1.0,
        "slow": "rank 3",
        "slowest_rank_phase": "data",
    }
    records = [*steps(4), *steps(1, **slow), *steps(2, updated=False)]
    past = history_of([event(0, "start", iteration=0), event(10, "finish", iteration=7)], records)
    assert past is not None
    assert past.seconds == {TRAINING: 2.5, SLOW: 2.5, SKIPPED: 2.0, OTHER: 3.0}


def test_a_run_of_one_event_has_no_length():
    assert history_of([event(0, "start", iteration=0)], steps(3)) is None
    assert history_of([{"kind": "start"}, {"time": "yesterday"}], []) is None


@pytest.mark.parametrize(
    ("changed", "words", "option"),
    [
        ({"data_time_s": 0.6}, "wait for data", "--num-workers"),
        ({"phase_seconds": {"pipeline wait": 0.5}}, "pipeline stages wait", "--vpp"),
        ({"phase_seconds": {"communication": 0.5}}, "wait for gradients", "--overlap-grad-reduce"),
        ({"updated": False}, "skipped", "--lr"),
        (
            {
                "slowest_rank": 5,
                "slow": "x",
                "slowest_rank_excess": 2.0,
                "slowest_rank_s": 0.9,
                "slowest_rank_phase": "compute",
            },
            "rank 5 is slower than the others in compute",
            "tools/doctor.py",
        ),
    ],
)
def test_the_first_finding_names_the_cause_and_an_option(changed, words: str, option: str):
    first = findings(steps(10, **changed), None, [])[0]
    assert words in first.what
    assert option in first.remedy


def test_saves_and_restarts_are_found_in_the_history():
    happened = [
        event(0, "start", iteration=0),
        event(30, "save", iteration=10, seconds=20.0),
        event(70, "failure", iteration=15, reason="x"),
        event(100, "start", iteration=10),
        event(110, "finish", iteration=20),
    ]
    found = findings(steps(20), history_of(happened, steps(20)), happened)
    assert [each.remedy.split(" ")[1] for each in found[:3]] == [
        "--save-interval",
        "RUN_DIR/events.jsonl",
        "--save-interval",
    ]
    assert [round(each.share, 2) for each in found[:3]] == [0.36, 0.27, 0.18]


def test_a_run_without_trouble_has_no_finding():
    assert findings(steps(10), None, []) == []
