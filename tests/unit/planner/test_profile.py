"""A hardware profile is read back as it was written, and what is none is one line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megavlm.errors import UserError
from megavlm.planner.devices import MACHINES
from megavlm.planner.hardware import PROFILES, profile, profile_of_device


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
