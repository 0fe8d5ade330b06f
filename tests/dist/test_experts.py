"""A mixture of experts gives the numbers of one process at every layout, balance losses included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from megavlm.arch.kinds import kind_in, layer_cost
from megavlm.arch.layers import LANGUAGE_LAYER, kind_of
from megavlm.arch.scenario import scenario_of
from megavlm.model import router
from megavlm.model.context import MicroBatchContext
from tests.support.covering import axes_of, covering, pairs, short_and_long, slow
from tests.support.data_files import sources_of, write_all
from tests.support.pool import Pools
from tests.support.training import SMALL, THREE, assert_same_curve, farthest_apart, metrics, started, train

# Balance losses on, so large that they move the gradient norm by per cents; a dense first layer; a shared expert.
SOFTMAX = (
    "--num-experts 4 --set model.experts.ffn_hidden_size=24 model.experts.dense_layers=[0] --moe-aux-loss-coeff 0.1 "
    "--moe-z-loss-coeff 0.01 --set model.experts.shared_ffn_hidden_size=32 model.experts.shared_gate=true"
)
# A bias that moves each step, groups of experts, more experts than tokens of some rows choose.
SIGMOID = (
    "--num-experts 8 --set model.experts.ffn_hidden_size=16 model.experts.router_topk=4 "
    "model.experts.router_score_function=sigmoid model.experts.router_enable_expert_bias=true "
    "--moe-router-bias-update-rate 0.02 --set model.experts.router_num_groups=4 "
    "model.experts.router_group_topk=2 model.experts.router_topk_scaling_factor=2.5 --moe-aux-loss-coeff 0.05"
)
MODELS = {
    "softmax": SOFTMAX,
    "sigmoid": SIGMOID,
    "biases": "--num-experts 4 --set model.experts.add_bias=true model.language.activation=clamped_swiglu",
    "pre-softmax": "--num-experts 4 --set model.experts.router_topk=1 model.experts.router_pre_softmax=true "
    "--moe-z-loss-coeff 0.01",
    "frozen-language": f"{SOFTMAX} --freeze language",
    "frozen-vision": f"{SIGMOID} --freeze vision projector --set model.language.tie_embeddings=true",
    "one-image-rank": f"{SOFTMAX} --set data.imageless_samples=[1,2,3] --images-per-sample 1",
}
LAYOUTS = {
    "ep2": (2, "--ep 2"),
    "ep4": (4, "--ep 4"),
    "tp2-ep2": (2, "--tp 2 --ep 2"),
    "tp2-ep2-etp2": (4, "--tp 2 --ep 2 --etp 2"),
    "tp2-etp1": (2, "--tp 2 --etp 1"),
    "tp2-etp2": (2, "--tp 2"),
    "dp2-etp2": (2, "--etp 2"),
    "pp2-ep2": (4, "--pp 2 --ep 2"),
    "cp2-ep2": (2, "--cp 2 --ep 2"),
    "ep2-edp2": (4, "--ep 2"),
    "tp2-ep2-edp2": (4, "--tp 2 --ep 2"),
    "pp2-vpp2-ep2": (4, "--pp 2 --vpp 2 --ep 2"),
    "dp2": (2, ""),
}
FAST = [
    ("tp2-ep2-etp2", "softmax", "--micro-batch-size 2"),
    ("pp2-vpp2-ep2", "sigmoid", "--recompute-granularity full"),
    ("cp2-ep2", "sigmoid", "--micro-batch-size 2 --moe-token-dispatcher-type allgather"),
    ("tp2-ep2-etp2", "biases", ""),
    ("tp2-etp1", "softmax", "--micro-batch-size 4 --data-parallel-sharding none"),
]
OPTIONS = (
    ("softmax", "--moe-token-dispatcher-type allgather"),
    ("sigmoid", "--recompute-granularity full"),
    ("softmax", "--placement colocated"),
    ("sigmoid", "--data-parallel-sharding none"),
)
SLOW = [
    # Each layout, each model with each axis, and each layout with two options of four.
    *covering(
        [(layout, model, "") for layout in LAYOUTS for model in MODELS],
        lambda case: {case[0], *pairs([case[1]], axes_of(LAYOUTS[case[0]][1]))},
    ),
    *[(layout, *OPTIONS[place % len(OPTIONS)]) for place, layout in enumerate(LAYOUTS)],
    *[(layout, *OPTIONS[(place + 2) % len(OPTIONS)]) for place, layout in enumerate(LAYOUTS)],
    *[("ep2", "softmax", f"--micro-batch-size {size}") for size in (1, 2)],
    ("pp2-ep2", "softmax", "--pipeline-cuts 7 --data-parallel-sharding none"),  # the first stage has no experts
    ("ep2-edp2", "softmax", "--overlap-grad-reduce --overlap-param-gather"),
    ("ep2", "softmax", "--offload optimizer activations"),
    ("tp2-ep2-edp2", "softmax", "--cp 2 --ep 4"),
]
EXPERTS = ("balance_loss", "router_z_loss", "expert_load_max", "expert_load_entropy")


@pytest.fixture(scope="module")
def one(alone: Any) -> Callable[..., list[dict[str, Any]]]:
    """Return the metrics of a mixture on one process."""
    return lambda model, steps=THREE: alone([*SMALL, *MODELS[model].split(), *steps])


def assert_same_balance(actual: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Both runs report the same balance losses and loads of all layers."""
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours["expert_load_max"], "experts were loaded"
        for name in EXPERTS:
            assert (name in ours) == (name in theirs)
            if name in ours:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name


