"""The demo's way through the program, cut short: data, training, evaluation, generation on a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavlm.programs.history import VALIDATION, history_of
from megavlm.resilience.events import events
from tests.support.covering import slow
from tests.support.pool import Pools
from tests.support.training import assert_same_curve, metrics, train

SHORT = (
    "--recipe demo --train-iters 6 --lr-warmup-iters 1 --lr-wsd-decay-iters 2 --set evaluation.eval_samples=6 "
    "--eval-interval 3 --save-interval 0 --micro-batch-size 8 --global-batch-size 32"
).split()


@pytest.fixture(scope="module")
def one(run_once) -> Path:
    return run_once(1, SHORT)


@pytest.mark.parametrize(("world", "layout"), [(2, "--tp 2"), slow(4, "--tp 2 --pp 2"), slow(4, "--pp 2 --vpp 2")])
def test_any_layout_trains_and_answers_alike(pools: Pools, one: Path, tmp_path: Path, world: int, layout: str):
    pools(world).run(train, [*SHORT, *layout.split()], str(tmp_path))
    assert_same_curve(metrics(tmp_path), metrics(one))
    assert (tmp_path / "evaluation.txt").read_text() == (one / "evaluation.txt").read_text()
    measured = [record for record in metrics(tmp_path) if "validation/loss" in record]
    assert [record["iteration"] for record in measured] == [3, 6]
    for record, other in zip(measured, [record for record in metrics(one) if "validation/loss" in record], strict=True):
        for kind in ("", "/which_digits", "/how_many", "/largest"):
            assert record[f"validation{kind}/loss"] == pytest.approx(other[f"validation{kind}/loss"], rel=1e-5)
        assert record["validation/largest/accuracy"] == other["validation/largest/accuracy"]
    past = history_of(events(tmp_path), metrics(tmp_path))
    spent = sum(record.get("eval_time_s", 0.0) + record.get("sample_time_s", 0.0) for record in metrics(tmp_path))
    assert past.seconds[VALIDATION] == pytest.approx(spent, abs=1e-5)
    said = [(run_dir / "samples" / "answers.jsonl").read_text() for run_dir in (tmp_path, one)]
    assert said[0] == said[1]
    assert said[0].count('"label": "largest ') == 4, "two of eight, before the first step and at the end"
    for name in ("examples.png", "tokenizer.model", "config.yaml", "plan.json", "environment.json", "tensorboard"):
        assert (tmp_path / name).exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tp 2 --ep 4", "--pp 2 --ep 2 --moe-token-dispatcher-type allgather"])
def test_a_mixture_of_experts_trains_and_answers_alike(pools: Pools, tmp_path: Path, layout: str) -> None:
    short = ["--recipe", "demo-moe", *SHORT[2:]]
    pools(1).run(train, short, str(tmp_path / "one"))
    pools(4).run(train, [*short, *layout.split()], str(tmp_path / "four"))
    assert_same_curve(metrics(tmp_path / "four"), metrics(tmp_path / "one"))
    for name in ("evaluation.txt", "samples/answers.jsonl"):
        assert (tmp_path / "four" / name).read_text() == (tmp_path / "one" / name).read_text(), name
