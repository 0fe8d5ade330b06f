"""What a plan costs: the time line of its pipeline, its price, and what to do where memory is short."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.arch.dims import Dims
from megavlm.arch.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    PipelineShape,
    ScheduleName,
    peak_in_flight,
    rank_schedules,
    simulate,
    uniform,
)
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner import auto
from megavlm.planner.hardware import MACHINES, PEAKS, PROFILES, find_machine, peak_tflops, profile, profile_of_device
from megavlm.planner.memory import Memory
from megavlm.programs import plan
from megavlm.rules.defaults import resolve
from tests.support.pipelines import SHAPES

SIZES = [(p, m) for p in (1, 2, 4) for m in (1, 3, 4, 13) if m >= p]


@pytest.mark.parametrize(("pp", "micro"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_leave_the_bubble_of_the_closed_form(schedule: ScheduleName, pp: int, micro: int) -> None:
    timeline = simulate(PipelineShape(schedule, pp, 1, micro), uniform([1.0] * pp, [2.0] * pp, micro_batches=micro))
    assert timeline.seconds == pytest.approx((micro + pp - 1) * 3.0)
    assert timeline.bubble == pytest.approx((pp - 1) / (micro + pp - 1))


@pytest.mark.parametrize(("pp", "vpp", "rounds"), [(2, 2, 1), (2, 2, 4), (4, 2, 2), (4, 4, 3), (8, 3, 2)])
def test_interleaving_divides_the_bubble(pp: int, vpp: int, rounds: int) -> None:
    """(p − 1)/v idle chunk-passes of each kind: Narayanan et al. 2021, section 2.2."""
    micro, chunks = pp * rounds, pp * vpp
    timeline = simulate(
        PipelineShape("interleaved", pp, vpp, micro), uniform([1.0] * chunks, [2.0] * chunks, micro_batches=micro)
    )
    assert timeline.seconds == pytest.approx((micro * vpp + pp - 1) * 3.0)


@pytest.mark.parametrize(("pp", "micro"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zero_bubble_idles_for_f_plus_b_less_w(pp: int, micro: int) -> None:
    """(p − 1)(F + B − W): Qi et al. 2023, table 1, for F = B = W; at 1F1B's peak memory."""
    shape = PipelineShape("zb-h1", pp, 1, micro)
    ones = [1.0] * pp
    timeline = simulate(shape, uniform(ones, ones, weight=ones, micro_batches=micro))
    assert timeline.seconds == pytest.approx(micro * 3.0 + (pp - 1) * 1.0)
    assert max(count for rank in peak_in_flight(shape) for count in rank) <= min(pp, micro)


@pytest.mark.parametrize(("pp", "micro"), SIZES)
def test_activations_in_flight(pp: int, micro: int) -> None:
    assert peak_in_flight(PipelineShape("1f1b", pp, 1, micro)) == tuple((min(micro, pp - rank),) for rank in range(pp))
    assert peak_in_flight(PipelineShape("gpipe", pp, 1, micro)) == ((micro,),) * pp


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, data=st.data())
def test_what_every_schedule_keeps(shape: PipelineShape, data: st.DataObject) -> None:
    times = st.lists(st.floats(0.1, 3.0), min_size=shape.chunks, max_size=shape.chunks)
    forward, backward, weight = (data.draw(times) for _ in range(3))
    transfer = data.draw(st.floats(0, 1))
    durations = uniform(
        forward, backward, weight=weight, transfer=[transfer] * (shape.chunks - 1), micro_batches=shape.micro_batches
    )
    timeline = simulate(shape, durations, keep_events=True)
    apart = shape.schedule == "zb-h1"
    kinds = (FORWARD, BACKWARD, WEIGHT) if apart else (FORWARD, BACKWARD)
    ends = {(e.step.kind, e.step.chunk, e.step.micro): e.end for e in timeline.events}
    starts = {(e.step.kind, e.step.chunk, e.step.micro): e.start for e in timeline.events}
    assert len(ends) == len(timeline.events) == len(kinds) * shape.chunks * shape.micro_batches
    slack = 1e-9
    for rank in range(shape.pp):
        free = 0.0
        for step in (event.step for event in timeline.events if event.rank == rank):
            kind, chunk, micro = step.kind, step.chunk, step.micro
            inputs = [free]
            if kind == FORWARD and chunk:
                inputs.append(ends[FORWARD, chunk - 1, micro] + transfer)
            if kind == BACKWARD:
                inputs.append(ends[FORWARD, chunk, micro])
            if kind == BACKWARD and chunk < shape.chunks - 1:
                inputs.append(ends[BACKWARD, chunk + 1, micro] + transfer)
            if kind == WEIGHT:
                inputs.append(ends[BACKWARD, chunk, micro])
            # Neither before its inputs are there nor a moment after.
            assert starts[kind, chunk, micro] == pytest.approx(max(inputs), abs=slack)
            free = ends[kind, chunk, micro]
    # Fill, own work, drain; weight gradients at a step's end drain nowhere.
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    for rank in range(shape.pp):
        mine = [e for e in timeline.events if e.rank == rank]
        assert all(a.end <= b.start + slack for a, b in pairwise(mine))
        before = sum(forward[:rank]) + sum(backward[:rank])
        own = shape.micro_batches * sum(work[rank :: shape.pp])
        assert timeline.seconds + slack >= before + own
    assert 0 <= timeline.bubble < 1