@pytest.mark.parametrize(("layout", "model", "option", "steps"), short_and_long(FAST, [*FAST, *SLOW]))
def test_every_layout_of_experts_gives_the_numbers_of_one_process(pools, one, tmp_path, layout, model, option, steps):
    world, flags = LAYOUTS[layout]
    argv = [*SMALL, "--no-save", *MODELS[model].split(), *flags.split(), *option.split(), *steps]
    pools(world).run(train, argv, str(tmp_path))
    assert_same_curve(metrics(tmp_path), one(model, steps))
    assert_same_balance(metrics(tmp_path), one(model, steps))


MANY = ((2, "--ep 2"), (4, "--ep 4"), (2, "--tp 2 --etp 2"), (2, "--cp 2 --ep 2"), (2, "--tp 2 --etp 1"), (1, ""))


@pytest.mark.parametrize(
    ("model", "option", "layouts"),
    [
        ("sigmoid", "", ((4, "--tp 2 --ep 2 --etp 2"), (1, ""))),
        slow("softmax", "", MANY),
        slow("softmax", "--data-parallel-sharding none", MANY),
    ],
)
def test_experts_move_between_layouts(pools, one, tmp_path, model, option, layouts):
    """Any EP and ETP read each other's checkpoints, moments and biases too."""
    for number, (world, layout) in enumerate(layouts, start=2):
        argv = [*SMALL, *MODELS[model].split(), *layout.split(), *option.split(), "--train-iters", str(number)]
        pools(world).run(train, argv, str(tmp_path))
    expected = one(model, ["--train-iters", str(number)])
    assert_same_curve(metrics(tmp_path), expected)
    assert_same_balance(metrics(tmp_path), expected)


def test_steps_move_the_bias(pools, one, tmp_path):
    argv = [*SMALL, *THREE, "--no-save", *SIGMOID.split(), "--moe-router-bias-update-rate", "0"]
    pools(1).run(train, argv, str(tmp_path))
    still, moved = metrics(tmp_path), one("sigmoid")
    assert still[0]["expert_load_max"] == moved[0]["expert_load_max"]
    assert still[-1]["expert_load_max"] != moved[-1]["expert_load_max"]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, "--ep 2"),
        slow(4, "--tp 2 --ep 2 --etp 2"),
        slow(4, "--ep 4 --moe-token-dispatcher-type allgather"),
        slow(4, "--pp 2 --ep 2 --recompute-granularity full"),
    ],
)
def test_ranks_whose_experts_have_no_tokens(pools, tmp_path, world, layout):
    """All tokens take the first two experts of four: another rank has none, forward nor backward."""
    argv = [*SMALL, "--no-save", *SOFTMAX.split(), "--moe-router-force-load-balancing"]
    pools(1).run(train_first_experts, argv, str(tmp_path / "one"))
    pools(world).run(train_first_experts, [*argv, *layout.split()], str(tmp_path / "more"))
    assert set(metrics(tmp_path / "one")[0]["expert_load_max"].values()) == {2.0}
    assert_same_curve(metrics(tmp_path / "more"), metrics(tmp_path / "one"))
    assert_same_balance(metrics(tmp_path / "more"), metrics(tmp_path / "one"))


