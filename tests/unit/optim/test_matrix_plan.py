"""Parts of optimizers: matrices on their ranks, factors of QK-Clip, rates of iterations, codes of what is sent."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megavlm.arch.kind import HiddenWeight, hidden_weight
from megavlm.arch.tensor_split import LatentHead, Part, head_split, share_of, share_runs
from megavlm.checkpoint.state import load_loss_scale
from megavlm.command_line.parsing import parse
from megavlm.config.schema import OptimizerConfig
from megavlm.errors import UserError
from megavlm.model.rank_parts import laid_out
from megavlm.optim.chained import LearningRate, MeanGradientOptimizer, divisor_of, learning_rate
from megavlm.optim.codes import BLOCK, Code, Coded
from megavlm.optim.elementwise import ElementwiseOptimizer
from megavlm.optim.matrix_plan import HeldBox, Matrix, MatrixPiece, matrices_of, owners_of, plan_rounds
from megavlm.optim.qk_clip import clipped_layers, projection_factors, row_factors
from megavlm.optim.rules import ELEMENTWISE
from megavlm.optim.slow_links import (
    CodedReduction,
    CodedUnitReduction,
    coded_reductions,
    forget_errors,
    refuse_torch_without_hooks,
)
from megavlm.optim.stores import HostStore, StateStore
from megavlm.parallel.shards import Box, boxes, shard_layout
from megavlm.rules.defaults import resolve
from megavlm.train.outputs import hints
from tests.support.flags import resolved


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_matrices_are_spread_evenly(costs: list[int], ranks: int) -> None:
    """No rank has more than the mean, by more than the one matrix that it took last (Graham 1969)."""
    owners = owners_of(costs, ranks)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert all(0 <= owner < ranks for owner in owners)
    for rank, load in enumerate(loads):
        own = [cost for cost, owner in zip(costs, owners, strict=True) if owner == rank]
        assert load - min(own, default=0) <= min(loads)


WEIGHTS = st.builds(
    hidden_weight,
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    periods=st.integers(1, 3),
    experts=st.sampled_from((0, 0, 2, 3)),
)


def shape_of(weight: HiddenWeight, padding: int) -> tuple[int, ...]:
    return (*((weight.experts,) if weight.experts else ()), weight.rows + padding, weight.columns + padding)


def grid(data: st.DataObject, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return boxes that together cover a tensor, which is cut anywhere along each axis."""
    axes = []
    for size in shape:
        cuts = sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else []
        axes.append([(start, end - start) for start, end in pairwise([0, *cuts, size])])
    return [tuple(zip(*box, strict=True)) for box in product(*axes)]  # type: ignore[misc]


def values_of(matrix: Matrix, tensor: Tensor) -> Tensor:
    """The matrix, row by row."""
    whole = tensor if matrix.expert is None else tensor[matrix.expert]
    first, end = matrix.band.first, matrix.band.first + matrix.band.count
    rows = [row for row in range(matrix.weight.rows) if first <= row % matrix.band.period < end]
    return whole[rows, : matrix.columns]


def view_of(piece: MatrixPiece, box: Box, matrix: Matrix, tensor: Tensor) -> Tensor:
    held = tensor[tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))]
    held = held if piece.expert is None else held[piece.expert]
    rows = [piece.row + matrix.band.period * k + i for k in range(piece.periods) for i in range(piece.count)]
    return held[rows, : piece.width]


