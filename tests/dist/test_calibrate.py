"""What calibration measures is what the model of costs is asked for: each layer, both passes, one link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megavlm import backend
from megavlm.planner.hardware import PROFILES
from megavlm.programs.calibrate import SIZES, config_of
from megavlm.train.calibration import fit, measured_hardware, timed_layers
from tests.support.pool import Pools


def measured(run_dir: str) -> Any:
    chosen = backend.activate()
    config = config_of(SIZES[0], "fp32", run_dir, processes=dist.get_world_size())
    hardware = measured_hardware([config], chosen, repeats=1, rounds=1, processes_per_node=2)
    return (*timed_layers(config, chosen, repeats=1), *hardware)


def test_layers_are_timed_and_fitted(pools: Pools, tmp_path: Path) -> None:
    for forward, backward, optimizer_rate, hardware, told in pools(2).run(measured, str(tmp_path / "run")):
        # patch_embed, 2 vision layers, norm, projector, embedding, 2 language layers, norm, output
        assert len(forward) == 10
        assert len(backward) == 9  # the embedding's is a scatter, which no rate describes
        assert sum(sample.products > 0 for sample in forward) == 7
        assert optimizer_rate > 0
        assert (hardware.near == PROFILES["cpu"].near, hardware.source) == (False, "measured with 2 processes, fp32")
        for rates in (fit(forward), hardware.forward, hardware.backward):
            assert rates.matmul > 0
            assert rates.bandwidth > 0
        assert told.count("median error") == 2
