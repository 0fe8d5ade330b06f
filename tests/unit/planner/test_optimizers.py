"""Optimizers in the planner: bytes of their state, and what Muon's orthogonalisation adds to a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megavlm.arch.dims import Dims
from megavlm.arch.scenario import Scenario, scenario_of
from megavlm.config.optimizer_schema import newton_schulz_flops
from megavlm.planner.cost import host_update_seconds
from megavlm.planner.hardware import PROFILES
from megavlm.planner.host_memory import host_memory
from megavlm.planner.memory import matrix_bytes, matrix_seconds, model_state_bytes
from tests.support.small_run import SMALL

H100 = PROFILES["h100"]
LAYER = "language.layers.0"


def case(kind: str, *, tp: int = 1, dp: int = 1, averages: float = 0.0) -> Scenario:
    optimizer = replace(SMALL.optimizer, kind=kind, ema_decay=averages)  # type: ignore[arg-type]
    precision = replace(SMALL.precision, dtype="bf16")
    return scenario_of(replace(SMALL, optimizer=optimizer, precision=precision), Dims(tp, 1, 1, dp), on_gpu=True)


def test_state_is_four_bytes_a_number() -> None:
    found = {kind: model_state_bytes(LAYER, case(kind)) for kind in ("adamw", "muon", "lion")}
    count = found["adamw"].weights / 2
    language = SMALL.model.language
    hidden, ffn = language.hidden_size, language.ffn_hidden_size
    rows = (2 * language.num_attention_heads + 2 * (language.num_query_groups or language.num_attention_heads)) * (
        language.kv_channels or hidden // language.num_attention_heads
    )
    assert found["adamw"].optimizer == 12 * count
    assert found["lion"].optimizer == 8 * count
    assert found["muon"].optimizer == 12 * count - 4 * hidden * (rows + 3 * ffn)
    assert model_state_bytes(LAYER, case("lion", averages=0.9)).optimizer == 12 * count
    halves = model_state_bytes(LAYER, case("muon", tp=2)).optimizer / found["muon"].optimizer
    assert halves == pytest.approx(0.5, rel=0.01)  # but for norms


def test_the_host_and_a_disk_have_what_a_rule_keeps() -> None:
    """Averages are in memory even where state is on a disk."""
    found = {}
    for kind in ("adamw", "lion"):
        off = replace(case(kind, averages=0.9), offload=("optimizer",))
        for name, scenario in (("host", off), ("disk", replace(off, moments_on_disk=True))):
            found[kind, name] = host_memory(scenario, [0, len(off.names)], 0, recompute="none")
    one = found["lion", "disk"].disk
    assert found["adamw", "disk"].disk == 2 * one
    assert found["adamw", "disk"].moments == found["lion", "disk"].moments == one
    assert (found["adamw", "host"].moments, found["lion", "host"].moments) == (3 * one, 2 * one)
    adamw, lion = (host_update_seconds(1e9, H100, state=state, on_disk=True) for state in (2, 1))
    assert lion == pytest.approx(adamw / 2, rel=0.1), "the disk's time"


def test_ranks_share_the_matrices_of_their_stage() -> None:
    names = (LAYER,)
    alone, shared = (matrix_seconds(names, case("muon", dp=dp), H100) for dp in (1, 2))
    shapes = [(64, 64)]  # the rate alone
    assert matrix_seconds(names, case("adamw"), H100) == 0
    assert alone * H100.forward.matmul > newton_schulz_flops(SMALL.optimizer, *shapes[0])
    assert alone / 2 < shared - 2 * H100.near.latency < alone
    assert matrix_bytes(names, case("lion")) == 0
    one, eight = (matrix_bytes(names, case("muon", dp=dp)) for dp in (1, 8))
    assert eight < one
