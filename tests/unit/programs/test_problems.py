"""Machines that are not at hand, as facts; what the doctor says of each, and how it is mended."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from megavlm.programs.doctor.doctor import as_text, rows_of
from megavlm.programs.doctor.machine import GPU, Facts, Package, Rate
from megavlm.programs.doctor.problems import needs, problems

ROOT = Path(__file__).parents[3]
NEEDS = needs(ROOT / "pyproject.toml")
GIB = 2**30
H200 = GPU("NVIDIA H200", 140 * GIB, 0, (9, 0))
A100 = GPU("NVIDIA A100-SXM4-80GB", 80 * GIB, 0, (8, 0))
VERSIONS = {"torch": "2.11.0+cu130", "megatron-core": "0.16.1", "transformer-engine": "2.11.0", "jinja2": "3.1.6"}
INSTALLED = {name: Package(VERSIONS.get(name, "9999.0")) for name in NEEDS}
INSTALLED |= {"sentencepiece": Package("0.2.2")}

SOUND = Facts(
    python=(3, 12, 3),
    packages=INSTALLED,
    torch_cuda="13.0",
    nccl="2.28.9",
    driver="580.159.04",
    driver_cuda="13.0",
    driver_devices=1,
    devices=(H200,),
    disk_free=500 * GIB,
    shared_memory=64 * GIB,
    communication={"nccl": None, "gloo": None},
    rates=(Rate("matrix product, bf16", 790, 989, "TFLOP/s"), Rate("copy", 4300, 4800, "GB/s")),
)


def without(*names: str) -> dict[str, Package]:
    return {name: package for name, package in INSTALLED.items() if name not in names}


def with_version(name: str, version: str, error: str | None = None) -> dict[str, Package]:
    return {**INSTALLED, name: Package(version, error)}


def test_a_sound_machine_has_no_findings() -> None:
    assert problems(SOUND, NEEDS) == []
    assert "nothing is missing" in as_text(rows_of(SOUND), [])


CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # change of the sound machine → level, words of what is said, words of the remedy
    "A100 without TE": (
        {"devices": (A100,), "packages": without("transformer-engine")},
        "warning",
        "no FP8, no fused layers",
        "pip install --no-build-isolation 'transformer-engine[pytorch]",
    ),
    "A100 has no FP8": ({"devices": (A100,)}, "note", "8.0 has no FP8 (8.9 has)", "--precision bf16"),
    "TE too new": (
        {"packages": with_version("transformer-engine", "2.12.0")},
        "error",
        "transformer-engine 2.12.0",
        "pip install --no-build-isolation 'transformer-engine[pytorch]==2.11.*'",
    ),
    "TE for another torch": (
        {"packages": with_version("transformer-engine", "2.11.0", "ImportError: undefined symbol")},
        "error",
        "undefined symbol",
        "--force-reinstall --no-deps --no-cache-dir",
    ),
    "PyPI's apex": (
        {"packages": {**INSTALLED, "apex": Package("0.9.10.dev0")}, "apex_is_nvidias": False},
        "error",
        "apex is not NVIDIA's",
        "pip uninstall -y apex",
    ),
    "small shm": ({"shared_memory": 64 * 2**20}, "warning", "/dev/shm has 64 MiB", "docker run --shm-size"),
    "CPU build of torch beside a driver": (
        {"torch_cuda": None, "devices": (), "driver_cuda": "12.9", "rates": ()},
        "error",
        "torch is a CPU build",
        "--index-url https://download.pytorch.org/whl/cu128 'torch",
    ),
    "driver too old for torch": (
        {"devices": (), "driver_cuda": "12.6", "driver": "560.28.03"},
        "error",
        "torch is built for CUDA 13.0, driver 560.28.03 runs up to 12.6",
        "/whl/cu126",
    ),
    "driver too old for any torch": (
        {"devices": (), "driver_cuda": "11.4", "driver": "470.57.02"},
        "error",
        "runs up to 11.4",
        "update the NVIDIA driver",
    ),
    "GPUs are hidden": (
        {"devices": (), "visible_devices": ""},
        "warning",
        "hides all 1 GPU(s)",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "no torch": (
        {"packages": without("torch"), "devices": ()},
        "error",
        "torch is not installed",
        "pip install 'torch",
    ),
    "another megatron-core": (
        {"packages": with_version("megatron-core", "0.15.0")},
        "error",
        "megatron-core 0.15.0 is installed, megatron-core<0.20,>=0.16.1 is needed",
        "pip install 'megatron-core<0.20,>=0.16.1'",
    ),
    "no pyarrow": ({"packages": without("pyarrow")}, "note", "pyarrow is not installed", "pip install 'pyarrow'"),
    "shared GPU": ({"devices": (replace(H200, used=70 * GIB),)}, "warning", "70.0 of 140 GiB", "nvidia-smi"),
    "throttled GPU": (
        {"rates": (Rate("matrix product, bf16", 300, 989, "TFLOP/s"),)},
        "warning",
        "300 TFLOP/s is 30%",
        "nvidia-smi -q",
    ),
    "broken NCCL": (
        {"communication": {"nccl": "unhandled system error"}},
        "error",
        "nccl cannot reduce on this machine: unhandled system error",
        "NCCL_DEBUG=INFO",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_said_once_with_its_remedy(name: str) -> None:
    changes, level, words, remedy = CASES[name]
    facts = replace(SOUND, **changes)
    found = [problem for problem in problems(facts, NEEDS) if words in problem.what]
    assert len(found) == 1, problems(facts, NEEDS)
    assert found[0].level == level
    assert remedy in found[0].remedy
    assert remedy in as_text(rows_of(facts), found)


def test_a_cpu_machine_needs_neither_gpu_nor_transformer_engine() -> None:
    packages = {**without("transformer-engine"), "torch": Package("2.11.0+cpu")}
    facts = Facts(python=(3, 11, 7), packages=packages, communication={"gloo": None}, disk_free=99 * GIB)
    assert problems(facts, NEEDS) == []


def test_errors_come_first() -> None:
    facts = replace(SOUND, shared_memory=1, packages=without("torch", "pyarrow"), devices=())
    levels = [problem.level for problem in problems(facts, NEEDS)]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    assert levels[0] == "error"
    assert levels[-1] == "note"


@pytest.mark.slow
def test_the_program_reports_the_machine_at_hand(tmp_path: Path) -> None:
    """Here a run works, so the status is 0; from a folder that is not the repository."""
    command = [sys.executable, str(ROOT / "tools" / "doctor.py"), "--json", "--timeout", "3600"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)["facts"]
    assert facts["packages"]["megatron-core"]["version"] == version("megatron-core")
    assert facts["communication"]["gloo"] is None
    assert all(rate["measured"] > 0 for rate in facts["rates"])
    assert len(facts["rates"]) == 2
