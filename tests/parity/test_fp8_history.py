"""Delayed scaling's histories are plain tensors in a checkpoint, and a resumed run goes on from them: with stand-ins
that hold state as Transformer Engine's modules do.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch import nn

from megavlm.command_line.parsing import parse
from megavlm.precision.fp8_state import histories, history_of, prepare, restore, sharded_histories
from tests.support.harness import Single

LENGTH = 4


class Linear(nn.Module):
    """Scales follow the largest value of the last passes; state appears with the first pass in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.fp8_meta: dict[str, Any] = {}

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        for side, tensors in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            state = SimpleNamespace(amax_history=torch.zeros(recipe, tensors), scale=torch.ones(tensors))
            self.fp8_meta[side] = state
            self.quantizer = self.fp8_meta[side].scale  # the very tensor, as quantizers hold it

    def run(self, step: int) -> list[float]:
        if not self.fp8_meta:
            self.init_fp8_meta_tensors(LENGTH)
        for state in (self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]):
            state.amax_history.copy_(state.amax_history.roll(1, 0))
            state.amax_history[0] = 1 + (7 * step) % 5
            state.scale.copy_(448 / state.amax_history.amax(0))
        return [float(self.quantizer[0])]


class Attention(nn.Module):
    """Has FP8 state and no weight: nothing to remember."""

    fp8_meta: dict[str, Any] = {"scaling_fwd": SimpleNamespace(amax_history=torch.zeros(1), scale=torch.ones(1))}  # noqa: RUF012


def chunk() -> nn.Module:
    layers = nn.ModuleDict(
        {"0": nn.ModuleDict({"fc": Linear(), "core": Attention()}), "1": nn.ModuleDict({"fc": Linear()})}
    )
    return nn.ModuleDict({"language": nn.ModuleDict({"layers": layers})})


def linears(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def test_a_resumed_run_goes_on_from_them(single: Single, tmp_path: Path) -> None:
    whole, half = chunk(), chunk()
    for step in range(3):
        for linear in (linears(whole)[1], linears(half)[1]):  # the first layer stays in high precision
            linear.run(step)
    names = {f"language.layers.1.fc.fp8.{s}.{t}" for s in ("forward", "backward") for t in ("amax_history", "scale")}
    assert histories(half).keys() == names
    dist_checkpointing.save({"fp8": sharded_histories(half, replica=0)}, str(tmp_path))

    resumed = chunk()
    assert histories(resumed) == {}
    prepare(resumed, runs_in_fp8=lambda name: ".1." in name, recipe=lambda: LENGTH)
    assert histories(resumed).keys() == names
    loaded = dist_checkpointing.load({"fp8": sharded_histories(resumed, replica=0)}, str(tmp_path))
    restore(resumed, loaded["fp8"])
    for step in range(3, 8):
        assert linears(resumed)[1].run(step) == linears(whole)[1].run(step)
    fresh = Linear()
    assert fresh.run(3) != linears(whole)[1].run(3)  # a history forgotten would show


def test_histories_belong_to_delayed_scaling_of_one_length() -> None:
    bf16 = "--precision bf16 --fp8 hybrid"
    assert history_of(parse([])) is None
    assert history_of(parse(bf16.split())) is None
    delayed = f"{bf16} --fp8-recipe delayed --set precision.fp8_amax_history_len=16"
    assert history_of(parse(delayed.split())) == {"format": "hybrid", "amax_history_len": 16}
