"""The search and what it is fed with, and model state: what ranks share, what leaves a device, what it costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml

from megavlm.arch.dims import Dims, dims_of
from megavlm.arch.kinds import layer_sizes, model_parameters, saved_bytes
from megavlm.arch.layers import layer_names
from megavlm.arch.plan import make_plan
from megavlm.arch.scenario import HOST_PIECE, Offloaded, Scenario, Sharding, encoder_scenario, scenario_of
from megavlm.command_line.configuration import to_train
from megavlm.command_line.parsing import parse
from megavlm.config.optimizer_schema import newton_schulz_flops
from megavlm.config.schema import AudioConfig, Config, DataConfig, ModelConfig, VisionConfig
from megavlm.errors import UserError
from megavlm.families import PUBLISHED, published_model
from megavlm.optim.codes import Coded
from megavlm.planner.auto import offload_memory_error, planned, predict, start_estimate, starting_line
from megavlm.planner.candidates import Space, candidates, with_offload
from megavlm.planner.cost import coded_bytes, gradient_seconds, host_update_seconds, layer_seconds, optimizer_seconds
from megavlm.planner.evaluator import Estimate, LayoutEvaluator
from megavlm.planner.hardware import PROFILES, Hardware, profile
from megavlm.planner.host_memory import host_line, host_memory, node_memory_error
from megavlm.planner.layer_profiles import layer_profiles
from megavlm.planner.memory import kept_bytes, matrix_bytes, matrix_seconds, model_state_bytes, rank_memory
from megavlm.planner.report import reasons, report, ties
from megavlm.planner.search import search
from megavlm.planner.step_time import encoder_layers
from megavlm.programs import plan
from megavlm.resilience.phases import PARTS
from megavlm.rules.check import check
from megavlm.rules.defaults import resolve
from megavlm.rules.load import from_dict, to_yaml
from tests.support.small_run import SMALL, SMALL_FLAGS


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


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8 hybrid --fp8-parts vision",
        "--fp8 hybrid --fp8-recipe blockwise",
        "--fp8 hybrid --fp8-param-gather",
        "--fp8 hybrid --fp8-recipe mxfp8 --set model.language.ffn_hidden_size=1568",
        "--precision fp16",
        "--cp 2 --cp-comm-type a2a",
        "--placement colocated --freeze vision projector --vision-cache features",
    ],
)
def test_what_options_exclude_is_not_proposed(flags: str) -> None:
    config = resolve(parse([*SMALL_FLAGS.split(), *flags.split()]))
    space = Space(tp=(1, 2), pp=(1,), vpp=(1,), micro_batch=(1,), recompute=("none",), cp=(1,), offload=())
    outcome = search(config, 4, PROFILES["h100"], space=space, top=100)
    assert outcome.best
    for each in outcome.best:
        check(replace(outcome, best=(each,)).config(config), world=4)
    if config.placement.vision_cache:
        assert {each.candidate.placement for each in outcome.best} == {"colocated"}


def test_mfu_is_of_the_peak_that_a_run_compares_with() -> None:
    """docs/gpu.md: FP8 is compared with the FP8 peak, and fp32 has none."""
    peaks = [
        LayoutEvaluator(replace(SMALL, precision=replace(SMALL.precision, **changed)), PROFILES["h100"]).peak
        for changed in ({}, {"fp8": "hybrid"}, {"dtype": "fp32"})
    ]
    assert peaks == [989e12, pytest.approx(1979e12), None]


def test_adapters_keep_what_their_layers_read() -> None:
    whole, frozen, adapted, queries = (
        scenario_of(resolve(parse([*SMALL_FLAGS.split(), *flags.split()])), Dims(), on_gpu=True)
        for flags in ("", "--freeze language", "--lora-rank 4", "--lora-rank 4 --lora-targets q_proj")
    )
    layer = "language.layers.1"
    trained, least, *with_adapters = (saved_bytes(layer, each) for each in (whole, frozen, adapted, queries))
    assert with_adapters == [trained, least]
    assert least < trained
    assert saved_bytes("language.layers.0", queries) == least, "the first layer that has adapters"


def test_rows_stay_for_adapters_of_experts_alone() -> None:
    mixture = f"{SMALL_FLAGS} --num-experts 4 --set model.experts.shared_ffn_hidden_size=64"
    targets = ("language", "experts", "language experts")
    whole, frozen, shared, routed, both = (
        scenario_of(resolve(parse([*mixture.split(), *flags.split()])), Dims(), on_gpu=True)
        for flags in ("", "--freeze language", *(f"--lora-rank 4 --lora-targets {names}" for names in targets))
    )
    layer = "language.layers.1"
    rows = layer_sizes(layer, whole).rows_read()
    trained, least, *adapted = (saved_bytes(layer, each) for each in (whole, frozen, shared, routed, both))
    assert adapted == [trained - rows, least + rows, trained]


def test_layers_without_a_window_keep_their_keys_once() -> None:
    windows = " model.language.window_size=512 model.language.full_attention_layers=[1]"
    plain, mixed = (
        scenario_of(resolve(parse(f"{SMALL_FLAGS} --set model.language.num_query_groups=2{more}".split())), Dims())
        for more in ("", windows)
    )
    sizes = layer_sizes("language.layers.0", mixed)
    repeated = 2 * (sizes.heads - sizes.groups) * sizes.width * sizes.tokens * plain.bytes_each
    whole, within = (saved_bytes(name, mixed) for name in ("language.layers.1", "language.layers.0"))
    assert (whole, within) == (saved_bytes("language.layers.1", plain), pytest.approx(whole + repeated))
    assert repeated > 0


def test_a_colocated_audio_encoder_takes_time_and_memory() -> None:
    heard = replace(SMALL.model, audio=AudioConfig(num_layers=2), audio_token=9)
    each = next(candidates(1, Space(placement=("colocated",)), length=4096))
    without, beside = (
        LayoutEvaluator(replace(SMALL, model=model), PROFILES["a100"]).encoder(each) for model in (SMALL.model, heard)
    )
    assert beside.forward > without.forward
    assert beside.memory.activations > without.memory.activations


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
    config = replace(config, train=replace(config.train, seq_length=512))
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
    dry = f"{SMALL_FLAGS} --plan auto --hardware h100 --world-size 2 --dry-run".split()
    assert to_train(dry, launched=1) == to_train(dry, launched=2)
    given, _ = to_train([*dry, "--tp", "2", "--set", "train.micro_batch_size=1"], launched=2)
    assert (given.parallel.tensor_model_parallel_size, given.train.micro_batch_size) == (2, 1)
    for flags in ("--tp 3", "--vpp 2 --pp 1", "--schedule zb-h1 --tp 2"):
        with pytest.raises(UserError, match="2 processes have no layout of the given degrees"):
            to_train([*dry, *flags.split()], launched=2)


def test_plan_auto_plans_for_the_gpu_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = replace(SMALL, placement=replace(SMALL.placement, plan="auto"))
    for name, known in (("NVIDIA H200", "h200"), (None, "h100")):
        monkeypatch.setattr("megavlm.planner.auto.device_here", lambda name=name: name)
        assert planned(auto, 2).placement.hardware == known
    monkeypatch.setattr("megavlm.planner.auto.device_here", lambda: "NVIDIA GeForce RTX 4090")
    with pytest.raises(UserError, match="no profile of NVIDIA GeForce RTX 4090: name a GPU like it by --hardware"):
        planned(auto, 2)


def test_three_nodes_may_be_three_stages() -> None:
    assert {each.dims.pp for each in candidates(24, Space(), length=4096)} == {1, 2, 3, 4, 6, 8, 12, 24}


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2_5_vl_7b", 8.292), ("llava_1_5_7b", 7.063), ("mistral_small_3_24b", 24.01), ("gpt_7_1b", 6.975)],
)
def test_published_sizes(name: str, billions: float) -> None:
    sizes = published_model(name)
    total = sum(model_parameters(layer, sizes) for layer in layer_names(sizes))
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)
    assert name in PUBLISHED


NARROW = "--gpus 2 --placement stages --recompute-granularity none --top 3 --no-offload".split()


def test_what_it_writes_trains_on_the_users_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = tmp_path / "best.yaml"
    mine = ["--min-pixels", "3136", "--images", "2x448", "--out", str(best), "--gpu", "h200", "--train-iters", "7"]
    assert plan.main(["--model", "qwen2_vl_2b", *NARROW, *mine, "--set", "model.language.num_layers=4"]) == 0
    printed = capsys.readouterr().out
    assert "a step has 128 sequences (--gbs) of 4,096 tokens, 524,288 in all" in printed
    assert printed.index("wrote") < printed.index("layout"), "a reader that stops early has its files"
    config = parse(["--config", str(best), "--datasets", "mine.json"])
    check(config, world=2)
    assert (config.run.world_size, config.train.global_batch_size, resolve(config).data.kind) == (2, 128, "files")
    assert (config.placement.hardware, config.train.train_iters, config.model.language.num_layers) == ("h200", 7, 4)
    assert config.data == replace(DataConfig(min_pixels=3136), datasets=config.data.datasets)
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
    return {**start_estimate(config, dims_of(config, world=world), profile("cpu"), 0.1, resumes=resumes)}


def test_each_part_follows_its_law() -> None:
    one, two, many = (estimate(world=1), estimate("--pp", "2", "--vpp", "1", world=2), estimate(world=64))
    assert set(one) <= set(PARTS)
    assert two["model"] == one["model"] / 2, "each stage draws its own layers"
    assert estimate("--tp", "2", world=2)["model"] == one["model"], "whole tensors are drawn"
    assert many["rendezvous"] - one["rendezvous"] == pytest.approx(0.063)
    assert many["imports"] == one["imports"]
    assert one["groups"] < two["groups"]


def test_a_resume_reads_what_it_does_not_draw() -> None:
    """12 bytes of a parameter, once over all replicas, which send one another what is not sharded: all, or weights."""
    fresh, again = estimate(world=1), estimate(world=1, resumes=True)
    assert (again["model"], fresh["weights"]) == (0.0, 0.0)
    hardware = profile("cpu")
    sent = again["weights"] * hardware.own_host.disk / hardware.near.bandwidth
    for kind, share in (("none", 1.0), ("optimizer", 2 / 12)):
        found = estimate("--data-parallel-sharding", kind, world=4, resumes=True)["weights"]
        assert found == pytest.approx(again["weights"] / 4 + share * sent)


def test_a_start_takes_as_long_as_the_recorded_one() -> None:
    text = (Path(__file__).parents[3] / "benchmarks/records/start.jsonl").read_text().splitlines()
    known, *_ = (each["seconds"] for each in map(json.loads, text) if each["layout"] == "tp2" and not each["cold"])
    found = estimate("--tp", "2", world=2)
    assert known.keys() - found.keys() == {"whole", "callbacks", "tokenizer", "download"}
    assert sum(found.values()) == pytest.approx(known["whole"], rel=0.1)


def test_a_dry_run_says_what_takes_longest() -> None:
    config = configured("--tp", "2")
    line = starting_line(config, dims_of(config, world=1024), profile("h100"), 990.0, name="h100", resumes=False)
    assert line == "starts in about 1,014 s at 1,024 ranks, of which 1,000 s taking the first step (h100; an estimate)"


KINDS: tuple[Sharding, ...] = get_args(Sharding)
LAYER = "language.layers.0"


def case(kind: Sharding, *, dp: int = 8, size: int | None = None) -> Scenario:
    config = replace(SMALL, parallel=replace(SMALL.parallel, data_parallel_sharding=kind, hybrid_shard_size=size))
    return scenario_of(config, Dims(1, 1, 1, dp), on_gpu=True)


def test_bytes_of_a_parameter() -> None:
    """2 + 4 + 12; the last divided; the last two divided and weights gathered; nothing but rows."""
    count = model_state_bytes(LAYER, case("none")).total / 18
    found = {kind: model_state_bytes(LAYER, case(kind)).total / count for kind in KINDS}
    expected = {"none": 18, "optimizer": 6 + 12 / 8, "optimizer_gradients": 2 + 16 / 8, "full": 16 / 8}
    assert found == pytest.approx(expected)
    assert model_state_bytes(LAYER, case("full", size=2)).total / count == pytest.approx(16 / 2)
    assert encoder_scenario(case("full", size=2), 1).shards == 8, "a colocated encoder is shared by all"


def test_more_micro_batches_cost_more_collectives_from_stage_2_on() -> None:
    hardware, count = PROFILES["h100"], 1e9
    for kind in KINDS:
        cases = (replace(case(kind), micro_batches=number) for number in (1, 8))
        few, many = (gradient_seconds(count, each, hardware, held=count) for each in cases)
        assert few > 0
        assert (many > few) == (kind in ("optimizer_gradients", "full"))
        assert gradient_seconds(count, case(kind, dp=1), hardware, held=count) == 0
    stages = [optimizer_seconds(count, case(kind), hardware) for kind in KINDS]
    assert stages == sorted(stages, reverse=True)


def test_gradients_in_bf16_take_half_the_bytes_and_time_of_links() -> None:
    hardware, count = PROFILES["h100"], 1e9
    for kind in KINDS:
        half, exact = (replace(case(kind), micro_batches=1, gradient_bytes=size) for size in (2, 4))
        seconds = [gradient_seconds(count, each, hardware, held=count) for each in (half, exact)]
        assert seconds[0] < seconds[1]
    sizes = [model_state_bytes(LAYER, replace(case("optimizer"), gradient_bytes=size)).gradients for size in (2, 4)]
    assert sizes[0] == sizes[1] / 2


def test_replicas_add_an_all_reduce_of_their_rows() -> None:
    """Over a network that is slower than the links of a node, sums of rows cost less than rows from everywhere."""
    base, count = PROFILES["h100"], 1e9
    hardware = replace(base, far=replace(base.far, bandwidth=base.far.bandwidth / 4))
    inside, across = case("optimizer", dp=16), case("optimizer", dp=16, size=8)
    one_node = gradient_seconds(count, case("optimizer", dp=8), hardware)
    assert one_node < gradient_seconds(count, across, hardware) < gradient_seconds(count, inside, hardware)


def test_a_second_shard_keeps_half_of_the_gathers_inside_a_node() -> None:
    base, count = PROFILES["h100"], 1e9
    slow = replace(base, far=replace(base.far, bandwidth=1e9))
    without = case("full", dp=16)
    inside, everywhere = replace(without, secondary=8), replace(without, secondary=16)
    gathers_and_sums = gradient_seconds(count, without, slow, held=count)
    assert gradient_seconds(count, everywhere, slow, held=count) == gathers_and_sums
    # Over the slow link go weights (2 bytes) twice and gradients (4), then weights once.
    assert gradient_seconds(count, inside, slow, held=count) == pytest.approx(6 / 8 * gathers_and_sums, rel=0.02)
    each = model_state_bytes(LAYER, case("none")).total / 18
    more = model_state_bytes(LAYER, inside).total - model_state_bytes(LAYER, without).total
    assert more == pytest.approx(2 * each / 8)
    assert model_state_bytes(LAYER, everywhere) == model_state_bytes(LAYER, without)


def test_codes_pay_on_slow_links_and_take_memory() -> None:
    base, count = PROFILES["h100"], 1e9
    slow = replace(base, far=replace(base.far, bandwidth=1e9))
    for exact in (case("optimizer", dp=16), case("optimizer", dp=16, size=8)):
        coded = replace(exact, gradient_code="int8", overlap_grad_reduce=True, code_group=8)
        ratio = gradient_seconds(count, exact, slow) / gradient_seconds(count, coded, slow)
        assert 1.5 < ratio < 4, "4 bytes are one, and weights as they were"
        both = replace(coded, weight_code="int8") if exact.shards == 16 else coded
        assert both is coded or gradient_seconds(count, both, slow) < gradient_seconds(count, coded, slow)
        more = model_state_bytes(LAYER, coded).total - model_state_bytes(LAYER, exact).total
        numbers = model_state_bytes(LAYER, exact).gradients / 4
        assert more == pytest.approx(4 * numbers / 8)
        if exact.shards == 16:
            one_level = replace(coded, code_group=1)
            assert gradient_seconds(count, one_level, slow) > gradient_seconds(count, exact, slow), "8 of a node send"
    assert gradient_seconds(count, coded, base) > 0.5 * gradient_seconds(count, exact, base), "a fast link gains little"
    for code in ("bf16", "int8", "fp8"):
        assert coded_bytes(code) == Coded(code).encode(torch.zeros(1, 1 << 20)).numel() / (1 << 20)


def test_the_search_shares_weights_where_state_does_not_fit() -> None:
    space = Space(tp=(1,), pp=(1,), micro_batch=(1,), recompute=("full",), placement=("stages",), offload=())
    free = search(SMALL, 8, PROFILES["a100"], space=space)
    peak = {each.candidate.sharding: each.step.peak for each in free.best}
    assert set(peak) == {*KINDS} - {"none"}, "which saves a little of the update at best"
    room = (peak["full"] + min(peak["optimizer"], peak["optimizer_gradients"])) / 2
    tight = search(SMALL, 8, replace(PROFILES["a100"], memory=room), space=space)
    assert [each.candidate.sharding for each in tight.best] == ["full"]
    assert tight.config(SMALL).parallel.data_parallel_sharding == "full"


H100 = PROFILES["h100"]
BOTH: tuple[Offloaded, ...] = ("optimizer", "activations")
SPACE = Space(tp=(1,), pp=(1,), micro_batch=(1,), recompute=("none",), placement=("stages",), sharding=("optimizer",))


def offloaded(*offload: Offloaded, sharding: Sharding = "optimizer", precision: str = "bf16", dp: int = 8) -> Scenario:
    config = replace(
        SMALL,
        parallel=replace(SMALL.parallel, data_parallel_sharding=sharding),
        execution=replace(SMALL.execution, offload=offload),
        precision=replace(SMALL.precision, dtype=precision),
    )
    return scenario_of(config, Dims(1, 1, 1, dp), on_gpu=True)


@pytest.mark.parametrize(
    ("sharding", "precision", "here", "left"),
    [
        ("none", "bf16", 18, 10),
        ("optimizer", "bf16", 6 + 12 / 8, 6 + 4 / 8),
        ("optimizer", "fp32", 8 + 8 / 8, 8),
        ("optimizer_gradients", "bf16", 2 + 16 / 8, 2 + 8 / 8),
        ("full", "bf16", 16 / 8, 8 / 8),
    ],
)
def test_moments_leave_the_device(sharding: Sharding, precision: str, here: float, left: float) -> None:
    whole, off = (offloaded(*each, sharding=sharding, precision=precision) for each in ((), ("optimizer",)))
    count = model_state_bytes(LAYER, replace(whole, sharding="none")).weights / whole.bytes_each
    assert model_state_bytes(LAYER, whole).total / count == pytest.approx(here)
    assert model_state_bytes(LAYER, off).total / count == pytest.approx(left)
    bounds = [0, len(off.names)]
    moments = host_memory(off, bounds, 0, recompute="none").moments
    gone = rank_memory(whole, bounds, 0, recompute="none").total - rank_memory(off, bounds, 0, recompute="none").total
    assert moments == pytest.approx(gone)


def test_activations_of_layers_leave_but_for_two_layers() -> None:
    whole, off = offloaded(), offloaded("activations")
    bounds = [0, len(off.names)]
    before, after = (rank_memory(each, bounds, 0, recompute="none") for each in (whole, off))
    layers = [name for name in off.names if ".layers." in name]
    saved = sum(saved_bytes(name, whole) for name in layers)
    assert before.activations - after.activations == pytest.approx(saved)
    assert kept_bytes("output", off) == saved_bytes("output", whole)
    largest = max(saved_bytes(name, whole) for name in layers)
    assert 0 < after.transient - max(0, before.transient - 2 * largest) <= 3 * largest
    pinned = host_memory(off, bounds, 0, recompute="none").activations
    assert saved < pinned < 2 * saved, "pinned memory comes in powers of two"
    assert host_memory(whole, bounds, 0, recompute="none").total == 0


def test_the_bus_and_the_host_take_time() -> None:
    host = H100.own_host
    count = 1e9
    travel, update = 12 * count / host.link.bandwidth, 28 * count / host.bandwidth
    assert max(travel, update) < host_update_seconds(count, H100) < travel + update
    assert host_update_seconds(HOST_PIECE / 2, H100) == pytest.approx(HOST_PIECE / 2 / count * (travel + update))
    assert optimizer_seconds(count, offloaded("optimizer"), H100) > optimizer_seconds(count, offloaded(), H100)
    unfused = replace(offloaded(), fused_gradients=False)  # products add no weight gradients while activations travel
    plain, off = layer_seconds(LAYER, unfused, H100), layer_seconds(LAYER, offloaded("activations"), H100)
    copy = host.link.seconds(saved_bytes(LAYER, offloaded()))
    total = max(plain.forward, copy) + max(plain.backward, copy)
    assert off.forward + off.backward == pytest.approx(total), "each beside the other layers' passes"
    fast = replace(H100, host=replace(host, link=replace(host.link, bandwidth=1e15, latency=0.0)))
    assert layer_seconds(LAYER, offloaded("activations"), fast) == plain
    assert layer_seconds("output", offloaded("activations"), H100) == layer_seconds("output", offloaded(), H100)
    on_cpu = replace(offloaded("activations"), on_gpu=False)
    hidden = layer_seconds(LAYER, replace(on_cpu, offload=()), PROFILES["cpu"])
    assert layer_seconds(LAYER, on_cpu, PROFILES["cpu"]).backward > hidden.backward


def test_moments_on_a_disk_take_no_memory_and_the_disks_time() -> None:
    config = replace(SMALL, execution=replace(SMALL.execution, offload=("optimizer=nvme:/disk", "activations")))
    disk = scenario_of(config, Dims(1, 1, 1, 8), on_gpu=True)
    assert (disk.offload, disk.moments_on_disk) == (BOTH, True)
    host = replace(disk, moments_on_disk=False)
    there, here = (host_memory(each, [0, len(each.names)], 0, recompute="none") for each in (disk, host))
    assert (there.moments, there.disk) == (0, here.moments)
    assert there.pieces == pytest.approx(here.pieces + 3 * min(here.moments, 8 * HOST_PIECE)), "of three pieces"
    count, rate = 1e9, H100.own_host.disk
    assert 8 * count / rate < host_update_seconds(count, H100, on_disk=True) < 1.1 * 8 * count / rate
    fast = replace(H100, host=replace(H100.own_host, disk=1e15))
    assert host_update_seconds(count, fast, on_disk=True) == pytest.approx(host_update_seconds(count, fast))
    best = search(config, 8, H100, space=SPACE).best[0]
    assert best.candidate.applied(config).execution.offload == ("optimizer=nvme:/disk", "activations")
    assert "on disk" in host_line(best.step.host, 8, H100)


def test_parameters_leave_the_device_and_cross_the_bus() -> None:
    whole = replace(offloaded("optimizer", sharding="full"), micro_batches=1)
    off, bounds = replace(whole, offload=("optimizer", "parameters")), [0, len(whole.names)]
    count = model_state_bytes(LAYER, whole).total / (8 / 8)
    assert model_state_bytes(LAYER, off).total == 0, "4 of weights and 4 of gradients, on 8 ranks"
    frozen = replace(off, own=frozenset())
    assert model_state_bytes(LAYER, frozen).total == 0
    assert model_state_bytes(LAYER, replace(off, secondary=4)).total == pytest.approx(2 * count / 4)
    here, there = (host_memory(each, bounds, 0, recompute="none") for each in (whole, off))
    assert there.parameters == pytest.approx(1.44 * here.moments), "8 bytes each, pinned"
    assert (there.moments, there.pieces) == (here.moments, 0), "an update copies nothing"
    still = host_memory(frozen, bounds, 0, recompute="none")
    assert (still.moments, still.parameters) == (0, pytest.approx(there.parameters / 8 * 2))
    assert "parameters" in host_line([there], 8, H100)

    own, link, host = 1e9, H100.own_host.link, H100.own_host.bandwidth
    assert optimizer_seconds(8 * own, off, H100) > 28 * own / host > optimizer_seconds(8 * own, whole, H100) / 4
    slow = replace(H100, host=replace(H100.own_host, link=replace(link, bandwidth=link.bandwidth / 100)))
    fast = gradient_seconds(8 * own, whole, H100, held=8 * own)
    bus = 2 * off.micro_batches * 4 * own / slow.own_host.link.bandwidth
    assert gradient_seconds(8 * own, off, slow, held=8 * own) == pytest.approx(bus, rel=0.01)
    again = replace(off, secondary=4)
    assert gradient_seconds(8 * own, again, slow, held=8 * own) == pytest.approx(bus / 2, rel=0.01)
    assert gradient_seconds(8 * own, whole, slow, held=8 * own) == fast
    more = optimizer_seconds(8 * own, replace(off, micro_batches=3), H100) - optimizer_seconds(8 * own, off, H100)
    assert more == pytest.approx(2 * 12 * own / host), "the host adds gradients of micro-batches"
    alone = replace(off, dims=Dims(1, 1, 1, 1))
    assert gradient_seconds(own, alone, slow, held=own) == pytest.approx(bus, rel=0.01)


def room_for(*offload: Offloaded, hardware: Hardware = H100) -> Hardware:
    """A device in which a layout fits with so much offloaded, and little more."""
    config = replace(SMALL, execution=replace(SMALL.execution, offload=offload))
    fullest = max(predict(config, Dims(1, 1, 1, 8), hardware).memory, key=lambda memory: memory.total)
    return replace(hardware, memory=1.02 * fullest.total - 0.02 * fullest.communicators)


def test_the_search_offloads_as_little_as_gives_room() -> None:
    roomy = search(SMALL, 8, H100, space=SPACE)
    assert roomy.best[0].candidate.offload == ()
    for wanted in (("optimizer",), BOTH):
        hardware = room_for(*wanted)
        outcome = search(SMALL, 8, hardware, space=SPACE)
        best = outcome.best[0]
        assert best.candidate.offload == wanted
        assert best.step.peak <= hardware.memory
        assert best.step.seconds > roomy.best[0].step.seconds
        config = outcome.config(SMALL)
        assert config.execution.offload == wanted
        check(config, world=8)
        assert "host memory of the fullest rank" in report(outcome)
        assert not search(SMALL, 8, hardware, space=replace(SPACE, offload=())).best


def test_a_node_without_room_is_refused() -> None:
    hardware = room_for("optimizer")
    small = replace(hardware, host=replace(hardware.own_host, memory=1e6))
    outcome = search(SMALL, 8, small, space=SPACE)
    assert not outcome.best
    step = predict(replace(SMALL, execution=replace(SMALL.execution, offload=BOTH)), Dims(1, 1, 1, 8), small)
    assert "of a node's memory" in (node_memory_error(step.host, 8, small) or "")
    assert node_memory_error(step.host, 8, hardware) is None
    assert any("--offload needs" in each.reason for each in outcome.rejected)


def test_a_run_says_where_its_node_has_too_little() -> None:
    config, dims = replace(SMALL, execution=replace(SMALL.execution, offload=BOTH)), Dims(1, 1, 1, 8)
    needed = predict(config, dims, H100).host[0].total
    few, many = (offload_memory_error(config, dims, node_memory=4 * needed, devices=count) for count in (2, 8))
    assert few is None, "three quarters of four times as much hold two"
    assert "of a node's memory" in (many or "")
    assert offload_memory_error(SMALL, dims, node_memory=0.0, devices=8) is None


def of_optimizer(kind: str, *, tp: int = 1, dp: int = 1, averages: float = 0.0) -> Scenario:
    optimizer = replace(SMALL.optimizer, kind=kind, ema_decay=averages)  # type: ignore[arg-type]
    precision = replace(SMALL.precision, dtype="bf16")
    return scenario_of(replace(SMALL, optimizer=optimizer, precision=precision), Dims(tp, 1, 1, dp), on_gpu=True)


def test_state_is_four_bytes_a_number() -> None:
    found = {kind: model_state_bytes(LAYER, of_optimizer(kind)) for kind in ("adamw", "muon", "lion")}
    count = found["adamw"].weights / 2
    language = SMALL.model.language
    hidden, ffn = language.hidden_size, language.ffn_hidden_size
    rows = (2 * language.num_attention_heads + 2 * (language.num_query_groups or language.num_attention_heads)) * (
        language.kv_channels or hidden // language.num_attention_heads
    )
    assert found["adamw"].optimizer == 12 * count
    assert found["lion"].optimizer == 8 * count
    assert found["muon"].optimizer == 12 * count - 4 * hidden * (rows + 3 * ffn)
    assert model_state_bytes(LAYER, of_optimizer("lion", averages=0.9)).optimizer == 12 * count
    halves = model_state_bytes(LAYER, of_optimizer("muon", tp=2)).optimizer / found["muon"].optimizer
    assert halves == pytest.approx(0.5, rel=0.01)  # but for norms


def test_the_host_and_a_disk_have_what_a_rule_keeps() -> None:
    """EMA weights stay in host memory where moments are on a disk."""
    found = {}
    for kind in ("adamw", "lion"):
        off = replace(of_optimizer(kind, averages=0.9), offload=("optimizer",))
        for name, scenario in (("host", off), ("disk", replace(off, moments_on_disk=True))):
            found[kind, name] = host_memory(scenario, [0, len(off.names)], 0, recompute="none")
    one = found["lion", "disk"].disk
    assert found["adamw", "disk"].disk == 2 * one
    assert found["adamw", "disk"].moments == found["lion", "disk"].moments == one
    assert (found["adamw", "host"].moments, found["lion", "host"].moments) == (3 * one, 2 * one)
    adamw, lion = (host_update_seconds(1e9, H100, state=state, on_disk=True) for state in (2, 1))
    assert lion == pytest.approx(adamw / 2, rel=0.1), "the disk's time"


def test_ranks_share_the_matrices_of_their_stage() -> None:
    names = (LAYER,)
    alone, shared = (matrix_seconds(names, of_optimizer("muon", dp=dp), H100) for dp in (1, 2))
    shapes = [(64, 64)]  # the rate alone
    assert matrix_seconds(names, of_optimizer("adamw"), H100) == 0
    assert alone * H100.forward.matmul > newton_schulz_flops(SMALL.optimizer, *shapes[0])
    assert alone / 2 < shared - 2 * H100.near.latency < alone
    assert matrix_bytes(names, of_optimizer("lion")) == 0
    one, eight = (matrix_bytes(names, of_optimizer("muon", dp=dp)) for dp in (1, 8))
    assert eight < one