@settings(max_examples=60)
@given(st.data())
def test_every_matrix_arrives_whole_and_every_holder_gets_its_part_back(data: st.DataObject) -> None:
    """Weights of any shape, padded, cut into any boxes, each box on one rank or on several."""
    ranks = data.draw(st.integers(1, 4))
    weights = {f"w{i}": data.draw(WEIGHTS) for i in range(data.draw(st.integers(1, 3)))}
    padding = data.draw(st.integers(0, 2))
    tensors = {
        key: torch.arange(prod(shape_of(weight, padding)), dtype=torch.float64).view(shape_of(weight, padding)) + 1
        for key, weight in weights.items()
    }
    held: list[list[HeldBox]] = [[] for _ in range(ranks)]
    for key, tensor in tensors.items():
        for offset, size in grid(data, tuple(tensor.shape)):
            for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append((key, Box(offset, size)))
    matrices = matrices_of(weights)
    most = data.draw(st.integers(1, 60))
    plans = [plan_rounds(held, matrices, rank=rank, most=most) for rank in range(ranks)]
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(index for plan in plans for each in plan for index in each.own) == list(range(len(matrices)))
    for rank, plan in enumerate(plans):
        for number, each in enumerate(plan):
            assert len(each.own) <= 1 or sum(matrices[index].size for index in each.own) <= most
            whole = {index: torch.full((matrices[index].rows, matrices[index].columns), -1.0) for index in each.own}
            for other in range(ranks):
                theirs = plans[other][number]
                assert theirs.gathers_to[rank] == each.gathers_from[other]
                assert theirs.results_from[rank] == each.results_to[other]
                for piece in each.gathers_from[other]:
                    matrix = matrices[piece.matrix]
                    target = whole[piece.matrix][piece.top : piece.top + piece.rows, piece.left :]
                    assert (target[:, : piece.width] == -1).all()  # nothing is sent twice
                    target[:, : piece.width] = view_of(piece, held[other][piece.box][1], matrix, tensors[matrix.key])
            for index, values in whole.items():
                assert torch.equal(values.double(), values_of(matrices[index], tensors[matrices[index].key]))
    # What a rank gets back is each element of its boxes once, and no padding.
    for rank, plan in enumerate(plans):
        got = sum(piece.size for each in plan for pieces in each.results_from for piece in pieces)
        own = sum(
            prod(
                min(start + size, real) - min(start, real)
                for start, size, real in zip(box.offset, box.size, shape_of(weights[key], 0), strict=True)
            )
            for key, box in held[rank]
        )
        assert got == own


SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_are_the_numbers_of_a_run_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(start, prod(shape)))
    numbers = torch.arange(prod(shape)).view(shape)
    found = list(boxes(shape, start, end))
    parts = [
        numbers[tuple(slice(first, first + count) for first, count in zip(box.offset, box.size, strict=True))]
        for box in found
    ]
    assert [tuple(part.shape) for part in parts] == [box.size for box in found]
    assert [int(number) for part in parts for number in part.flatten()] == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_whole_rows_are_one_box() -> None:
    (box,) = boxes((7, 3, 2), 2 * 6, 5 * 6)
    assert (box.offset, box.size) == ((2, 0, 0), (3, 3, 2))


@given(st.integers(0, 1), st.integers(1, 4), st.integers(1, 5), st.data())
def test_parts_of_all_ranks_are_the_rows_of_the_model(axis: int, tp: int, size: int, data: st.DataObject) -> None:
    """Gate over up, or columns of the layer after them, padded for TP; data-parallel ranks hold runs of elements."""
    blocks, own = 2 - axis, share_of(size, tp)
    whole = torch.full((blocks * size, 3) if axis == 0 else (3, size), -1)
    local_shape = (blocks * own, 3) if axis == 0 else (3, own)
    cuts = sorted(data.draw(st.lists(st.integers(0, prod(local_shape)), max_size=3)))
    for rank in range(tp):
        numbers = 1000 * (rank + 1) + torch.arange(prod(local_shape)).view(local_shape)
        entry = ShardedTensor.from_rank_offsets("weight", numbers, (axis, rank, tp), replica_id=(0, 0, 0))
        part = Part(axis, whole.shape[axis], share_runs(size, tp, rank, blocks=blocks))
        for piece in laid_out(entry, part).build():
            assert (whole[piece.global_slice()] == -1).all()
            whole[piece.global_slice()] = piece.data
        again = torch.full_like(whole, -1)
        for start, end in pairwise([0, *cuts, prod(local_shape)]):
            layout = shard_layout(laid_out(entry, part), start, end, replica=0)
            for piece in layout.parts(numbers.flatten()[start:end].clone()):
                assert (again[piece.global_slice()] == -1).all()
                again[piece.global_slice()] = piece.data
        held = (whole >= 1000 * (rank + 1)) & (whole < 1000 * (rank + 2))
        assert torch.equal(again[held], whole[held])
        assert (again[~held] == -1).all()
    assert (whole >= 1000).all()


WIDTH = 3


def factors(largest: list[float], groups: int) -> tuple[torch.Tensor, ...]:
    """The factors of queries [groups, heads of each], keys [groups] and values [groups] at a threshold of 10."""
    split = head_split(len(largest), groups, WIDTH, 1)
    rows = row_factors(torch.tensor(largest, dtype=torch.float64), split, OptimizerConfig(qk_clip_threshold=10.0))
    rows = rows.view(groups, -1, WIDTH)
    assert torch.equal(rows, rows[:, :, :1].expand_as(rows)), "one factor for all channels of a head"
    return rows[:, :-2, 0], rows[:, -2, 0], rows[:, -1, 0]


