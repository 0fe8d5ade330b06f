"""Resolve `--transformer-impl` on this process's device, and check that the device can run `--fp8`."""

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
from megavlm.config.schema import Config
from megavlm.errors import UserError
from megavlm.precision.capability import Device, choose_implementation

# Versions of Triton that compile flash-linear-attention's backward pass wrongly on Hopper, so that
# flash-linear-attention refuses them (its issue 640).
WRONG_ON_HOPPER = SpecifierSet(">=3.4,<3.7.1")
EMULATED = ("tensorwise", "delayed")
# Functions of Transformer Engine that say whether a recipe is available; default: `is_fp8_available`.
_ASKED = {"blockwise": "is_fp8_block_scaling_available", "mxfp8": "is_mxfp8_available"}


@cache
def device_at_hand() -> Device:
    """Return this process's device. On a GPU, import Transformer Engine to find out whether it can be loaded."""
    te, mcore = _version_of("transformer_engine"), _version_of("megatron-core")
    assert mcore is not None, "megavlm requires it"
    if not torch.cuda.is_available():
        return Device("a CPU", None, te, mcore=mcore)
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return Device(name, capability, te, te_error=loading_error(), mcore=mcore)


def implementation(config: Config) -> str:
    """Return the implementation of layers, "te" or "torch". Raises UserError if "te" was requested but cannot run."""
    return choose_implementation(config.execution.transformer_impl, device_at_hand())


def check_device(config: Config) -> None:
    """Raise UserError if this process's device cannot run the configuration."""
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
    """Raise UserError if the installed linear attention kernels (`model/delta_rule.py`) cannot train on this GPU."""
    fla, triton = _version_of("fla-core"), _version_of("triton") or "none"
    if fla is None or fla < Version("0.6"):
        raise UserError(f"linear attention on a GPU needs fla-core 0.6, not {fla}: pip install 'fla-core>=0.6'")
    if device.capability == (9, 0) and triton in WRONG_ON_HOPPER and find_spec("tilelang") is None:
        raise UserError(
            f"linear attention on {device.name} has wrong gradients with Triton {triton}: pip install tilelang, or a "
            "torch that brings Triton 3.7.1"
        )


def check_te_fp8(config: Config) -> None:
    """Raise UserError if this device lacks the FP8 recipe."""
    recipe = config.precision.fp8_recipe
    fp8: Any = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    can, why_not = getattr(fp8, _ASKED.get(recipe, "is_fp8_available"))()
    if not can:
        instead = "--fp8-recipe tensorwise, or --fp8 none" if recipe in _ASKED else "--fp8 none"
        raise UserError(f"--fp8-recipe {recipe} cannot run on {device_at_hand().name} ({why_not}): use {instead}")


def _version_of(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None
