"""What the planner takes for the work of experts, of collectives and of each part of a layer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest

from megavlm.arch.dims import Dims, dims_of, with_dims
from megavlm.arch.kind import Exchange
from megavlm.arch.kinds import kind_in, layer_cost, layer_sizes, model_parameters, rank_parameters
from megavlm.arch.layers import layer_names, part_of
from megavlm.arch.plan import make_plan
from megavlm.arch.scenario import EXPERT_IMBALANCE, Scenario, scenario_of
from megavlm.arch.schedules import shape_of
from megavlm.arch.workload import typical_workload
from megavlm.command_line.parsing import parse
from megavlm.config.schema import Config, DataConfig, ExpertsConfig, ModelConfig, PrecisionConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.auto import memory_of, planned
from megavlm.planner.candidates import Space, candidates
from megavlm.planner.collectives import Group, all_reduce, group_of, ring, tree
from megavlm.planner.cost import features_of, layer_seconds
from megavlm.planner.hardware import PROFILES, Link, fp8_speed
from megavlm.planner.layer_profiles import layer_profiles, relays
from megavlm.planner.memory import model_state_bytes, table
from megavlm.planner.search import search
from megavlm.planner.terms import (
    FP8,
    NOW,
    TE_HOST,
    TORCH,
    exchange_seconds,
    launch_seconds,
    layer_terms,
    memory_traffic,
    product_seconds,
    program_of,
    rank_flops,
    work_terms,
)
from megavlm.rules.check import check
from megavlm.rules.defaults import resolve
from tests.support.flags import resolved
from tests.support.small_run import SMALL
from tests.support.training import LEAN

H100 = PROFILES["h100"]
LAYER = "language.layers.1"
MIXTURE = replace(
    SMALL, model=replace(SMALL.model, experts=ExpertsConfig(num_experts=8, router_topk=2, ffn_hidden_size=512))
)
QWEN3_30B, QWEN3_235B = (published_model(f"qwen3_vl_{size}") for size in ("30b_a3b", "235b_a22b"))


def large(*, gpus: int) -> Config:
    return Config(
        model=QWEN3_235B,
        precision=PrecisionConfig("bf16"),
        train=TrainConfig(seq_length=8192, global_batch_size=8 * gpus),
        data=DataConfig(kind="synthetic", image_sizes=(1024,), images_per_sample=(6,)),
    )


def of_experts(dims: Dims, config: Config = MIXTURE, *, imbalance: float = 1.0) -> Scenario:
    return scenario_of(with_dims(config, dims), dims, on_gpu=True, imbalance=imbalance)


@pytest.mark.parametrize(("model", "billions", "active"), [(QWEN3_30B, 30.53, 3.35), (QWEN3_235B, 235.1, 22.2)])
def test_published_sizes_and_what_a_token_passes(model: ModelConfig, billions: float, active: float) -> None:
    """Qwen states 30.5 and 235 billion parameters, 3.3 and 22 billion of them active."""
    language = [name for name in layer_names(model) if part_of(name) == "language"]
    assert sum(model_parameters(name, model) for name in language) / 1e9 == pytest.approx(billions, rel=1e-3)
    work = replace(typical_workload(large(gpus=1)), token_squares=0)
    forward = sum(layer_cost(name, model, work).forward_flops for name in language)
    embedding = model_parameters("embedding", model)
    assert (forward / 2 / work.tokens + embedding) / 1e9 == pytest.approx(active, rel=5e-3)


def test_dense_layers_among_mixtures_have_one_mlp() -> None:
    model = replace(MIXTURE.model, experts=replace(MIXTURE.model.experts, dense_layers=(0,)))
    assert model_parameters("language.layers.0", model) == model_parameters("language.layers.0", SMALL.model)
    assert model_parameters(LAYER, model) == model_parameters(LAYER, MIXTURE.model)
    config = replace(MIXTURE, model=model)
    two = Dims(1, 2, 1, 1)
    # A dense MLP of 1,536 does half as much again as two experts of 512: the first stage gets fewer layers.
    even, uneven = (make_plan(each, two).chunks for each in (MIXTURE, config))
    assert len(uneven[0]) <= len(even[0])
    scenario = of_experts(two, config)
    assert rank_parameters("language.layers.0", scenario) != rank_parameters(LAYER, scenario)
    first = scenario.names.index("language.layers.0")
    state = layer_profiles(scenario, H100).model_state
    assert state[first + 1] - state[first] < state[first + 2] - state[first + 1], "each layer is measured as it is"


@pytest.mark.parametrize(
    ("dims", "ranks", "copies"),
    [
        (Dims(dp=8, ep=4), 4, 2),
        (Dims(tp=2, dp=4, etp=1), 1, 8),
        (Dims(tp=2, dp=4, ep=2, etp=2), 4, 2),
        (Dims(tp=2, pp=2, dp=2, ep=4), 4, 1),
        (Dims(tp=1, cp=2, dp=4, ep=8), 8, 1),
    ],
)
def test_experts_are_shared_by_ep_and_etp_and_their_state_by_the_rest(dims: Dims, ranks: int, copies: int) -> None:
    """bf16 weights, fp32 gradients; fp32 master weights and moments shared by expert data parallelism."""
    scenario, experts = of_experts(dims), 8 * 3 * 512 * 512 // ranks
    rest = rank_parameters(LAYER, scenario) - experts
    assert rest == kind_in(MIXTURE.model, LAYER).parameters(MIXTURE.model, dims.tp)
    state = model_state_bytes(LAYER, scenario)
    assert state.weights == 2 * (rest + experts)
    assert state.gradients == 4 * (rest + experts)
    assert state.optimizer == pytest.approx(12 * (rest / dims.dp_cp + experts / copies))


def test_tokens_travel_to_their_experts_and_back() -> None:
    """Each of EP ranks sends (EP − 1) / EP of its rows, top-k for each token, there and back."""
    scenario = of_experts(Dims(tp=2, dp=8, ep=4))
    tokens = scenario.work.tokens / 2
    sent = Exchange(ranks=4, stride=1, size=tokens * 2 * 512 * 2, to_each=True)
    assert kind_in(scenario.model, LAYER).expert_exchange(scenario) == (sent, sent)
    assert kind_in(scenario.model, LAYER).expert_exchange(of_experts(Dims(dp=8))) == ()
    seconds = exchange_seconds(sent, H100)
    assert seconds == pytest.approx(H100.near.latency + sent.size * 3 / 4 / H100.near.bandwidth)
    # Of 16 ranks, 8 are in another node: the network takes their half.
    wide = replace(sent, ranks=16)
    assert exchange_seconds(wide, H100) == pytest.approx(H100.far.latency + sent.size / 2 / H100.far.bandwidth)
    assert exchange_seconds(replace(sent, ranks=4, stride=8), H100) == pytest.approx(
        H100.far.latency + sent.size * 3 / 4 / H100.far.bandwidth
    ), "ranks of an expert fill a node"


def test_few_rows_are_bound_by_reading_weights_and_many_by_computing() -> None:
    """An expert reads 3·H·F weights whatever its rows are; its tiles of 128 rows are half empty once each."""
    config = replace(MIXTURE, model=replace(QWEN3_30B, freeze=("vision", "projector", "language")))
    weights = 16 * 3 * 2048 * 768  # of a rank's 16 experts

    def forward(rows: int) -> float:
        scenario = of_experts(Dims(dp=8, ep=8), config)
        scenario = replace(scenario, work=replace(scenario.work, tokens=rows * 16 // 8))
        assert layer_sizes(LAYER, scenario).routed.rows == rows * 16  # type: ignore[union-attr]
        return product_seconds(LAYER, scenario, H100, reached=False)[0]

    moved = 2 * (weights + 16 * 4 * (2 * 2048 + 3 * 768))
    assert forward(4) == pytest.approx(moved / H100.forward.bandwidth)
    assert forward(4096) == pytest.approx(2 * weights * (4096 + 64) / H100.forward.matmul)
    own_tile = replace(H100, row_tile=512)
    scenario = of_experts(Dims(dp=8, ep=8), config)
    alone, shared = (product_seconds(LAYER, scenario, each, reached=False) for each in (own_tile, H100))
    assert alone > shared


def test_the_busiest_rank_computes_and_holds_more() -> None:
    even, uneven = (predict_at(imbalance) for imbalance in (1.0, 1.5))
    assert uneven[0] == pytest.approx(1.5 * even[0])
    assert uneven[1] > even[1]
    alone = (layer_sizes(LAYER, of_experts(Dims(dp=8), imbalance=x)).routed for x in (1.0, 1.5))
    assert len(set(alone)) == 1, "a rank with all experts computes all its rows"
    forced = replace(MIXTURE.model, experts=replace(MIXTURE.model.experts, router_force_load_balancing=True))
    assert scenario_of(MIXTURE, Dims()).imbalance == EXPERT_IMBALANCE
    assert scenario_of(replace(MIXTURE, model=forced), Dims()).imbalance == 1.0


def predict_at(imbalance: float) -> tuple[float, float]:
    """Return the rows of a rank's experts, and the bytes that a layer keeps."""
    scenario = of_experts(Dims(dp=8, ep=8), imbalance=imbalance)
    routed = layer_sizes(LAYER, scenario).routed
    return routed.rows, kind_in(scenario.model, LAYER).saved_bytes(scenario, trained=True, core_attention=False)


