"""Callbacks hear of a run in order; one that raises, or asks for a stop, ends all ranks after a checkpoint."""

from __future__ import annotations

from pathlib import Path

from megavlm.checkpoint import folders
from megavlm.metrics.trackers import tag_of
from megavlm.resilience.events import read_status
from tests.support.pool import Pools
from tests.support.training import SHALLOW, metrics
from tests.support.user_callbacks import diary, train_to_error

HERE = "tests.support.user_callbacks"
THREE = [*SHALLOW, "--train-iters", "3"]


def saved(run_dir: Path) -> str | None:
    """The name of the newest checkpoint."""
    newest = folders.newest(run_dir / "checkpoints")
    return None if newest is None else Path(newest).name


def test_a_callback_hears_of_a_run_in_order_and_resumes(pools: Pools, tmp_path: Path) -> None:
    argv = [*THREE, "--tp", "2", "--save-interval", "2", "--no-async-save", "--callback", f"{HERE}:Diary"]
    assert pools(2).run(train_to_error, argv, str(tmp_path)) == [None, None]
    kinds = [(entry[0], entry[1]) for entry in diary(tmp_path)]
    steps = [(kind, iteration) for iteration in (1, 2, 3) for kind in ("begin", "step")]
    assert kinds == [("start", 0), *steps, ("save", 2), ("save", 3), ("stop", 3)]
    assert diary(tmp_path)[0] == ["start", 0, 3, 2]
    assert diary(tmp_path)[-1] == ["stop", 3, "finished", None]
    recorded = [record.keys() - {"gradients"} for record in metrics(tmp_path)]
    assert [row[2] for row in diary(tmp_path) if row[0] == "step"] == [sorted(names) for names in recorded]
    for name in set().union(*recorded) - {"iteration", "time", "refused", "slow", "slowest_rank_phase"}:
        assert not tag_of(name).startswith("other/"), f"megavlm/metrics/trackers.py has no tag for {name}"
    pools(2).run(train_to_error, [*argv, "--train-iters", "4"], str(tmp_path))
    assert [entry[:2] for entry in diary(tmp_path)[len(kinds) :]][:3] == [["start", 3], ["begin", 4], ["step", 4]]


def test_a_callback_may_stop_the_run(pools: Pools, tmp_path: Path) -> None:
    argv = [*THREE, "--train-iters", "8", "--pp", "2", "--callback", f"{HERE}:Impatient"]
    outcomes = pools(2).run(train_to_error, argv, str(tmp_path))
    assert [outcome[0] for outcome in outcomes] == ["Stopped", "Stopped"]
    assert outcomes[0][1] == f"--callback {HERE}:Impatient: two steps are enough"
    assert saved(tmp_path) == "iter_0000003"
    assert read_status(tmp_path)["state"] == "stopped"
    assert diary(tmp_path)[-1][2] == "stopped"


def test_a_callback_that_raises_is_named_on_all_ranks_after_a_save(pools: Pools, tmp_path: Path) -> None:
    argv = [*THREE, "--train-iters", "8", "--tp", "2", "--callback", f"{HERE}:Broken", f"{HERE}:Diary"]
    outcomes = pools(2).run(train_to_error, argv, str(tmp_path))
    assert [outcome[0] for outcome in outcomes] == ["UserError", "UserError"]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1].startswith(f"--callback {HERE}:Broken fails in on_step_end: ZeroDivisionError (user_callback")
    assert outcomes[0][1].endswith("): a user's mistake")
    assert saved(tmp_path) == "iter_0000003"
    assert diary(tmp_path)[-1][1:3] == [3, "failed"]


def test_a_callback_that_raises_after_the_last_step_fails_all_ranks(pools: Pools, tmp_path: Path) -> None:
    outcomes = pools(2).run(train_to_error, [*THREE, "--callback", f"{HERE}:BrokenAtLast"], str(tmp_path))
    assert [outcome[0] for outcome in outcomes] == ["UserError", "UserError"]
    assert "\n" not in outcomes[0][1]
    assert saved(tmp_path) == "iter_0000003"
