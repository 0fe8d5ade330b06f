"""Decide what a device and its software can run, from names and version numbers; errors are one line."""

from __future__ import annotations

from dataclasses import dataclass

import packaging.version

from megavlm.errors import UserError

Version = tuple[int, ...]
OLDEST_TE = (2, 9)
_REMEDY = "pip install --no-build-isolation -e '.[gpu]'"


@dataclass(frozen=True)
class Device:
    """The device and software that layers run on. `capability` is CUDA's (9, 0 for Hopper); None: no CUDA device."""

    name: str
    capability: Version | None
    te: Version | None  # Transformer Engine that is installed
    cuda: Version | None  # CUDA that torch was built with
    te_error: str = ""  # why it cannot be loaded, though it is installed
    mcore: Version = (0, 16, 1)  # megatron-core, whose layers wrap Transformer Engine's


@dataclass(frozen=True)
class Need:
    capability: Version
    cuda: Version
    device: str  # the oldest that has it


# Transformer Engine's own conditions (`check_fp8_support` and its siblings).
NEEDS = {
    "delayed": Need((8, 9), (12, 1), "Ada or Hopper (L40S, H100)"),
    "tensorwise": Need((8, 9), (12, 1), "Ada or Hopper (L40S, H100)"),
    "blockwise": Need((9, 0), (12, 9), "Hopper (H100)"),
    "mxfp8": Need((10, 0), (12, 8), "Blackwell (B200)"),
}
EMULATED = ("tensorwise", "delayed")


def newest_te(mcore: Version) -> Version:
    """Return the newest Transformer Engine (major, minor) for a version of megatron-core.

    0.16 to 0.18 are taken for as old as 0.16.1, which declares "below 2.12"; 0.19 declares no bound, and 2.20.2 is the
    newest whose sources have been read.
    """
    return (2, 20) if mcore >= (0, 19) else (2, 11)


def choose_implementation(asked: str, device: Device) -> str:
    """Return `--transformer-impl` as "te" or "torch". Raises UserError if `te` is asked for but cannot run."""
    missing = _missing_for_te(device)
    if asked == "te" and missing:
        raise UserError(f"--transformer-impl te {missing}, or use --transformer-impl torch")
    return "te" if asked != "torch" and not missing else "torch"


def _missing_for_te(device: Device) -> str:
    if device.capability is None:
        return f"needs a CUDA device, but this is {device.name}: start on a machine with an NVIDIA GPU"
    if device.te is None:
        return f"needs Transformer Engine, which is not installed: {_REMEDY}"
    newest = newest_te(device.mcore)
    if not OLDEST_TE <= device.te[:2] <= newest:
        return (
            f"needs Transformer Engine {shown(OLDEST_TE)} to {shown(newest)} with megatron-core {shown(device.mcore)}, "
            f"but {shown(device.te)} is installed: {_REMEDY}"
        )
    if device.te_error:
        return f"needs Transformer Engine, which cannot be loaded here ({device.te_error}): {_REMEDY}"
    return ""


def check_fp8(recipe: str, device: Device, *, implementation: str) -> None:
    """Raise UserError if a recipe cannot run; it names the capability needed, or the option that emulates it."""
    if implementation == "torch":
        if recipe not in EMULATED:
            raise UserError(
                f"--fp8-recipe {recipe} needs Transformer Engine and a CUDA device of capability "
                f"{shown(NEEDS[recipe].capability)}: torch layers emulate {' and '.join(EMULATED)} alone, so use "
                f"--fp8-recipe {EMULATED[0]}"
            )
        return
    need = NEEDS[recipe]
    assert device.capability is not None, "Transformer Engine was chosen"
    if device.capability < need.capability:
        raise UserError(
            f"--fp8-recipe {recipe} needs a CUDA device of capability {shown(need.capability)}, {need.device} or "
            f"newer, but {device.name} has {shown(device.capability)}: {_instead(device)}"
        )
    if device.cuda is None or device.cuda < need.cuda:
        raise UserError(
            f"--fp8-recipe {recipe} needs CUDA {shown(need.cuda)}, but torch was built with "
            f"{shown(device.cuda) if device.cuda else 'none'}: install a newer torch, or {_instead(device)}"
        )
    # Its kernels for consumer Blackwell came later than Transformer Engine 2.11.
    if recipe == "mxfp8" and device.capability >= (12, 0):
        raise UserError(
            f"--fp8-recipe mxfp8 needs a CUDA device of capability 10.x, but {device.name} has "
            f"{shown(device.capability)}: {_instead(device)}"
        )


def _instead(device: Device) -> str:
    """Return the best that this device can run."""
    for recipe in ("blockwise", "tensorwise"):
        need = NEEDS[recipe]
        if device.capability and device.capability >= need.capability and device.cuda and device.cuda >= need.cuda:
            return f"use --fp8-recipe {recipe}"
    return "use --fp8 none"


def shown(version: Version) -> str:
    return ".".join(map(str, version))


def parsed(text: str | None) -> Version | None:
    """Return the release of a version: "2.11.0+abc" → (2, 11, 0)."""
    return packaging.version.parse(text).release if text else None