def test_a_plan_says_ep_and_trains_with_it() -> None:
    space = Space(micro_batch=(1,), recompute=("none",), placement=("stages",), offload=())
    outcome = search(MIXTURE, 8, H100, space=space, top=40)
    degrees = {(each.candidate.dims.ep, each.candidate.dims.expert_tp) for each in outcome.best}
    assert {(1, 1), (8, 1)} <= degrees
    shared = next(each for each in outcome.best if each.candidate.dims.ep == 8)
    assert " EP8" in shared.candidate.label
    config = shared.candidate.applied(MIXTURE, shared.partition.cuts)
    check(config, world=8)
    found = make_plan(config, dims_of(config, world=8))
    assert found.dims == shared.candidate.dims
    assert json.loads(found.dumps())["dims"]["ep"] == 8
    assert not {"ep", "etp"} & json.loads(make_plan(SMALL, Dims()).dumps())["dims"].keys()
    auto = planned(replace(MIXTURE, placement=replace(MIXTURE.placement, plan="auto", hardware="h100")), 8)
    check(auto, world=8)
    assert all(each.dims.ep == 1 for each in candidates(8, Space(), length=4096)), "dense models have no EP"


NEAR, FAR = Link(400e9, 1e-6), Link(50e9, 5e-6)
NODE, NODES, SPREAD = Group(8, 1, NEAR, FAR), Group(32, 4, NEAR, FAR), Group(4, 4, NEAR, FAR)
MUCH, LITTLE = 1e11, 1e3


