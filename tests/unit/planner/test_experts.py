"""Mixtures of experts in the planner: what a rank holds, moves and computes, and the layouts that are found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megavlm.arch.dims import Dims, dims_of, with_dims
from megavlm.arch.kind import Exchange
from megavlm.arch.kinds import kind_in, layer_cost, layer_sizes, local_parameters, rank_parameters
from megavlm.arch.layers import layer_names, part_of
from megavlm.arch.plan import make_plan
from megavlm.arch.scenario import EXPERT_IMBALANCE, Scenario, scenario_of
from megavlm.arch.workload import typical_workload
from megavlm.config.schema import Config, DataConfig, ExpertsConfig, ModelConfig, PrecisionConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.auto import planned
from megavlm.planner.candidates import Space, candidates
from megavlm.planner.hardware import PROFILES
from megavlm.planner.layer_profiles import layer_profiles
from megavlm.planner.memory import model_state_bytes
from megavlm.planner.search import search
from megavlm.planner.terms import exchange_seconds, product_seconds
from megavlm.rules.check import check
from tests.support.small_run import SMALL

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


def case(dims: Dims, config: Config = MIXTURE, *, imbalance: float = 1.0) -> Scenario:
    return scenario_of(with_dims(config, dims), dims, on_gpu=True, imbalance=imbalance)


@pytest.mark.parametrize(("model", "billions", "active"), [(QWEN3_30B, 30.53, 3.35), (QWEN3_235B, 235.1, 22.2)])
def test_published_sizes_and_what_a_token_passes(model: ModelConfig, billions: float, active: float) -> None:
    """Qwen states 30.5 and 235 billion parameters, 3.3 and 22 billion of them active."""
    language = [name for name in layer_names(model) if part_of(name) == "language"]
    assert sum(local_parameters(name, model, 1) for name in language) / 1e9 == pytest.approx(billions, rel=1e-3)
    work = replace(typical_workload(large(gpus=1)), token_squares=0)
    forward = sum(layer_cost(name, model, work).forward_flops for name in language)
    embedding = local_parameters("embedding", model, 1)
    assert (forward / 2 / work.tokens + embedding) / 1e9 == pytest.approx(active, rel=5e-3)


def test_dense_layers_among_mixtures_have_one_mlp() -> None:
    model = replace(MIXTURE.model, experts=replace(MIXTURE.model.experts, dense_layers=(0,)))
    assert local_parameters("language.layers.0", model, 1) == local_parameters("language.layers.0", SMALL.model, 1)
    assert local_parameters(LAYER, model, 1) == local_parameters(LAYER, MIXTURE.model, 1)
    config = replace(MIXTURE, model=model)
    two = Dims(1, 2, 1, 1)
    # A dense MLP of 1,536 does half as much again as two experts of 512: the first stage gets fewer layers.
    even, uneven = (make_plan(each, two).chunks for each in (MIXTURE, config))
    assert len(uneven[0]) <= len(even[0])
    scenario = case(two, config)
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
    scenario, experts = case(dims), 8 * 3 * 512 * 512 // ranks
    rest = rank_parameters(LAYER, scenario) - experts
    assert rest == local_parameters(LAYER, MIXTURE.model, dims.tp) - 8 * 3 * 512 * 512
    state = model_state_bytes(LAYER, scenario)
    assert state.weights == 2 * (rest + experts)
    assert state.gradients == 4 * (rest + experts)
    assert state.optimizer == pytest.approx(12 * (rest / dims.dp_cp + experts / copies))


def test_tokens_travel_to_their_experts_and_back() -> None:
    """Each of EP ranks sends (EP − 1) / EP of its rows, top-k for each token, there and back."""
    scenario = case(Dims(tp=2, dp=8, ep=4))
    tokens = scenario.work.tokens / 2
    sent = Exchange(ranks=4, stride=1, size=tokens * 2 * 512 * 2, to_each=True)
    assert kind_in(scenario.model, LAYER).expert_exchange(scenario) == (sent, sent)
    assert kind_in(scenario.model, LAYER).expert_exchange(case(Dims(dp=8))) == ()
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
        scenario = case(Dims(dp=8, ep=8), config)
        scenario = replace(scenario, work=replace(scenario.work, tokens=rows * 16 // 8))
        assert layer_sizes(LAYER, scenario).routed.rows == rows * 16  # type: ignore[union-attr]
        return product_seconds(LAYER, scenario, H100, reached=False)[0]

    moved = 2 * (weights + 16 * 4 * (2 * 2048 + 3 * 768))
    assert forward(4) == pytest.approx(moved / H100.forward.bandwidth)
    assert forward(4096) == pytest.approx(2 * weights * (4096 + 64) / H100.forward.matmul)
    own_tile = replace(H100, row_tile=512)
    scenario = case(Dims(dp=8, ep=8), config)
    alone, shared = (product_seconds(LAYER, scenario, each, reached=False) for each in (own_tile, H100))
    assert alone > shared


def test_the_busiest_rank_computes_and_holds_more() -> None:
    even, uneven = (predict_at(imbalance) for imbalance in (1.0, 1.5))
    assert uneven[0] == pytest.approx(1.5 * even[0])
    assert uneven[1] > even[1]
    alone = (layer_sizes(LAYER, case(Dims(dp=8), imbalance=x)).routed for x in (1.0, 1.5))
    assert len(set(alone)) == 1, "a rank with all experts computes all its rows"
    forced = replace(MIXTURE.model, experts=replace(MIXTURE.model.experts, router_force_load_balancing=True))
    assert scenario_of(MIXTURE, Dims()).imbalance == EXPERT_IMBALANCE
    assert scenario_of(replace(MIXTURE, model=forced), Dims()).imbalance == 1.0


def predict_at(imbalance: float) -> tuple[float, float]:
    """Return the rows of a rank's experts, and the bytes that a layer keeps."""
    scenario = case(Dims(dp=8, ep=8), imbalance=imbalance)
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
