"""The search, what it writes, and what it is fed with: published sizes and hardware profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from megavlm.arch.dims import dims_of
from megavlm.arch.kinds import model_parameters
from megavlm.arch.layers import layer_names
from megavlm.arch.plan import make_plan
from megavlm.arch.scenario import scenario_of
from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, ModelConfig, VisionConfig
from megavlm.families import PUBLISHED, published_model
from megavlm.planner.auto import planned
from megavlm.planner.candidates import Space, candidates, with_offload
from megavlm.planner.evaluator import Estimate, LayoutEvaluator
from megavlm.planner.hardware import PROFILES, profile
from megavlm.planner.layer_profiles import layer_profiles
from megavlm.planner.report import reasons, report, ties
from megavlm.planner.search import search
from megavlm.planner.start_time import start_estimate
from megavlm.planner.step_time import encoder_layers
from megavlm.programs import plan
from megavlm.resilience.phases import PARTS
from megavlm.rules.check import check
from megavlm.rules.defaults import resolve
from megavlm.rules.load import from_dict, to_yaml
from tests.support.small_run import SMALL


def test_finds_what_judging_every_layout_finds() -> None:
    outcome = search(SMALL, 4, PROFILES["a100"], top=3)
    judge = LayoutEvaluator(SMALL, PROFILES["a100"])
    possible = (each for each in candidates(4, Space(), length=4096) if not judge.infeasible_reason(each))
    estimates = [judge.estimate(each) for each in possible]
    times = sorted(each.step.seconds for each in estimates if isinstance(each, Estimate))
    assert outcome.best[0].step.seconds <= times[0] * (1 + 1e-12)
    assert [each.step.seconds for each in outcome.best] == sorted(each.step.seconds for each in outcome.best)


@pytest.mark.parametrize("model", [SMALL.model, published_model("qwen3_vl_30b_a3b")], ids=["dense", "experts"])
def test_what_layouts_share_is_what_each_has_alone(model: ModelConfig) -> None:
    """A layer measured for one layout and used for another has the seconds and bytes that it has there."""
    config = replace(SMALL, model=model)
    judge, space = LayoutEvaluator(config, PROFILES["h100"]), Space(pp=(1, 2), vpp=(1,), schedule=("1f1b",), cp=(1, 2))
    experts = model.experts.num_experts
    layouts = [*candidates(16, space, length=2**20, experts=experts)][:: 37 if experts else 5]
    layouts += [more for each in layouts[::4] for more in with_offload(each, space)]
    compared = 0
    for each in layouts:
        if judge.rule(each) is None:
            alone, colocated = replace(each, placement="stages").applied(config), each.placement == "colocated"
            scenario = scenario_of(alone, dims_of(alone, world=16), on_gpu=True, colocated=colocated)
            found, first = judge.profiles(each), encoder_layers(scenario) * colocated
            expected = layer_profiles(scenario, judge.hardware, recompute=each.recompute, first=first)
            for name, value in vars(expected).items():
                assert np.array_equal(value, getattr(found, name)), (each.label, name)
            compared += 1
    assert compared > 50


def test_the_best_layout_is_a_configuration_that_can_run() -> None:
    outcome = search(SMALL, 8, PROFILES["a100"])
    config = from_dict(yaml.safe_load(to_yaml(outcome.config(SMALL))))
    check(config, world=8)
    plan = make_plan(config, dims_of(config, world=8))
    assert plan.placement == outcome.best[0].candidate.placement
    assert plan.dims == outcome.best[0].candidate.dims
    text = report(outcome)
    assert "best: " in text
    table = text.splitlines()[1 : text.splitlines().index("")]
    degrees = [(line.partition(" mbs ")[0], "colocated" in line) for line in table if " mbs " in line]
    assert len(degrees) == len(set(degrees)) < len(outcome.best), "one line for layouts that differ in their rest alone"


def test_schedules_are_candidates_of_a_search() -> None:
    """Bounds of ZB-H1 hold; where it is asked for, nothing else is tried."""
    space = Space(tp=(1,), vpp=(1, 2), placement=("stages",), recompute=("none", "full"), cp=(1,))
    judge, orders = LayoutEvaluator(SMALL, PROFILES["h100"]), set()
    for each in candidates(4, space, length=4096):
        if judge.infeasible_reason(each) is None and isinstance(found := judge.estimate(each, simulations=2), Estimate):
            orders.add(each.dims.order)
            assert judge.bound(each) <= found.step.seconds * (1 + 1e-9)
            assert found.step.peak <= PROFILES["h100"].memory
    assert orders == {"1f1b", "interleaved", "zb-h1"}
    asked = replace(SMALL, parallel=replace(SMALL.parallel, schedule="zb-h1"))
    best = search(asked, 4, PROFILES["h100"], space=space, top=1).best[0].candidate
    assert best.dims.order == "zb-h1"
    assert " zb-h1 " in best.label
    assert best.applied(SMALL).parallel.schedule == "zb-h1"


def test_stages_of_faster_gpus_get_more_layers() -> None:
    space = Space(tp=(1,), pp=(1, 2), vpp=(1,), placement=("stages",), recompute=("none",), micro_batch=(1,), cp=(1,))
    config = replace(SMALL, model=replace(published_model("qwen2_5_vl_7b"), freeze=("vision", "language")))
    first = {}
    for stages in ("a100", "h100"), ("h100", "a100"):
        outcome = search(config, 4, PROFILES["a100"], space=space, top=1, stages=[PROFILES[each] for each in stages])
        best = outcome.best[0]
        assert best.candidate.dims.pp == 2
        assert any("--stage-gpus" in each.reason for each in outcome.rejected), "one stage of two types"
        (first[stages],) = best.partition.cuts
    assert first["a100", "h100"] < first["h100", "a100"]


def test_memory_decides_and_says_so() -> None:
    roomy = search(SMALL, 2, PROFILES["a100"], top=1).best[0]
    small = replace(PROFILES["a100"], memory=roomy.step.peak * 0.5)
    tight = search(SMALL, 2, small, top=1)
    assert all(each.step.peak <= small.memory for each in tight.best)
    assert any("GiB" in each.reason for each in tight.rejected)
    nothing = search(SMALL, 2, replace(small, memory=1e6))
    assert not nothing.best
    assert report(nothing).startswith("no layout can run")


def test_an_encoder_is_shared_only_where_whole_ones_do_not_fit() -> None:
    vision = VisionConfig(num_layers=12, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16, image_size=64)
    config = replace(SMALL, model=replace(SMALL.model, vision=vision))
    space = Space(
        tp=(2,), pp=(1,), micro_batch=(1,), recompute=("none",), placement=("colocated",), sharding=("optimizer",)
    )
    whole = search(config, 2, PROFILES["a100"], space=space).best[0]
    assert whole.candidate.vision_tp == 1
    small = replace(PROFILES["a100"], memory=0.9 * whole.step.peak)
    outcome = search(config, 2, small, space=space)
    shared = outcome.best[0]
    assert shared.candidate.vision_tp == 2
    assert shared.step.peak <= small.memory
    assert shared.step.encoder > whole.step.encoder, "its collectives take time"
    check(outcome.config(config), world=2)
    assert outcome.config(config).parallel.vision_tensor_model_parallel_size == 2


def test_plan_auto_settles_on_a_layout() -> None:
    auto = replace(SMALL, placement=replace(SMALL.placement, plan="auto", hardware="h100"))
    config = planned(auto, 2)
    assert config.placement.plan == "manual"
    check(config, world=2)
    assert planned(config, 2) is config
    assert planned(auto, 2) == config


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2_5_vl_7b", 8.292), ("llava_1_5_7b", 7.063), ("mistral_small_3_24b", 24.01), ("gpt_7_1b", 6.975)],
)
def test_published_sizes(name: str, billions: float) -> None:
    sizes = published_model(name)
    total = sum(model_parameters(layer, sizes) for layer in layer_names(sizes))
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)
    assert name in PUBLISHED


NARROW = "--gpus 2 --placement stages --recompute none --top 3 --no-offload".split()


def test_what_it_writes_trains_on_the_users_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = tmp_path / "best.yaml"
    assert plan.main(["--model", "qwen2_vl_2b", *NARROW, "--images", "2x448", "--out", str(best)]) == 0
    printed = capsys.readouterr().out
    assert "a step has 128 sequences (--gbs) of 4,096 tokens, 524,288 in all" in printed
    assert printed.index("wrote") < printed.index("layout"), "a reader that stops early has its files"
    config = parse(["--config", str(best), "--datasets", "mine.json"])
    check(config, world=2)
    assert (config.run.world_size, config.train.global_batch_size, resolve(config).data.kind) == (2, 128, "files")
    assert config.optimizer.lr is None, "what the plan does not need is left to the run"
    assert plan.main(["--config", str(best), *NARROW, "--gbs", "6"]) == 0
    assert "a step has 6 sequences" in capsys.readouterr().out


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--model", "qwen2_vl_2b", *NARROW, *"--seq-length 1024 --images 20x2048".split()]) == 2
    assert "a sample of these images needs 106,582 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "batch"), [(1, 128), (6, 132), (96, 192), (1024, 1024)])
def test_the_default_batch_is_one_that_people_use(gpus: int, batch: int) -> None:
    options = plan.options_of(["--model", "qwen2_vl_2b", "--gpus", str(gpus)])
    assert plan.configuration(options).train.global_batch_size == batch


def layout(seconds: float) -> Any:
    return SimpleNamespace(step=SimpleNamespace(seconds=seconds))


def test_layouts_within_the_planners_error_are_ties() -> None:
    assert ties([layout(1.0), layout(1.1), layout(1.13), layout(1.2)])[0].startswith("the first 3 are as good as equal")
    assert ties([layout(1.0), layout(1.2)]) == []


def test_reasons_that_differ_in_numbers_alone_are_one() -> None:
    said = ("1,024 is not divisible by 3", "512 is not divisible by 7", "no room in 80 GiB")
    rejected: list[Any] = [SimpleNamespace(reason=reason, candidate=SimpleNamespace(label="TP2")) for reason in said]
    told = ["2 × 1,024 is not divisible by 3 (as TP2)", "1 × no room in 80 GiB (as TP2)"]
    assert reasons(rejected) == [f"      {line}" for line in told]


def configured(*argv: str) -> Config:
    return resolve(parse(["--recipe", "demo", "--mbs", "1", "--gbs", "64", *argv]), vocab_size=160)


def estimate(*argv: str, world: int, resumes: bool = False) -> dict[str, float]:
    config = configured(*argv)
    return {**start_estimate(config, dims_of(config, world=world), profile("cpu"), 0.5, resumes=resumes)}


def test_each_part_follows_its_law() -> None:
    one, two, many = (estimate(world=1), estimate("--pp", "2", "--vpp", "1", world=2), estimate(world=64))
    assert set(one) <= set(PARTS)
    assert two["model"] == one["model"] / 2, "each stage draws its own layers"
    assert estimate("--tp", "2", world=2)["model"] == one["model"], "whole tensors are drawn"
    assert many["rendezvous"] - one["rendezvous"] == pytest.approx(0.063)
    assert many["imports"] == one["imports"]
    assert one["groups"] < two["groups"]


def test_a_resume_reads_what_it_does_not_draw() -> None:
    """14 bytes of a parameter where each rank has all moments, fewer where they are sharded."""
    fresh, again = estimate(world=1), estimate(world=1, resumes=True)
    assert (again["model"], fresh["weights"]) == (0.0, 0.0)
    sharded = estimate("--data-parallel-sharding", "optimizer", world=4, resumes=True)["weights"]
    whole = estimate("--data-parallel-sharding", "none", world=4, resumes=True)["weights"]
    assert whole == pytest.approx(again["weights"])
    assert sharded / whole == pytest.approx((2 + 12 / 4) / 14)
