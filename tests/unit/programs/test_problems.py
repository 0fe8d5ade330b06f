"""What doctor finds of one process, of a world of them, and the remedy of each."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import device
from torch.distributed import HashStore

from megavlm.errors import UserError
from megavlm.parallel.rendezvous import Meeting
from megavlm.planner.hardware import PROFILES
from megavlm.programs.doctor import survey
from megavlm.programs.doctor.doctor import as_text, rows_of
from megavlm.programs.doctor.machine import GPU, Facts, Package, Rate
from megavlm.programs.doctor.problems import EXCHANGE, WITHIN, WORLD, Survey, needs, problems, rows, world_problems
from megavlm.programs.doctor.survey import rounds, speeds_of
from megavlm.programs.main import COMMANDS
from megavlm.programs.train import train
from tests.support.data_files import write_tokenizer

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
    assert problems(SOUND, NEEDS) == problems(replace(SOUND, devices=(H200, H200)), NEEDS) == []
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
    "one queue for all streams": (
        {"max_connections": "1"},
        "warning",
        "CUDA_DEVICE_MAX_CONNECTIONS=1 is refused by --encode-ahead",
        "unset CUDA_DEVICE_MAX_CONNECTIONS",
    ),
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
    command = [sys.executable, "-m", "megavlm", "doctor", "--json", "--timeout", "3600"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)["facts"]
    assert facts["packages"]["megatron-core"]["version"] == version("megatron-core")
    assert facts["communication"]["gloo"] is None
    assert all(rate["measured"] > 0 for rate in facts["rates"])
    assert len(facts["rates"]) == 2


FACTS = {"torch": "2.11.0", "code": "abc", "GPUs": "8 × NVIDIA H100 80GB HBM3 (79 GiB)"}
NAMES = ("a", "b", "c", "d")
GB = 1e9


def speeds(pairs: float = 38 * GB, **slow: float) -> dict[str, dict[int, float]]:
    """Measurements of four nodes; `slow` has those of a node (`b`)."""
    return {
        "matrix product": {rank: 700.0 + rank for rank in range(8)},
        WITHIN: dict.fromkeys(range(8), 350 * GB),
        WORLD: dict.fromkeys(range(8), min(2 * pairs, 75 * GB)),
        EXCHANGE: {rank: slow.get(NAMES[rank // 2], pairs) for rank in range(8)},
    }


ALIKE = Survey(
    names=NAMES,
    ranks=((0, 1), (2, 3), (4, 5), (6, 7)),
    facts=(FACTS,) * 4,
    on_gpu=True,
    speeds=speeds(),
)


def test_nodes_that_are_alike_have_no_problem():
    assert world_problems(ALIKE, PROFILES["h100"]) == []
    text = as_text(rows(ALIKE), [])
    assert "nothing is missing, and nothing is slow" in text
    assert "exchange between two nodes" in text


def with_fact(node: int, **changes: str) -> Survey:
    return replace(ALIKE, facts=tuple({**FACTS, **(changes if place == node else {})} for place in range(4)))


@pytest.mark.parametrize(
    ("survey", "level", "words"),
    [
        (with_fact(2, torch="2.10.0"), "error", ["node c: torch is 2.10.0, elsewhere 2.11.0"]),
        (with_fact(0, code="abd"), "error", ["node a: code is abd, elsewhere abc"]),
        (with_fact(1, GPUs="7 × NVIDIA H100"), "error", ["node b: GPUs is 7 × NVIDIA H100", "elsewhere 8 ×"]),
        (with_fact(3, **{"$NCCL_IB_HCA": "mlx5"}), "warning", ["node d: $NCCL_IB_HCA is mlx5, elsewhere not set"]),
        (replace(ALIKE, ranks=((0, 1), (2,), (4, 5), (6, 7))), "error", ["node b has 1 processes, others 2"]),
        (
            replace(ALIKE, speeds={"product": {rank: 300.0 if rank == 5 else 700.0 for rank in range(8)}}),
            "warning",
            ["rank 5 on node c: product at 43% of the others' 700"],
        ),
        (
            replace(ALIKE, speeds=speeds(b=8 * GB)),
            "warning",
            ["node b: exchange between two nodes at 21% of the others' 38 GB/s"],
        ),
    ],
)
def test_what_differs_is_named_in_one_line(survey: Survey, level: str, words: list[str]):
    (problem,) = world_problems(survey, None)
    assert problem.level == level
    assert all(word in problem.what for word in words), problem.what
    assert problem.remedy
    assert "\n" not in problem.what + problem.remedy


def test_a_profile_tells_what_all_are_slow_at():
    """TCP instead of RDMA on all nodes: no node differs from the others."""
    found = world_problems(replace(ALIKE, speeds=speeds(3 * GB)), PROFILES["h100"])
    assert [problem.what.partition(" (")[0] for problem in found] == [
        "all-reduce of all ranks: 6 GB/s",
        "exchange between two nodes: 3 GB/s",
    ]
    assert "the profile h100 has 40 GB/s" in found[1].what
    assert world_problems(replace(ALIKE, speeds=speeds(3 * GB)), None) == []


def test_a_collective_within_nodes_has_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives a new group 10 or 30 minutes, whatever the world has."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(survey.dist, "new_group", lambda ranks, **more: given.update(more))
    monkeypatch.setattr(survey.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(survey.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(survey, "_all_reduce", lambda *given: 1.0)
    check = survey.Check(Meeting(HashStore(), 0, 1), limit=7)
    assert list(survey._links(check, [[0]], device("cpu"))) == [(WORLD, 1.0)]
    assert given == {"timeout": timedelta(seconds=7)}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_all_meet_once_and_nobody_meets_two_at_a_time(count: int):
    played = list(rounds(count))
    assert sorted(pair for one in played for pair in one) == list(combinations(range(count), 2))
    for one in played:
        assert len({node for pair in one for node in pair}) == 2 * len(one)


def test_of_two_exchanges_the_faster_counts():
    found = speeds_of([[("product", 7.0), (EXCHANGE, 3.0), (EXCHANGE, 9.0)], [(EXCHANGE, 2.0)]])
    assert found == {"product": {0: 7.0}, EXCHANGE: {0: 9.0, 1: 2.0}}


REMEDIES = yaml.safe_load(Path(__file__).with_name("remedies.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_tokenizer(folder / "tokenizer")

    def write(name: str, **record: object) -> None:
        (folder / name).write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")

    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    write("text.jsonl", conversations=said)
    write("more.jsonl", conversations=said)
    write("records.jsonl", image="red.png", conversations=[{"from": "human", "value": "<image>?"}, said[1]])
    write("odd.jsonl", q="Hi", a="Yes")
    write("dpo.jsonl", prompt="Hi", chosen="Yes", rejected="No")
    write("pairs.jsonl", query="Hi", positive="Yes")
    (folder / "text.jsonl.gz").write_bytes(gzip.compress((folder / "text.jsonl").read_bytes()))
    (folder / "images").mkdir()
    from PIL import Image

    Image.new("RGB", (8, 8)).save(folder / "images/red.png")
    (folder / "run.yaml").write_text("train: {train_iters: 2}\n")
    (folder / "grid.yaml").write_text(
        f"run_dir: {folder}/sweep\nflags: --config {folder}/run.yaml\nproduct: {{lr: [1e-3]}}\n"
    )
    return folder


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that runs a command and returns its complaint, empty for none."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def answer(line: str) -> str:
        command, *argv = line.split()
        if command == "train":
            try:
                train(argv)
            except UserError as error:
                return str(error)
            return ""
        status = importlib.import_module(COMMANDS[command][0]).main(argv)
        said = capsys.readouterr().err.strip()
        assert status in (0, 2)
        return said.partition(": ")[2] if status else ""

    return answer


@pytest.mark.parametrize("case", REMEDIES)
def test_what_a_message_proposes_leads_on(case: str, data: Path, answer: Callable[[str], str]) -> None:
    mistaken, mended = (REMEDIES[case][line].format(d=data) for line in ("mistaken", "mended"))
    message = answer(mistaken)
    new = set(re.findall(r"(?<![\w-])--[a-z-]+|[a-z_]+(?==)", mended))
    new -= set(re.findall(r"(?<![\w-])--[a-z-]+|[a-z_]+(?==)", mistaken))
    assert message
    assert {word for word in new if word not in message} == set()
    after = answer(mended)
    assert after != message
    assert REMEDIES[case]["later"] in after if "later" in REMEDIES[case] else not after