def test_orders_are_megatron_cores() -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    pp, vpp, micro = 4, 3, 12
    table = schedules.get_schedule_table(micro, vpp, pp)
    for rank, order in enumerate(rank_schedules(PipelineShape("interleaved", pp, vpp, micro))):
        assert [(s.micro, s.chunk // pp) for s in order if s.kind == FORWARD] == table
        assert [(s.micro, vpp - 1 - s.chunk // pp) for s in order if s.kind == BACKWARD] == table
        warmup = next(i for i, s in enumerate(order) if s.kind == BACKWARD) - 1
        assert warmup == (pp - rank - 1) * 2 + (vpp - 1) * pp


DIMS = Dims(tp=1, pp=1, vpp=1, dp=2)
GIB = float(2**30)


def with_batch(size: int) -> Config:
    config = Config()
    return replace(config, train=replace(config.train, micro_batch_size=size))


def said(config: Config, estimate: Callable[[Config], Memory], *, capacity: float | None) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "memory_of", lambda config, dims, on_gpu: (estimate(config),))
        return auto.explain(config, DIMS, rank=3, on_gpu=True, capacity=capacity)


def by_batch(config: Config) -> Memory:
    return Memory(weights=10 * GIB, activations=config.train.micro_batch_size * 20 * GIB)


def test_the_line_names_components_and_the_first_setting_that_fits() -> None:
    assert said(with_batch(4), by_batch, capacity=55 * GIB) == (
        "out of memory on rank 3: the planner estimates a peak of 90.00 GiB of 55.00 GiB (activations 80.00 GiB, "
        "weights 10.00 GiB): use --micro-batch-size 2, with which it estimates 50.00 GiB"
    )
    for size, capacity in (4, 31 * GIB), (2, None), (2, 80 * GIB):  # the latter: an estimate that was too low
        assert "use --micro-batch-size 1, with which it estimates 30.00" in said(
            with_batch(size), by_batch, capacity=capacity
        )
    whatever = said(with_batch(1), lambda _: Memory(weights=90 * GIB), capacity=80 * GIB)
    assert whatever.endswith("no single setting fits, so use more devices, and let --plan auto choose the layout")


def test_the_numbers_are_the_planner_s() -> None:
    config = resolve(with_batch(4), vocab_size=97)
    line = auto.explain(config, DIMS, rank=0, on_gpu=False, capacity=None)
    assert f"{auto.memory_of(config, DIMS, on_gpu=False)[0].total / GIB:.2f} GiB" in line
    assert "use --" in line


@pytest.mark.parametrize(
    ("name", "half", "fp8"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, None),
        ("NVIDIA H100 80GB HBM3", 989, 1979),
        ("NVIDIA H100 PCIe", 756, 1513),
        ("NVIDIA H200", 989, 1979),
        ("NVIDIA B200", 2250, 4500),
    ],
)
def test_known_gpus_have_their_dense_peaks(name: str, half: float, fp8: float | None) -> None:
    assert peak_tflops(name, "bf16") == peak_tflops(name, "fp16") == half
    assert peak_tflops(name, "fp8") == fp8
    assert peak_tflops(name, "fp32") is None


@pytest.mark.parametrize("name", ["CPU", "", "NVIDIA GB200", "NVIDIA A10", "NVIDIA H200 MIG 1g.18gb"])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp8"])
def test_other_devices_have_no_known_peak(name: str, precision: str) -> None:
    assert peak_tflops(name, precision) is None


def test_each_precision_of_half_the_bits_is_twice_as_fast() -> None:
    """What the data sheets say of every device here, but for cutting digits: B200's TF32 is printed as 2.2 PFLOP/s."""
    for row in PEAKS:
        assert row.half == pytest.approx(2 * row.tf32, rel=0.025), row.source
        if row.fp8 is not None:
            assert row.fp8 == pytest.approx(2 * row.half, rel=0.01), row.source


def test_profiles_of_gpus_reach_less_than_their_peaks() -> None:
    for hardware in PROFILES.values():
        if hardware.on_gpu:
            assert max(hardware.forward.matmul, hardware.forward.attention) < hardware.peak
        else:
            assert hardware.peak is None


A3 = replace(MACHINES["a3-megagpu-8g"], on_demand=100.0, spot=40.0)


def test_each_price_has_a_date_and_a_source():
    for machine in MACHINES.values():
        amounts = [amount for amount in (machine.on_demand, machine.spot) if amount is not None]
        assert all(1 < amount < 200 for amount in amounts), machine
        assert amounts == sorted(amounts, reverse=True), machine  # spot is cheaper
        if amounts:
            _, date, source = machine.priced.split(", ", 2)
            assert re.match(r"20\d\d(-\d\d){0,2}( or later)?$", date), machine
            assert len(source) > 10, machine


def cost_lines(steps: int | None, step_seconds: float, tokens_per_second: float, **options: object) -> list[str]:
    """The lines on four machines for a layout of such a speed."""
    prices = {"price_per_hour": None, "spot_price_per_hour": None, "preemptions_per_day": None}
    saves = {"stall_seconds": 2.0, "restart_seconds": 300.0}
    given = Namespace(train_iters=steps, samples=None, config=None, gpus=32, **{**prices, **saves, **options})
    best = Namespace(tokens_per_second=tokens_per_second, step=Namespace(seconds=step_seconds))
    return list(plan.costs(given, Config(), best, A3))  # type: ignore[arg-type]


def test_a_bill_is_hours_times_dollars_and_grows_with_preemptions():
    """Ten hours, 10 billion tokens. Llama 3's failures remain, which cost some seconds."""
    never = {"stall_seconds": 0.0, "restart_seconds": 0.0, "preemptions_per_day": 0.0}
    _, work, demand, spot = cost_lines(10_000, 3.6, 1e6 / 3.6, **never)
    assert work == "  10,000 steps, 10 billion tokens"
    assert demand.startswith("  on demand: 10.0 h, $4,000, $400 per billion tokens at $400.00 an hour; goodput 100.0%")
    assert spot.startswith("  spot: 10.0 h, $1,600, $160 per billion tokens at $160.00 an hour")
    hours = []
    for rate in (0.0, 1.0, 10.0):
        spot = cost_lines(10_000, 3.6, 1e6 / 3.6, preemptions_per_day=rate)[-1]
        hours.append(float(spot.split()[1]))
    assert hours == sorted(hours)
    # 40 preemptions a day are one in 36 minutes: 6.5 minutes of restart, and half of √(2 · 2 s · 36 min) twice.
    assert hours[2] == pytest.approx(10 / (1 - (390 + 93) / 2160), rel=0.03)


def test_without_a_rate_of_preemptions_spot_machines_have_no_price():
    lines = cost_lines(None, 1.0, 1e6)
    assert "not today's prices" in lines[0]
    assert "2026-09" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["on demand", "spot"]
    assert "--preemptions-per-day" in lines[2]
    assert find_machine("a3-megagpu-7g") is None
    with pytest.raises(UserError, match="--gpus 12 is no multiple of the 8 GPUs"):
        plan.machines_for(12, A3)


TINY = "--config {file} --gpus 8 --precision fp32".split()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--price-per-hour 3", "--price-per-hour needs --machine"),
        ("--machine a3-mega", "--machine a3-mega is not known: did you mean a3-megagpu-8g"),
        ("--machine a2-megagpu-16g", "--gpus 8 is no multiple of the 16 GPUs"),
        ("--machine p5.48xlarge --samples 3 --train-iters 2", "--train-iters: not allowed with argument --samples"),
        ("--machine p5.48xlarge --preemptions-per-day -1", "--preemptions-per-day -1.0 must be a number from 0"),
    ],
)
def test_a_mistake_is_one_line(flags: str, line: str, tmp_path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.yaml"
    file.write_text("data: {kind: synthetic}\n")
    assert plan.main([word.format(file=file) for word in TINY] + flags.split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert line in told


@pytest.mark.parametrize(("data", "assumed"), [("kind: digits", False), ("kind: files, tokenizer: /nowhere", True)])
def test_plan_says_what_a_run_costs(data: str, assumed: bool, tmp_path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {{{data}}}\ntrain: {{global_batch_size: 8, train_iters: 1000}}\n")
    flags = "--machine p5.48xlarge --price-per-hour 36 --preemptions-per-day 2 --samples 80000 --top 1"
    assert plan.main([word.format(file=file) for word in TINY] + flags.split()) == 0
    told = capsys.readouterr().out
    assert "1 × p5.48xlarge (8 × h100 each); not today's prices, but of: on demand as given" in told
    assert "10,000 steps" in told
    assert ("a vocabulary of 256 tokens is assumed: model.language.vocab_size is not set, and" in told) == assumed
    assert re.search(r"  on demand: [\d.,]+ h, \$[\d,]+, \$[\d,]+ per billion tokens at \$36.00 an hour", told), told
    assert "  spot: " in told


@pytest.mark.parametrize("name", PROFILES)
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(asdict(PROFILES[name])))
    assert profile(str(tmp_path / "a.json")) == PROFILES[name]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("memory",), "eight"),
        (("memory",), float("nan")),
        (("memory",), 0),
        (("near", "bandwidth"), 0),
        (("devices_per_node",), 0),
        (("devices_per_node",), 2.5),
        (("near",), None),
        (("host", "link", "bandwidth"), "x"),
        (("host",), 7),
        (("other",), 1),
    ],
)
def test_a_value_of_another_kind_is_one_line(tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    written = json.loads(json.dumps(asdict(PROFILES["h100"])))
    inner = written
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (tmp_path / "a.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="is no hardware profile") as caught:
        profile(str(tmp_path / "a.json"))
    assert len(str(caught.value).splitlines()) == 1


def test_a_machine_has_the_profile_of_its_gpu_and_a_network_of_its_own():
    for machine in MACHINES.values():
        hardware = profile(machine.name)
        assert hardware.devices_per_node == machine.gpus
        assert hardware.memory == PROFILES[machine.gpu].memory
        assert hardware.far.bandwidth <= PROFILES[machine.gpu].far.bandwidth * 1.001
    assert profile("P5.48xlarge").far.bandwidth == PROFILES["h100"].far.bandwidth  # 3,200 Gbit/s are 8 × 50 GB/s
    assert profile("standard_nd96isr_h100_V5").devices_per_node == 8
    assert profile("a3-highgpu-8g").far.bandwidth == pytest.approx(0.8 * 800e9 / 8 / 8)
    with pytest.raises(UserError, match="a3-megagpu-8g"):
        profile("a3-megagpu-8")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_device_is_found_by_its_name(device: str, name: str | None):
    found = profile_of_device(device)
    assert (None if found is None else found.name) == name
