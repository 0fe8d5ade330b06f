"""The parts of a start: the event at its end, and the file while it lasts."""

from __future__ import annotations

from pathlib import Path

from megavlm.resilience.events import events
from megavlm.resilience.phases import STARTING, StartTimes, unfinished


def test_the_parts_of_a_start_are_written_once(tmp_path: Path) -> None:
    now = [100.0]
    times = StartTimes(98.0, lambda: now[0])
    times.enter("rendezvous")
    times.run_dir = tmp_path
    for part, second in (("model", 101.0), ("weights", 103.0), ("model", 195.0), ("first_step", 196.0)):
        now[0] = second
        times.enter(part)
        assert unfinished(tmp_path)["part"] == part
        assert unfinished(tmp_path)["since"] == second
    now[0] = 200.0
    times.first_step_done(1, waited=1.5)
    times.enter("first_step")
    times.first_step_done(2, waited=0.0)
    (event,) = events(tmp_path)
    assert (event["kind"], event["iteration"], event["seconds"]) == ("started", 1, 102.0)
    assert event["phases"] == {
        **{"imports": 2.0, "rendezvous": 1.0, "model": 3.0, "weights": 92.0},
        **{"first_batch": 1.5, "first_step": 2.5},
    }
    assert not (tmp_path / STARTING).exists()
    assert unfinished(tmp_path) == {}


def test_other_ranks_and_what_is_no_start_say_nothing(tmp_path: Path) -> None:
    times = StartTimes(0.0)
    times.enter("model")
    times.first_step_done(1, waited=0.0)
    assert [*tmp_path.iterdir()] == []
    for text in ("", "[]", '{"part": ["\\u001b"]}', '{"part": "unknown"}'):
        (tmp_path / STARTING).write_text(text)
        assert unfinished(tmp_path) == {}
