"""What guides advise, and why a layout is faster: each term is there with its cause alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megavlm.arch.dims import Dims
from megavlm.planner.advice import Predicted, advised, explanation, predicted, why
from megavlm.planner.candidates import Candidate, Space
from megavlm.planner.evaluator import Estimate, LayoutEvaluator
from megavlm.planner.hardware import PROFILES
from megavlm.planner.memory import Memory
from megavlm.planner.search import search
from megavlm.programs import plan
from tests.support.small_run import SMALL

GIB = 2**30
TERMS = (
    "computation",
    "recomputation",
    "communication of TP, CP and EP",
    "idle time",
    "communication of DP",
    "updates",
)


@pytest.mark.parametrize(
    ("layout", "absent"),
    [
        (Candidate(Dims(), 2, "none", "stages", "optimizer"), {"recomputation", TERMS[2], "idle time", TERMS[4]}),
        (Candidate(Dims(tp=2), 2, "none", "stages", "optimizer"), {"recomputation", "idle time", TERMS[4]}),
        (Candidate(Dims(pp=2), 2, "full", "stages", "optimizer"), {TERMS[2], TERMS[4]}),
        (Candidate(Dims(dp=2), 2, "none", "stages", "full"), {"recomputation", TERMS[2], "idle time"}),
        (Candidate(Dims(tp=2, pp=2, dp=2), 2, "full", "colocated", "optimizer"), set()),
    ],
    ids=["one", "tp", "pp", "dp", "all"],
)
def test_each_term_is_there_with_its_cause_alone(layout: Candidate, absent: set[str]) -> None:
    judge = LayoutEvaluator(SMALL, PROFILES["cpu"])  # whose layers wait for collectives, not for launches
    estimate = judge.estimate(layout, simulations=20)
    assert isinstance(estimate, Estimate)
    found = predicted(estimate, judge)
    assert found.step == pytest.approx(estimate.step.seconds, rel=1e-9)
    assert {term for term, value in found.seconds.items() if value > 1e-9} == set(TERMS) - absent
    assert found.seconds["idle time"] == pytest.approx(estimate.step.bubble * estimate.step.pipeline, abs=1e-9)


def test_the_sentences_name_what_differs() -> None:
    ours = Predicted("A", {"computation": 6.0, "idle time": 2.0, "updates": 0.01}, Memory(8 * GIB, activations=GIB))
    theirs = Predicted("B", {"computation": 11.0, "idle time": 1.0, "updates": 0.0}, Memory(2 * GIB, transient=GIB))
    assert why(ours, theirs) == (
        "The best layout takes 8.01 s a step, and what guides advise (B) 1.50 × as long, 12.00 s.",
        "It takes less time for computation (6.00 s against 11.00), but more time for idle time (2.00 s against 1.00).",
        "Its fullest rank needs 9.0 GiB against 3.0: model state 8.0 against 2.0, activations 1.0 against 0.0.",
    )
    near = Predicted("B", {**ours.seconds, "updates": 0.02}, ours.memory)
    assert "s, which is less than the planner's own error: the two are as good as equal." in why(ours, near)[0]
    assert why(ours, near)[1] == "No term differs by 1 % of a step."
    assert why(ours, ours) == ("The best layout is what guides advise: A.",)


def test_the_advice_is_of_the_nearest_size_that_divides_the_gpus() -> None:
    def said(billions: float, world: int) -> list[tuple[float, int]]:
        return [(each.billions, each.gpus) for each in advised(billions * 1e9, world)]

    assert said(7.1, 8) == said(7.1, 64) == [(7, 8)]
    assert said(13.4, 8) == [(13, 8), (13, 8)], "where guides disagree, both"
    assert said(69.4, 128) == [(70, 128)]
    assert said(69.4, 8) == [(34, 32)], "8 × 2 stages do not divide 8"
    assert said(3, 1) == [(2, 4)]


def test_a_plan_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = "--placement stages --recompute-granularity none"
    few = f"--model qwen2_vl_2b --gpus 2 --top 1 --images 1x448 {narrow} --explain"
    assert plan.main(few.split()) == 0
    assert "× as long" in capsys.readouterr().out.splitlines()[-1]
    best = search(
        SMALL, 2, PROFILES["h100"], space=Space(pp=(1,), tp=(1,), sharding=("none",), placement=("stages",)), top=1
    )
    assert explanation(best) == f"The best layout is what guides advise: {best.best[0].candidate.label}."
    split = replace(SMALL, parallel=replace(SMALL.parallel, schedule="zb-h1"))
    found = search(split, 2, PROFILES["h100"], space=Space(pp=(2,), tp=(1,), placement=("stages",)), top=1)
    assert explanation(found).endswith("cannot run: --schedule zb-h1 is not for PP1 VPP1.")
