"""What a sample costs is what the FLOPs formula says of the batch that it makes."""

from __future__ import annotations

import pytest

from megavlm.arch.kinds import layer_cost
from megavlm.arch.layers import layer_names, part_of
from megavlm.arch.workload import Workload, window_squares
from megavlm.config.schema import LanguageConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.costs import CostModel
from megavlm.rules.defaults import resolve_model

MODEL = resolve_model(
    ModelConfig(
        vision=VisionConfig(patch_size=4, window_size=16, full_attention_layers=(1,)),
        projector=ProjectorConfig(pixel_shuffle=2),
        language=LanguageConfig(vocab_size=100, window_size=20, full_attention_layers=(1,)),
    )
)


def test_costs_are_the_flops_of_the_model() -> None:
    grids = [(4, 6), (8, 8)]
    measured = CostModel.of(MODEL).cost(length=70, grids=grids, images=2)
    work = Workload(
        patches=88,
        patch_squares=24**2 + 64**2,
        window_squares=sum(window_squares(grid, 4) for grid in grids),
        features=22,
        tokens=70,
        token_squares=4900,
        sliding_squares=70**2 - 50**2,
        trained_tokens=70,
    )
    costs = {name: layer_cost(name, MODEL, work).forward_flops for name in layer_names(MODEL)}
    language = sum(cost for name, cost in costs.items() if part_of(name) == "language")
    assert measured.patches == 88
    assert measured.language == pytest.approx(language)
    assert measured.vision == pytest.approx(sum(costs.values()) - language)