@pytest.mark.parametrize("groups", [6, 3, 2, 1])
def test_each_logit_ends_at_the_threshold(groups: int):
    largest = [40.0, 12.0, 10.0, 9.0, 90.0, 30.0]
    query, key, value = factors(largest, groups)
    after = torch.tensor(largest).view(groups, -1) * query * key[:, None]
    assert after.flatten().tolist() == pytest.approx([min(each, 10.0) for each in largest])
    assert value.tolist() == [1.0] * groups
    assert float(query.max()) <= 1
    assert float(key.max()) <= 1


def test_a_head_with_its_own_key_shares_the_factor_evenly():
    query, key, _ = factors([40.0, 5.0], 2)
    assert query.flatten().tolist() == [0.5, 1.0]
    assert key.tolist() == [0.5, 1.0]


def test_a_shared_key_stays_while_one_of_its_heads_needs_it():
    query, key, _ = factors([40.0, 5.0, 40.0, 90.0], 2)
    assert key.tolist() == [1.0, 0.5]
    assert query[0].tolist() == [0.25, 1.0]


def test_no_logit_and_one_that_is_no_number_change_nothing():
    query, key, _ = factors([0.0, float("nan")], 2)
    assert query.flatten().tolist() == [1.0, 1.0]
    assert key.tolist() == [1.0, 1.0]


def test_what_gates_the_output_stays_as_it_is() -> None:
    split = replace(head_split(4, 2, WIDTH, 1), gated=True)
    options = OptimizerConfig(qk_clip_threshold=10.0)
    largest = torch.tensor([40.0, 10.0, 5.0, 20.0], dtype=torch.float64)
    rows = row_factors(largest, split, options).view(2, 6, WIDTH)[:, :, 0]  # query, gate, query, gate, key, value
    plain = row_factors(largest, replace(split, gated=False), options).view(2, 4, WIDTH)[:, :, 0]
    assert torch.equal(rows[:, [0, 2, 4, 5]], plain)
    assert torch.equal(rows[:, [1, 3]], torch.ones(2, 2, dtype=torch.float64))


def test_a_part_of_the_key_that_all_heads_share_leaves_its_factor_to_the_queries() -> None:
    split = replace(head_split(2, 2, 5, 1), latent=LatentHead(still=3, turning=2, value=4))
    largest = torch.tensor([40.0, 5.0], dtype=torch.float64)
    found = projection_factors(largest, split, OptimizerConfig(qk_clip_threshold=10.0))
    assert found["linear_q_up_proj"].tolist() == [0.5] * 3 + [0.25] * 2 + [1.0] * 5
    assert found["linear_kv_up_proj"].tolist() == [0.5] * 3 + [1.0] * 11


def test_layers_of_linear_attention_are_left_out() -> None:
    config = resolved(["--qk-clip", "--set", "model.language.linear_attention_layers=[0,2]"])
    assert [name for name in clipped_layers(config) if name.startswith("language")] == [
        "language.layers.1",
        "language.layers.3",
    ]


PEAK, STEPS = 0.3, 20


def options(style: str, *, steps: int, warmup: int, floor: float = 0.0, wsd: int | None = None) -> OptimizerConfig:
    argv = f"--train-iters {steps} --lr {PEAK} --lr-decay-style {style} --lr-warmup-iters {warmup} --min-lr {floor}"
    more = f" --lr-wsd-decay-iters {wsd}" if wsd else ""
    return resolve(parse((argv + more).split())).optimizer


def of_transformers(style: str, *, warmup: int, floor: float, wsd: int) -> list[float]:
    """The rate with which each step of a run with Transformers' schedule trains."""
    common: dict[str, Any] = {"num_warmup_steps": warmup, "num_training_steps": STEPS}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    if style == "WSD":
        schedule = transformers.get_wsd_schedule(
            optimizer, num_decay_steps=wsd, decay_type="linear", min_lr_ratio=floor / PEAK, **common
        )
    elif style == "cosine":
        schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, min_lr=floor, **common)
    elif style == "linear":
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, **common)
    else:
        schedule = transformers.get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warmup)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 6])
