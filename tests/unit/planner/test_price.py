"""Machines and their prices: every line dated and sourced, sums that a hand can check, and what is refused."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.planner.devices import MACHINES, find_machine
from megavlm.planner.hardware import PROFILES, profile, profile_of_device
from megavlm.programs import plan, plan_costs

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
    return list(plan_costs.costs(given, Config(), best, A3))  # type: ignore[arg-type]


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
        plan_costs.machines_for(12, A3)


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


def test_plan_says_what_a_run_costs(tmp_path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.yaml"
    file.write_text("data: {kind: synthetic}\ntrain: {global_batch_size: 8, train_iters: 1000}\n")
    flags = "--machine p5.48xlarge --price-per-hour 36 --preemptions-per-day 2 --samples 80000 --top 1"
    assert plan.main([word.format(file=file) for word in TINY] + flags.split()) == 0
    told = capsys.readouterr().out
    assert "1 × p5.48xlarge (8 × h100 each); not today's prices, but of: on demand as given" in told
    assert "10,000 steps" in told
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
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_device_is_found_by_its_name(device: str, name: str | None):
    found = profile_of_device(device)
    assert (None if found is None else found.name) == name