def test_bytes_by_hand() -> None:
    """A node's ranks share its eight adapters, 400 GB/s; a rank that is alone in its node has one, 50 GB/s."""
    assert ring(MUCH, NODE) == pytest.approx(2 * MUCH * 7 / 8 / 400e9, rel=1e-3)
    assert ring(MUCH, NODES) == pytest.approx(2 * MUCH * 31 / 32 / 400e9, rel=1e-2)
    assert ring(MUCH, SPREAD) == pytest.approx(2 * MUCH * 3 / 4 / 50e9, rel=1e-2)
    assert tree(MUCH, NODES) == pytest.approx(2 * MUCH / (0.9 * 400e9), rel=1e-2)
    few = replace(NODES, far=Link(1e9, 5e-6))  # 8 GB/s of a node: the links inside do not matter
    assert ring(MUCH, few) == pytest.approx(2 * MUCH * 31 / 32 / 8e9, rel=1e-2)


def test_hops_by_hand() -> None:
    """Of a ring's 31 hops each way 3 are between nodes; a tree has 7 within a node and 2 across."""
    assert ring(0, NODES) == pytest.approx(2 * (28 * 1e-6 + 3 * 5e-6))
    assert tree(0, NODES) == pytest.approx(2 * (7 * 1e-6 + 2 * 5e-6))


def test_nccl_takes_trees_for_small_tensors_and_rings_for_large_ones() -> None:
    for nodes in (4, 64, 256):
        group = Group(8 * nodes, nodes, NEAR, FAR)
        assert all_reduce(LITTLE, group) == tree(LITTLE, group) < ring(LITTLE, group)
        assert all_reduce(MUCH, group) == ring(MUCH, group) < tree(MUCH, group)
    assert all(all_reduce(size, NODE) == ring(size, NODE) for size in (LITTLE, MUCH))