def train_first_experts(argv: Sequence[str], run_dir: str) -> None:
    """A run whose tokens take the first experts in place of all in turn."""

    def first(logits: Any, topk: int) -> Any:
        chosen = logits.new_zeros(logits.shape)
        chosen[..., :topk] = 1e3
        return chosen

    with patch.object(router, "_in_turn", first):
        train(argv, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_types_differ_by_their_rounding_alone(pools, one, tmp_path, precision):
    """From another layout, and from fp32: fp16's loss scale is that of the balance losses, too."""
    argv = [*SMALL, *THREE, "--no-save", *SOFTMAX.split(), "--precision", precision]
    pools(1).run(train, argv, str(tmp_path / "one"))
    pools(2).run(train, [*argv, "--ep", "2"], str(tmp_path / "two"))
    for other in (metrics(tmp_path / "one"), one("softmax")):
        off, where = farthest_apart(metrics(tmp_path / "two"), other)
        assert off < (2e-3 if precision == "fp16" else 1e-2), where


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--cp 2 --ep 2 --micro-batch-size 2", "--tp 2 --ep 2", "--pp 2 --ep 2"])
def test_padding_of_packed_rows_is_not_counted(pools, tmp_path, layout):
    """What readers tell the other ranks of a row is the same, and so are the balance losses."""
    data = sources_of(write_all(tmp_path / "data"))
    argv = [*SMALL, *"--images-per-sample 1 --image-sizes --seq-length 96 --packing-window 16".split(), *data]
    argv += [*SOFTMAX.split(), "--no-save"]
    pools(1).run(train, argv, str(tmp_path / "one"))
    pools(4).run(train, [*argv, *layout.split()], str(tmp_path / "four"))
    assert any(record["packing_efficiency"] < 1 for record in metrics(tmp_path / "one"))
    assert_same_curve(metrics(tmp_path / "four"), metrics(tmp_path / "one"))
    assert_same_balance(metrics(tmp_path / "four"), metrics(tmp_path / "one"))


# Each expert gets equally many tokens, so that every rank sends as many.
MIXTURE = (
    "--train-iters 1 --global-batch-size 4 --micro-batch-size 2 --seq-length 64 --no-tensorboard --no-save --set "
    "model.vision.num_layers=1 --images-per-sample 1 --set model.language.num_layers=3 model.language.hidden_size=64 "
    "model.language.ffn_hidden_size=160 model.language.num_attention_heads=4 model.language.num_query_groups=2 "
    "model.language.vocab_size=128 --num-experts 8 --set model.experts.router_topk=2 "
    "model.experts.ffn_hidden_size=96 model.experts.dense_layers=[0] model.experts.shared_ffn_hidden_size=48 "
    "model.experts.shared_gate=true --moe-router-force-load-balancing"
)
LAYERS, TOKENS, TOPK, HIDDEN = 2, 128, 2, 64  # layers with experts; tokens of a micro-batch


def test_layers_take_the_flops_that_are_counted(pools: Pools, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Attention aside, which torch's counter does not see on a CPU."""
    ((found, predicted),) = pools(1).run(forward_flops, MIXTURE.split(), str(tmp_path / "run"))
    assert found == predicted
    assert found["language.layers.0"] != found["language.layers.1"] == found["language.layers.2"]


def test_rows_travel_as_often_as_the_formula_says(pools: Pools, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """t · top-k · H · e · (EP − 1) / EP from each rank, twice in each pass of a layer and micro-batch."""
    ranks = pools(2).run(rows_sent, [*MIXTURE.split(), "--ep", "2"], str(tmp_path / "run"))
    micro_batches = 1  # of a data-parallel rank
    expected = 4 * LAYERS * micro_batches * TOKENS * TOPK * HIDDEN * 4 // 2
    assert ranks == [(expected, expected), (expected, expected)]


def forward_flops(argv: list[str], run_dir: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the FLOPs of each language layer's forward pass: counted by torch, and predicted."""

    def grouped(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(2 * a[0] * a[1] * b[-1])

    with started(argv, run_dir) as run:
        batch = run.data_loader.next_step().batches[0]
        chunk = run.engine.chunks[0].module
        view = MicroBatchContext(batch.to(run.backend.device), run.config, run.engine.groups, device=run.backend.device)
        work = scenario_of(run.config, run.plan.dims).work
        hidden, found, predicted = None, {}, {}
        for name in chunk.names:
            counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})
            with counter, torch.no_grad():
                hidden = chunk.run_layer(name, hidden, view)
            if kind_of(name) == LANGUAGE_LAYER:
                cost = layer_cost(name, run.config.model, work)
                found[name] = counter.get_total_flops()
                predicted[name] = cost.forward_flops - cost.attention_flops
    return found, predicted


def rows_sent(argv: list[str], run_dir: str) -> tuple[int, float]:
    """Return the bytes of rows that this rank sends to others in a step: counted, and predicted."""
    sent, exchange, rank = 0, dist.all_to_all_single, dist.get_rank()

    def counted(received: Any, outgoing: Any, *args: Any, input_split_sizes: Any = None, **kwargs: Any) -> Any:
        nonlocal sent
        if outgoing.dim() > 1:  # not their weights
            splits = input_split_sizes if input_split_sizes is not None else [len(outgoing) // 2] * 2
            others = sum(int(size) for index, size in enumerate(splits) if index != rank)
            sent += others * outgoing.shape[1] * outgoing.element_size()
        return exchange(received, outgoing, *args, input_split_sizes=input_split_sizes, **kwargs)

    with started(argv, run_dir) as run:
        with patch.object(dist, "all_to_all_single", counted):
            run.engine.train_step(run.data_loader.next_step().batches[:1])
        scenario = scenario_of(run.config, run.plan.dims)
    each = kind_in(scenario.model, "language.layers.1").expert_exchange(scenario)
    return sent, 2 * LAYERS * sum(exchange.size * (exchange.ranks - 1) / exchange.ranks for exchange in each)
