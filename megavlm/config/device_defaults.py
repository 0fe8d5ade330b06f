"""The options whose default depends on the device, in one table.

A test on a CPU does not run what is the default on a GPU alone. So defaults are the same on both devices if possible,
and each entry here has a gloo test with the GPU's value (`tests/dist/test_gpu_defaults.py` fails if one is missing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megavlm.config.effects import idle
from megavlm.config.schema import Config


@dataclass(frozen=True)
class DeviceDefault:
    """An option that is None until the device is known; `cpu` and `gpu` take the configuration and the DP size."""

    option: str  # "section.field"
    cpu: Callable[[Config, int], Any]
    gpu: Callable[[Config, int], Any]
    why: str


DEVICE_DEFAULTS: tuple[DeviceDefault, ...] = (
    DeviceDefault(
        option="placement.encoder_chunk_patches",
        cpu=lambda config, dp: 4096,
        gpu=lambda config, dp: 16384,
        why="a GPU computes a layer of 4,096 patches in less time than the host takes to launch it",
    ),
)


def with_device_defaults(config: Config, *, on_gpu: bool, dp: int) -> Config:
    """Return the configuration with the device's value for each unset option of the table that has an effect."""
    for default in DEVICE_DEFAULTS:
        section, field = default.option.split(".")
        if getattr(getattr(config, section), field) is None:
            value = (default.gpu if on_gpu else default.cpu)(config, dp)
            decided = replace(config, **{section: replace(getattr(config, section), **{field: value})})
            if all(option.key != default.option for option, _ in idle(decided)):
                config = decided
    return config


def chunk_patches(config: Config, *, on_gpu: bool) -> int:
    """Return the maximum number of patches per pass of a colocated encoder on a CPU or a GPU."""
    colocated = replace(config, placement=replace(config.placement, encoder="colocated"))
    found = with_device_defaults(colocated, on_gpu=on_gpu, dp=1).placement.encoder_chunk_patches
    assert found is not None, "the table has it"
    return found