@pytest.mark.parametrize(
    ("ranks", "span", "nodes", "per_node"),
    [
        (8, 8, 1, 8),
        (4, 8, 1, 4),
        (16, 16, 2, 8),
        (4, 16, 2, 2),
        (4, 32, 4, 1),
        (2, 32, 2, 1),
        (12, 12, 2, 6),
        (1, 64, 1, 1),
    ],
)
def test_where_ranks_are(ranks: int, span: int, nodes: int, per_node: int) -> None:
    group = group_of(H100, ranks, span=span)
    assert (group.nodes, group.per_node) == (nodes, per_node)


@pytest.mark.parametrize(
    ("flags", "dims", "gib"),
    [
        ("", Dims(), 0.54),
        ("", Dims(dp=4), 1.07),  # the world's communicator, and that of the data-parallel ranks
        ("--tp 2 --pp 2", Dims(tp=2, pp=2, dp=2), 1.19),  # TP, PP, DP and a replica
    ],
)
def test_a_gpu_holds_its_context_and_a_communicator_of_each_group(flags: str, dims: Dims, gib: float) -> None:
    config = resolve(parse([*LEAN, "--global-batch-size", "8", *flags.split()]), vocab_size=97)
    on_gpu, on_cpu = (memory_of(config, dims, on_gpu=each) for each in (True, False))
    assert all(each.communicators == pytest.approx(gib * 2**30) for each in on_gpu)
    assert {each.communicators for each in on_cpu} == {0.0}
    assert "communicators" in table(on_gpu)
    assert "communicators" not in table(on_cpu)


LANGUAGE, VISION = "language.layers.0", "vision.layers.0"
INSIDE = {"rotation", "activation", "copies of values", "norms of queries and keys"}
BETWEEN = {"norms", "residuals", "layer scale"}


def case(name: str = "qwen3_vl_8b", flags: str = "", *, tp: int = 1, dp: int = 1) -> Scenario:
    argv = (
        f"--precision bf16 --seq-length 4096 --global-batch-size {8 * dp} --set model.language.vocab_size=256 {flags}"
    ).split()
    config = parse(argv)
    return scenario_of(replace(config, model=published_model(name)), Dims(tp=tp, pp=1, vpp=1, dp=dp), on_gpu=True)


def without_padding(scenario: Scenario) -> Scenario:
    """Make the tower's MLP so wide that one and two ranks hold it without padding."""
    vision = replace(scenario.model.vision, ffn_hidden_size=4096)
    return replace(scenario, model=replace(scenario.model, vision=vision))


@pytest.mark.parametrize("name", ["qwen3_vl_8b", "internvl3_8b", "llava_1_5_7b", "qwen2_5_vl_7b"])
def test_tensor_parallelism_divides_what_lies_inside_blocks_and_sequences_the_rest(name: str) -> None:
    whole = without_padding(case(name))
    for layer in (LANGUAGE, VISION):
        alone = memory_traffic(layer, whole, NOW)
        assert {"norms", "residuals", "activation"} <= set(alone) <= INSIDE | BETWEEN
        for sequences in (True, False):
            two = without_padding(case(name, tp=2))
            half = memory_traffic(layer, replace(two, sequence_parallel=sequences), NOW)
            for term, (forward, backward) in alone.items():
                share = 2 if sequences or term in INSIDE else 1
                assert half[term] == pytest.approx((forward / share, backward / share)), (layer, term)


def test_frozen_layers_have_no_weight_gradients_and_without_gradients_no_backward_pass() -> None:
    trained, torch = case(), case(flags="--transformer-impl torch")
    assert program_of(torch) is TORCH
    added = memory_traffic(LANGUAGE, torch, TORCH)["weight gradients"]
    assert added[0] == 0 < added[1]
    reached = replace(torch, own=torch.own - {LANGUAGE})
    assert "weight gradients" not in memory_traffic(LANGUAGE, reached, TORCH)
    assert layer_seconds(LANGUAGE, reached, H100).backward < layer_seconds(LANGUAGE, torch, H100).backward
    frozen = replace(trained, own=frozenset(), trained=frozenset())
    for name in frozen.names:
        found = layer_seconds(name, frozen, H100)
        assert found.backward == found.launch[1] == 0, name
        if name == "output":  # which computes its input's gradient beside the loss
            assert found.forward < layer_seconds(name, trained, H100).forward
        else:
            assert found.forward == layer_seconds(name, trained, H100).forward, name
        assert not any(pair[1] for pair in layer_terms(name, frozen, H100, NOW).values()), name


