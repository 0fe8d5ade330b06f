"""`--tp-comm-overlap` without GPUs: what Transformer Engine is asked for, and what is refused in one line."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megavlm.backend import Backend
from megavlm.command_line.parsing import parse
from megavlm.errors import UserError
from megavlm.parallel.user_buffers import start_user_buffers

GPU = Backend(device=torch.device("cuda", 0), communication="nccl", name="NVIDIA H200")
BASE = "transformer_engine.pytorch.module.base"
ARGV = (
    "--tp 2 --tp-comm-overlap --precision bf16 --seq-length 512 --micro-batch-size 2 --set "
    "model.language.hidden_size=256"
)


def config(argv: str = "") -> Any:
    return parse([*ARGV.split(), *argv.split()])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for Transformer Engine that keeps what it is asked for."""
    module: Any = ModuleType(BASE)
    module.UserBufferQuantizationMode = SimpleNamespace(NONE="none", FP8="fp8")
    module.asked = []
    module.initialize_ub = lambda shape, tp_size, **options: module.asked.append((shape, tp_size, options))
    parents = BASE.split(".")
    for length in range(1, len(parents)):
        monkeypatch.setitem(sys.modules, ".".join(parents[:length]), ModuleType("stand-in"))
    monkeypatch.setitem(sys.modules, BASE, module)
    return module


def test_buffers_hold_the_language_states_of_a_micro_batch(engine: Any) -> None:
    start_user_buffers(config(), GPU)
    options = {"quantization_modes": ["none"], "dtype": torch.bfloat16, "bootstrap_backend": "nccl"}
    assert engine.asked == [([1024, 256], 2, options)]


def test_buffers_hold_the_part_of_a_context_parallel_rank(engine: Any) -> None:
    """Its tensor-parallel ranks are neighbours, as Transformer Engine takes them to be."""
    start_user_buffers(config("--cp 4"), GPU)
    assert engine.asked[0][:2] == ([256, 256], 2)


def test_layers_in_fp8_have_buffers_beside_those_in_bf16(engine: Any) -> None:
    start_user_buffers(config("--fp8 hybrid"), GPU)
    assert engine.asked[0][2]["quantization_modes"] == ["none", "fp8"]


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match="--tp-comm-overlap needs CUDA devices"):
        start_user_buffers(config(), Backend(torch.device("cpu"), "gloo", "CPU"))


def test_a_missing_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(UserError, match="needs Transformer Engine: pip install"):
        start_user_buffers(config(), GPU)


def test_devices_without_multicast_are_refused_in_one_line(engine: Any) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("no CUDA Multicast.\nLaunch with UB_SKIPMC=1")

    engine.initialize_ub = refuse
    with pytest.raises(
        UserError, match=r"not possible on these devices \(no CUDA Multicast\. Launch with UB_SKIPMC=1\)"
    ):
        start_user_buffers(config(), GPU)