@pytest.mark.parametrize(
    ("style", "floor"),
    [("constant", 0.0), ("linear", 0.0), ("cosine", 0.0), ("cosine", 0.03), ("WSD", 0.0), ("WSD", 0.03)],
)
def test_iterations_train_with_the_rates_of_transformers(style: str, floor: float, warmup: int) -> None:
    """Our warm-up is one step ahead, because the first step of Transformers has the rate 0."""
    ours = options(style, steps=STEPS, warmup=warmup, floor=floor, wsd=5 if style == "WSD" else None)
    found = [learning_rate(ours, at, peak=PEAK, floor=floor) for at in range(1, STEPS + 1)]
    theirs = of_transformers(style, warmup=warmup, floor=floor, wsd=5)
    assert found[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12)
    # With --min-lr, WSD of Transformers warms up from it.
    assert found[:warmup] == pytest.approx([PEAK * (at + 1) / warmup for at in range(warmup)])
    if not (style == "WSD" and floor):
        assert found[:warmup] == pytest.approx(theirs[1 : warmup + 1])


def test_groups_have_rates_of_their_own() -> None:
    groups: list[dict[str, float]] = [{}, {"max_lr": 0.6, "min_lr": 0.06, "wd_mult": 0.0}]
    schedule = LearningRate(options("linear", steps=4, warmup=0, floor=0.03), SimpleNamespace(param_groups=groups))
    schedule.step(3)
    assert [group["lr"] for group in groups] == pytest.approx([0.03 + 0.5 * 0.27, 0.06 + 0.5 * 0.54])
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    assert schedule.current() == groups[0]["lr"]