def test_passes_of_host_and_device_are_those_that_an_event_loop_plays() -> None:
    random = np.random.default_rng(0)
    for _ in range(5):
        device, host = random.uniform(0, 1, (2, 9)) * random.choice([0.3, 1, 3], 2)[:, None]
        prefix = [np.concatenate([[0.0], np.cumsum(values)]) for values in (device, host)]
        forward, backward = relays(prefix[1], prefix[0]), relays(prefix[0], prefix[1])
        for i in range(9):
            for j in range(i + 1, 10):
                assert forward[i, j] == pytest.approx(played(device[i:j], host[i:j]))
                assert backward[i, j] == pytest.approx(played(device[i:j][::-1], host[i:j][::-1]))


def played(device: np.ndarray, host: np.ndarray) -> float:
    issued = ended = 0.0
    for runs, launches in zip(device, host, strict=True):
        issued += launches
        ended = max(ended, issued) + runs
    return ended


@pytest.mark.parametrize("name", ["gemma3_27b", "qwen3_5_9b", "qwen2_5_vl_7b", "kimi_k2_5"])
def test_layers_measured_by_kind_take_what_each_takes(name: str) -> None:
    profiles = layer_profiles(case(name, "--seq-length 32768"), H100)
    each = [layer_seconds(layer, profiles.scenario, H100).forward for layer in profiles.scenario.names]
    assert list(np.diff(profiles.forward)) == pytest.approx(each)


def test_a_single_stage_waits_for_its_host_once_a_step_and_stages_in_each_pass() -> None:
    """LLaVA's vision layers launch slower than they run; its language layers, which follow, take far longer."""
    profiles = layer_profiles(case("llava_1_5_7b"), H100)
    count = profiles.count
    device = float(profiles.forward[-1])
    alone = profiles.durations([(0, count)], (), shape=shape_of(profiles.scenario.dims, 3))
    assert alone.forward[0][0] > 1.05 * device
    assert alone.forward[0][1:] == pytest.approx([device] * 2)
    shape = replace(shape_of(profiles.scenario.dims, 3), pp=2)
    stages = profiles.durations([(0, 26), (26, count)], (0.0,), shape=shape)
    vision = sum(launch_seconds(n, profiles.scenario, NOW, TE_HOST)[0] for n in profiles.scenario.names[:26])
    assert stages.forward[0] == pytest.approx([vision] * 3, rel=0.02)
    ran = sum(
        sum(p[0] for p in layer_terms(n, profiles.scenario, H100, NOW).values()) for n in profiles.scenario.names[:26]
    )
    assert ran < 0.7 * vision


def test_heads_and_widths_that_tp_does_not_divide_take_what_their_padding_takes() -> None:
    """Qwen2.5-VL-7B at TP 8: 32 heads where 28 are, and 3,456 channels of the tower's MLP where 3,420 are."""
    given = case("qwen2_5_vl_7b", tp=8)
    language, vision = given.model.language, given.model.vision
    sizes = {"language": replace(language, num_attention_heads=32), "vision": replace(vision, ffn_hidden_size=8 * 432)}
    padded = replace(given, model=replace(given.model, **sizes))
    for layer in (LANGUAGE, VISION):
        assert rank_flops(layer, given) == pytest.approx(rank_flops(layer, padded), rel=1e-12)
        own, wide = (kind_in(each.model, layer).parameters(each.model, 8) for each in (given, padded))
        assert own == wide
    divided = case("qwen2_5_vl_7b", tp=4)
    whole = case("qwen2_5_vl_7b")
    assert rank_flops(LANGUAGE, divided) == tuple(flops / 4 for flops in rank_flops(LANGUAGE, whole))


# As wide as a 7B: where products are narrower, casting costs more than FP8 saves.
WIDE = (
    "--precision bf16 --set model.language.hidden_size=4096 model.language.ffn_hidden_size=11008 "
    "model.language.num_attention_heads=32 --seq-length 4096 --set model.language.vocab_size=256"
)
FIRST_LAST = f"{WIDE} --fp8 hybrid --first-last-layers-bf16"
ONE = Dims()


