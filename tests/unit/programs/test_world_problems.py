"""What the nodes of a run told, as data; what differs or is slow is named, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from megavlm.planner.hardware import PROFILES
from megavlm.programs.doctor.doctor import as_text
from megavlm.programs.doctor.survey import rounds, speeds_of
from megavlm.programs.doctor.world_problems import EXCHANGE, WITHIN, WORLD, Survey, rows, world_problems

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


SOUND = Survey(
    names=NAMES,
    ranks=((0, 1), (2, 3), (4, 5), (6, 7)),
    facts=(FACTS,) * 4,
    on_gpu=True,
    speeds=speeds(),
)


def test_nodes_that_are_alike_have_no_problem():
    assert world_problems(SOUND, PROFILES["h100"]) == []
    text = as_text(rows(SOUND), [])
    assert "nothing is missing, and nothing is slow" in text
    assert "exchange between two nodes" in text


def with_fact(node: int, **changes: str) -> Survey:
    return replace(SOUND, facts=tuple({**FACTS, **(changes if place == node else {})} for place in range(4)))


@pytest.mark.parametrize(
    ("survey", "level", "words"),
    [
        (with_fact(2, torch="2.10.0"), "error", ["node c: torch is 2.10.0, elsewhere 2.11.0"]),
        (with_fact(0, code="abd"), "error", ["node a: code is abd, elsewhere abc"]),
        (with_fact(1, GPUs="7 × NVIDIA H100"), "error", ["node b: GPUs is 7 × NVIDIA H100", "elsewhere 8 ×"]),
        (with_fact(3, **{"$NCCL_IB_HCA": "mlx5"}), "warning", ["node d: $NCCL_IB_HCA is mlx5, elsewhere not set"]),
        (replace(SOUND, ranks=((0, 1), (2,), (4, 5), (6, 7))), "error", ["node b has 1 processes, others 2"]),
        (
            replace(SOUND, speeds={"product": {rank: 300.0 if rank == 5 else 700.0 for rank in range(8)}}),
            "warning",
            ["rank 5 on node c: product at 43% of the others' 700"],
        ),
        (
            replace(SOUND, speeds=speeds(b=8 * GB)),
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
    found = world_problems(replace(SOUND, speeds=speeds(3 * GB)), PROFILES["h100"])
    assert [problem.what.partition(" (")[0] for problem in found] == [
        "all-reduce of all ranks: 6 GB/s",
        "exchange between two nodes: 3 GB/s",
    ]
    assert "the profile h100 has 40 GB/s" in found[1].what
    assert world_problems(replace(SOUND, speeds=speeds(3 * GB)), None) == []


@pytest.mark.parametrize("count", [2, 3, 8])
def test_all_meet_once_and_nobody_meets_two_at_a_time(count: int):
    played = list(rounds(count))
    assert sorted(pair for one in played for pair in one) == list(combinations(range(count), 2))
    for one in played:
        assert len({node for pair in one for node in pair}) == 2 * len(one)


def test_of_two_exchanges_the_faster_counts():
    found = speeds_of([[("product", 7.0), (EXCHANGE, 3.0), (EXCHANGE, 9.0)], [(EXCHANGE, 2.0)]])
    assert found == {"product": {0: 7.0}, EXCHANGE: {0: 9.0, 1: 2.0}}
