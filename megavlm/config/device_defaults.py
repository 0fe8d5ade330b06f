"""Every option whose default depends on the device, in one table.

Tests on a CPU do not see what only a GPU does by default. So whatever can be the same on both devices is, and each
entry has a case that runs on gloo with the value of a GPU (`tests/dist/test_gpu_defaults.py` fails where one lacks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megavlm.config.effects import idle
from megavlm.config.schema import Config


@dataclass(frozen=True)
class DeviceDefault:
    """An option that is None until the device is known; `cpu` and `gpu` take the configuration and the replicas."""

    option: str  # "section.field"
    cpu: Callable[[Config, int], Any]
    gpu: Callable[[Config, int], Any]
    why: str


DEVICE_DEFAULTS: tuple[DeviceDefault, ...] = (
    DeviceDefault(
        option="parallel.encoder_chunk_patches",
        cpu=lambda config, dp: 4096,
        gpu=lambda config, dp: 16384,
        why="a GPU computes a layer of 4,096 patches in less time than the host takes to launch it",
    ),
)


def with_device_defaults(config: Config, *, on_gpu: bool, dp: int) -> Config:
    """Return the configuration with the options of the table that have an effect as asked, or as the device wants."""
    for default in DEVICE_DEFAULTS:
        section, field = default.option.split(".")
        if getattr(getattr(config, section), field) is None:
            value = (default.gpu if on_gpu else default.cpu)(config, dp)
            decided = replace(config, **{section: replace(getattr(config, section), **{field: value})})
            if all(option.key != default.option for option, _ in idle(decided)):
                config = decided
    return config


def chunk_patches(config: Config, *, on_gpu: bool) -> int:
    """Patches of a colocated encoder's pass, for a run and for the planner, which plans for other devices."""
    colocated = replace(config, parallel=replace(config.parallel, placement="colocated"))
    found = with_device_defaults(colocated, on_gpu=on_gpu, dp=1).parallel.encoder_chunk_patches
    assert found is not None, "the table has it"
    return found
