"""What a connector declares against what it is: parameters, the bytes that autograd keeps, and FLOPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from megavlm.arch.connector import connector_of
from megavlm.arch.dims import Dims
from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.arch.kinds import layer_cost, local_parameters, saved_bytes
from megavlm.arch.layers import PROJECTOR
from megavlm.arch.scenario import scenario_of
from megavlm.arch.workload import image_workload
from megavlm.config.registry import registered
from megavlm.config.schema import Config
from megavlm.model.vision import VisionLayout
from tests.support.extensions import POOLED, forget, install
from tests.support.flags import MODELS, resolved
from tests.support.harness import Single

SIZES = (
    "--set model.vision.hidden_size=64 model.vision.num_attention_heads=2 model.vision.patch_size=4 "
    "model.vision.image_size=32 model.language.hidden_size=48 model.language.num_attention_heads=2 "
    "model.language.vocab_size=97"
)
GRIDS = ((8, 8), (8, 8), (8, 4))
CONNECTORS = {
    "mlp": "",
    "gated": "--projector-kind gated",
    "swiglu": "--projector-kind swiglu",
    "pooled": " ".join(POOLED),
    "qformer": MODELS["qformer"],
    "perceiver": MODELS["perceiver"],
    "adaptive_pool": "--projector-kind adaptive_pool --set model.projector.connectors.adaptive_pool.side=3",
    "c_abstractor": MODELS["c-abstractor"],
}
MLPS = ("mlp", "gated", "swiglu")


def config_of(name: str) -> Config:
    install()
    try:
        return resolved([*SIZES.split(), *CONNECTORS[name].split()])
    finally:
        if name != "pooled":
            forget()


@pytest.mark.parametrize(
    ("name", "frozen"),
    # What frozen MLPs keep is taken to be what trained ones do.
    [(name, frozen) for name in CONNECTORS for frozen in (False, True) if not frozen or name not in MLPS],
)
def test_a_connector_is_what_it_says(single: Single, name: str, frozen: bool) -> None:
    config = config_of(name)
    model = config.model
    part: Any = single.chunk(config, (PROJECTOR,), vocab_size=97).parts[PROJECTOR]
    with torch.no_grad():
        for param in part.parameters():
            param.normal_(0, 0.02)
    assert sum(param.numel() for param in part.parameters()) == local_parameters(PROJECTOR, model, 1)
    own = {param.untyped_storage().data_ptr() for param in part.parameters()}
    for param in part.parameters():
        param.requires_grad_(not frozen)
    work = image_workload(GRIDS, model)
    assert work.features == sum(tokens_per_grid(grid, model.projector) for grid in GRIDS)
    hidden = torch.randn(work.patches, 1, model.vision.hidden_size, requires_grad=True)
    layout = VisionLayout.of(GRIDS, class_token=False, multiple=1, blank=(1, 1))
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor), FlopCounterMode(display=False) as counted:
        out = part(hidden, layout, tile_groups=(), sequence_parallel=False)
    assert out.shape == (work.features, 1, model.language.hidden_size)
    whole = scenario_of(config, Dims())
    scenario = replace(whole, work=work, own=whole.own - {PROJECTOR} if frozen else whole.own)
    assert saved_bytes(PROJECTOR, scenario) == pytest.approx(sum(kept.values()), rel=0.02)
    cost = layer_cost(PROJECTOR, model, work)  # torch does not count its attention on a CPU
    assert cost.forward_flops - cost.attention_flops == pytest.approx(counted.get_total_flops(), rel=0.01)
    if name == "pooled":
        forget()


def test_every_connector_is_here() -> None:
    assert registered("connectors").keys() - {"linear"} == CONNECTORS.keys() - {"pooled"}


@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_hold_all_of_a_weight_once(name: str, tp: int) -> None:
    """The rows of all ranks are those of the model, each once, and each rank holds as many, padding included."""
    model = config_of(name).model
    for leaf, split in connector_of(model.projector).splits(model).items():
        parts = [split.part(tp, rank) for rank in range(tp)]
        if parts[0] is None:
            assert split.size // split.unit % tp == 0, leaf
            continue
        rows = [row for part in parts for run in part.runs for row in range(run.real, run.real + run.count)]
        assert sorted(rows) == list(range(split.size)), leaf
    forget()
