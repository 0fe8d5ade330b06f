"""Decide what `--transformer-impl` and `--fp8` mean on this process's device."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megavlm.backend.installed import loading_error
from megavlm.config.derived import shards_gradients
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.precision.capability import Device, choose_implementation

# Triton whose code of flash-linear-attention's backward pass is wrong on Hopper, so that it refuses (its issue 640).
WRONG_ON_HOPPER = SpecifierSet(">=3.4,<3.7.1")
EMULATED = ("tensorwise", "delayed")
# What Transformer Engine is asked of each recipe; all need the first.
_ASKED = {"blockwise": "is_fp8_block_scaling_available", "mxfp8": "is_mxfp8_available"}


@cache
def device_at_hand() -> Device:
    """Return this process's device. On a GPU, Transformer Engine is imported to find out whether that works."""
    te, mcore = _version_of("transformer_engine"), _version_of("megatron-core")
    assert mcore is not None, "megavlm requires it"
    if not torch.cuda.is_available():
        return Device("a CPU", None, te, mcore=mcore)
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return Device(name, capability, te, te_error=loading_error(), mcore=mcore)


def implementation(config: Config) -> str:
    """Return the implementation of layers, "te" or "torch". Raises UserError if the one asked for is missing."""
    return choose_implementation(config.execution.transformer_impl, device_at_hand())


def check_device(config: Config) -> None:
    """Raise UserError if this device cannot run the configuration."""
    chosen = implementation(config)
    if config.precision.fp8 != "none":
        if chosen == "te":
            check_te_fp8(config)
        elif config.precision.fp8_recipe not in EMULATED:
            raise UserError(
                f"--fp8-recipe {config.precision.fp8_recipe} needs Transformer Engine: torch's layers emulate "
                f"{' and '.join(EMULATED)} alone, so use --fp8-recipe {EMULATED[0]}"
            )
        elif config.precision.fp8_param_gather:
            raise UserError(
                "--fp8-param-gather needs Transformer Engine: torch's layers keep their weights in bf16 and would only "
                "pretend, so leave it out"
            )
    if config.model.language.linear_attention_layers and device_at_hand().capability is not None:
        _check_linear_attention(device_at_hand())
    if config.execution.compile_small_ops and chosen == "te":
        raise UserError(
            "--compile-small-ops compiles torch's layers, Transformer Engine's are fused: leave it out, or add "
            "--transformer-impl torch"
        )


def _check_linear_attention(device: Device) -> None:
    """Raise UserError if a GPU has no kernels for linear attention (`model/delta_rule.py`) that train."""
    fla, triton = _version_of("fla-core"), _version_of("triton") or "none"
    if fla is None or fla < Version("0.6"):
        raise UserError(f"linear attention on a GPU needs fla-core 0.6, not {fla}: pip install 'megavlm[linear]'")
    if device.capability == (9, 0) and triton in WRONG_ON_HOPPER and find_spec("tilelang") is None:
        raise UserError(
            f"linear attention on {device.name} has wrong gradients with Triton {triton}: pip install tilelang, or a "
            "torch that brings Triton 3.7.1"
        )


def check_te_fp8(config: Config) -> None:
    """Raise UserError if Transformer Engine has no such FP8 on this device, or is not known to have it sharded."""
    recipe, sharding = config.precision.fp8_recipe, config.parallel.data_parallel_sharding
    fp8: Any = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    can, why_not = getattr(fp8, _ASKED.get(recipe, "is_fp8_available"))()
    if not can:
        instead = "--fp8-recipe tensorwise, or --fp8 none" if recipe in _ASKED else "--fp8 none"
        raise UserError(f"--fp8-recipe {recipe} cannot run on {device_at_hand().name} ({why_not}): use {instead}")
    # Its own tests of `fully_shard` have the other recipes.
    if shards_gradients(config) and recipe == "blockwise":
        raise UserError(
            f"--fp8-recipe blockwise is not known to work with --data-parallel-sharding {sharding}: use --fp8-recipe "
            "tensorwise, or --data-parallel-sharding optimizer"
        )


def _version_of(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None
