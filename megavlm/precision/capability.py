"""Choose between Transformer Engine's layers and torch's, from the device and version numbers; errors are one line."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from megavlm.errors import UserError

OLDEST_TE, OLDEST_MCORE = Version("2.9"), Version("0.16.1")
_REMEDY = "pip install --no-build-isolation -e '.[gpu]'"


@dataclass(frozen=True)
class Device:
    """Device and library versions that layers run on. `capability` is CUDA's (9, 0: Hopper); None: no CUDA device."""

    name: str
    capability: tuple[int, int] | None
    te: Version | None  # installed version of Transformer Engine
    te_error: str = ""  # why an installed Transformer Engine cannot be loaded
    mcore: Version = OLDEST_MCORE  # megatron-core, whose layers wrap Transformer Engine's


def newest_te(mcore: Version) -> Version:
    """Return the newest minor version of Transformer Engine that is supported with a version of megatron-core.

    megatron-core 0.16 to 0.18 are treated like 0.16.1, which requires Transformer Engine "below 2.12". 0.19 declares no
    bound; 2.20.2 is the newest Transformer Engine whose sources have been read.
    """
    return Version("2.20") if mcore.release >= (0, 19) else Version("2.11")


def choose_implementation(asked: str, device: Device) -> str:
    """Resolve `--transformer-impl` to "te" or "torch". Raises UserError if "te" was requested but cannot run."""
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
    if not OLDEST_TE.release <= device.te.release[:2] <= newest.release:
        return (
            f"needs Transformer Engine {OLDEST_TE} to {newest} with megatron-core {device.mcore}, but "
            f"{device.te} is installed: {_REMEDY}"
        )
    if device.te_error:
        return f"needs Transformer Engine, which cannot be loaded here ({device.te_error}): {_REMEDY}"
    return ""