def params(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((37, 5), (64,), (3, 3, 3))]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize(
    ("store", "clip", "tokens"),
    [(StateStore, 0.0, 0), (HostStore, 0.3, 12345), (StateStore, 0.3, 2**25 + 1), (HostStore, 1e6, 1)],
)
def test_one_division_is_two_passes(name: str, store: type[StateStore], clip: float, tokens: int) -> None:
    ours, theirs = params(1), params(1)
    inner = ElementwiseOptimizer(ours, ELEMENTWISE[name], store(), lr=1e-2)
    plain = ElementwiseOptimizer(theirs, ELEMENTWISE[name], lr=1e-2)
    for step in range(3):
        sums = [each * max(tokens, 1) for each in params(2 + step)]
        for p, g in zip(ours, sums, strict=True):
            p.grad = g.clone()
        means = [g / max(tokens, 1) for g in sums]
        norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in means])))
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        assert clip != 0.3 or scale < 1, "this one clips"
        for p, g in zip(theirs, means, strict=True):
            p.grad = g * scale
        whole = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in sums])))
        inner.divisor = divisor_of(whole, tokens, clip=clip or float("inf"))
        inner.step()
        plain.step()
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_an_overflow_of_any_part_lowers_the_loss_scale_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are a part of their own, and may overflow alone; the loss has the scale of the first part."""

    def part(*overflows: bool) -> Any:
        scaler, found = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, growth_interval=2, hysteresis=1), iter(overflows)

        def prepare_grads() -> bool:
            scaler.update(overflowed := next(found))
            return overflowed

        return SimpleNamespace(grad_scaler=scaler, prepare_grads=prepare_grads, get_loss_scale=lambda: torch.ones(1))

    elsewhere = iter((0.0, 0.0, 1.0, 0.0, 0.0))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda found, op: found.clamp_(min=next(elsewhere)))
    parts = [part(False, True, False, False, False), part(True, True, False, False, False)]
    optimizer = MeanGradientOptimizer(parts, clip=0.0)
    for overflowed, scale in ((True, 4.0), (True, 2.0), (True, 1.0), (False, 1.0), (False, 2.0)):
        assert optimizer.prepare_grads() is overflowed
        assert [float(each.grad_scaler.scale) for each in optimizer.chained_optimizers] == [scale, scale]


def test_a_shorter_window_lets_the_loss_scale_of_a_resumed_run_grow() -> None:
    scaler = DynamicGradScaler(8.0, 1.0, 2.0, 0.5, growth_interval=2, hysteresis=1)
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(grad_scaler=scaler)])
    load_loss_scale(optimizer, {"scale": 4.0, "growth_tracker": 500, "hysteresis_tracker": 1})
    scaler.update(found_inf=False)
    assert float(scaler.scale) == 8.0


@pytest.mark.parametrize(("rows", "squared"), [((3, 0, 2, 0), 20.0), ((0,), 0.0)])
def test_no_empty_gradient_reaches_the_kernel_of_the_norm(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], squared: float
) -> None:
    """Transformer Engine's loses what precedes an empty tensor, or writes beyond its table (its issue 3202)."""

    def applied(kernel: Any, flag: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
        assert all(each.numel() for each in lists[0])
        return torch.cat(lists[0]).norm().view(1), None

    monkeypatch.setattr("megavlm.optim.chained.clip_grads.multi_tensor_applier", applied)
    optimizer: Any = MeanGradientOptimizer([SimpleNamespace(get_loss_scale=lambda: torch.ones(1))], clip=0.0)
    found = optimizer._sum_of_squares([torch.full((count,), 2.0) for count in rows])
    assert float(found) == pytest.approx(squared)


BLOCKED: tuple[Code, ...] = ("int8", "fp8")
CODES: tuple[Code, ...] = ("bf16", *BLOCKED)


def numbers(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(-20, 20, (rows, columns), generator=generator)
    return torch.ldexp(torch.randn(rows, columns, generator=generator), magnitudes)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("columns", [1, 127, 128, 300])
def test_bytes_are_those_that_are_sent(code: Code, columns: int) -> None:
    coded = Coded(code)
    sent = coded.encode(numbers(3, columns))
    assert sent.shape == (3, 2 * columns if code == "bf16" else math.ceil(columns / BLOCK) * (BLOCK + 1))
    assert sent.dtype is torch.uint8
    assert coded.decode(sent, columns).shape == (3, columns)


@pytest.mark.parametrize("code", BLOCKED)
def test_the_error_is_within_the_codes_step(code: Code) -> None:
    """Half a step of 2ᵏ, which is at most a / 63.5 (int8); with three bits of mantissa a 16th of each number (fp8)."""
    exact, coded = numbers(4, 4 * BLOCK), Coded(code)
    found = coded.decode(coded.encode(exact), exact.shape[1])
    largest = exact.abs().unflatten(1, (-1, BLOCK)).amax(-1, keepdim=True).expand(4, 4, BLOCK).flatten(1)
    bound = largest / 63.5 / 2 if code == "int8" else torch.maximum(exact.abs() / 16, largest / 224 * 2**-10)
    assert ((found - exact).abs() <= bound).all()
    assert not torch.equal(found, exact)


@pytest.mark.parametrize("code", CODES)
@given(seed=st.integers(0, 2**31), columns=st.integers(1, 300))
def test_decoded_numbers_are_coded_as_themselves_and_exact_in_bf16(code: Code, seed: int, columns: int) -> None:
    coded = Coded(code)
    once = coded.decode(coded.encode(numbers(2, columns, seed)), columns)
    assert torch.equal(coded.decode(coded.encode(once), columns), once)
    assert torch.equal(once.bfloat16().float(), once)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen(code: Code, bad: float) -> None:
    exact = numbers(1, 3 * BLOCK)
    exact[0, 200] = bad
    found = Coded(code).decode(Coded(code).encode(exact), exact.shape[1])
    assert not found[0, 200].isfinite()
    assert found[0, :BLOCK].isfinite().all(), "other blocks are as they were"
    assert found[0, 2 * BLOCK :].isfinite().all()


def test_residuals_of_all_buckets_are_dropped() -> None:
    groups = [SimpleNamespace(start_grad_sync=None) for _ in range(3)]
    for group in groups[:2]:
        group.start_grad_sync = CodedReduction(group, Coded("int8"), None)
        group.start_grad_sync.errors[0] = torch.ones(3)
    unit = CodedUnitReduction(Coded("int8"), None)  # of ZeRO-2 and 3
    unit.errors[0] = torch.ones(3)
    chunks = [
        SimpleNamespace(bucket_groups=groups[:1], expert_parallel_bucket_groups=groups[1:]),
        SimpleNamespace(coded_reductions=[unit]),
        SimpleNamespace(),
    ]
    assert len(list(coded_reductions(chunks))) == 3
    forget_errors(chunks)
    assert not any(each.errors for each in coded_reductions(chunks))


@pytest.mark.parametrize("option", ["--compress-gradients int8", "--compress-weights fp8"])
def test_a_torch_without_hooks_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    config = resolved(f"--data-parallel-sharding full --precision bf16 {option}".split())
    refuse_torch_without_hooks(config)
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(UserError, match=rf"^{option} with .* full needs a newer torch than .*sharding optimizer$"):
        refuse_torch_without_hooks(config)


@pytest.mark.parametrize(
    ("words", "other", "said"),
    [
        ("--compress-gradients int8", "--compress-gradients none", "no checkpoint has the residual"),
        ("--world-size 2", "--world-size 1", "torchrun --nproc-per-node starts processes"),
    ],
)
def test_a_start_says_what_else_would_surprise(words: str, other: str, said: str) -> None:
    alone: Any = SimpleNamespace(dims=SimpleNamespace(world=1))
    for flags in (words, other):
        config = resolved(f"{flags} --transformer-impl torch".split())
        assert (said in "".join(hints(config, alone, None))) == (flags == words)