def test_only_products_of_fp8_layers_are_faster_and_their_inputs_are_cast() -> None:
    high = scenario_of(resolved(WIDE.split()), ONE, on_gpu=True)
    low = scenario_of(resolved(FIRST_LAST.split()), ONE, on_gpu=True)
    assert low.fp8 == {"language.layers.1", "language.layers.2"}
    for name in low.names:
        before, after = layer_seconds(name, high, H100).forward, layer_seconds(name, low, H100).forward
        products = features_of(name, low)[0] / H100.forward.matmul
        saved = products * (1 - 1 / (fp8_speed(H100) * FP8["tensorwise"].share)) if name in low.fp8 else 0.0
        # Read twice in bf16, written twice in FP8: inputs of QKV, of the output projection, and of the MLP's products.
        cast = 6 * 4096 * (3 * 4096 + 11008) / H100.forward.bandwidth if name in low.fp8 else 0.0
        assert before - after == pytest.approx(saved - cast, rel=1e-6, abs=1e-12), name
    # Layers are measured by kind: kept ones are another kind.
    forward = layer_profiles(low, H100).forward
    times = dict(zip(low.names, forward[1:] - forward[:-1], strict=True))
    assert times["language.layers.0"] > times["language.layers.1"]
    assert forward[-1] == pytest.approx(sum(layer_seconds(name, low, H100).forward for name in low.names))


def test_every_recipe_of_the_option_has_its_terms() -> None:
    assert FP8.keys() == set(get_args(get_type_hints(PrecisionConfig)["fp8_recipe"]))
    wide = [*WIDE.split(), "--fp8", "hybrid", "--fp8-recipe"]
    seconds = {
        recipe: layer_seconds("language.layers.1", scenario_of(resolved([*wide, recipe]), ONE, on_gpu=True), H100)
        for recipe in ("delayed", "tensorwise", "blockwise")
    }
    took = [seconds[recipe].forward + seconds[recipe].backward for recipe in ("delayed", "tensorwise", "blockwise")]
    assert took == sorted(took)  # 0.319, 0.331 and 0.355 s for a step of LLaVA on an H200


def test_attention_pays_for_the_width_that_its_kernel_has_and_for_scores_that_it_computes_again() -> None:
    """Heads of 80 channels, Qwen2.5-VL's, take a kernel for 128: 249 TFLOP/s were measured, forward and backward."""
    vision = "model.vision.hidden_size=1280 model.vision.num_attention_heads=16 model.vision.ffn_hidden_size=3420"
    config = resolved(["--precision", "bf16", "--set", *vision.split()])
    on_cpu, on_gpu = (scenario_of(config, ONE, on_gpu=gpu) for gpu in (False, True))
    name = "vision.layers.0"
    assert rank_flops(name, on_gpu)[1] / rank_flops(name, on_cpu)[1] == 128 / 80
    ahead, back = work_terms(name, on_gpu, H100)["attention"]
    assert back * H100.backward.attention == pytest.approx(2.5 * ahead * H100.forward.attention)


def test_devices_without_fp8_units_gain_nothing() -> None:
    assert fp8_speed(PROFILES["a100"]) == fp8_speed(PROFILES["cpu"]) == 1
    assert fp8_speed(PROFILES["h200"]) == pytest.approx(2, rel=1e-3)


def test_weights_are_held_again_in_fp8_unless_they_are_in_fp8_alone() -> None:
    for sharding in ("optimizer", "full"):
        argv = [*FIRST_LAST.split(), "--data-parallel-sharding", sharding]
        on_cpu, on_gpu = (scenario_of(resolved([*argv]), ONE, on_gpu=gpu) for gpu in (False, True))
        for name in on_gpu.names:
            more = 2 * model_parameters(name, on_gpu.model) if name in on_gpu.fp8 else 0
            assert model_state_bytes(name, on_gpu).weights - model_state_bytes(name, on_cpu).weights == more, name
    alone = scenario_of(resolved([*FIRST_LAST.split(), "--fp8-param-gather"]), ONE, on_gpu=True)
    assert alone.kept_in_fp8 == alone.fp8
    assert all(
        model_state_bytes(name, alone) == model_state_bytes(name, replace(alone, on_gpu=False)) for name in alone.names
    )
