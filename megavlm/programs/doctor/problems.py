"""Rules that find problems in the facts about a machine, with remedies; one pure function per subject."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megavlm.precision.capability import OLDEST_MCORE, OLDEST_TE, newest_te
from megavlm.program import program
from megavlm.programs.doctor.machine import Facts

Level = Literal["error", "warning", "note"]

_GIB = 2**30
_LEAST_DISK, _LEAST_SHARED_MEMORY = 20 * _GIB, 1 * _GIB
_LEAST_SHARE = 0.5  # of the peak; large matrix products reach more on an idle GPU
_MOST_USED = 0.05  # of a GPU's memory, as a display or CUDA contexts may take
_TORCH_INDEX = "https://download.pytorch.org/whl/cu"
_TORCH_CUDAS = ((13, 0), (12, 8), (12, 6))  # CUDA versions of PyTorch's published builds, newest first
TE = "transformer-engine"
_SOURCE_BUILT = "gpu"  # this extra compiles against the torch that is installed


@dataclass(frozen=True)
class Problem:
    """A problem of a machine or run. `remedy` is a command, or advice if no command repairs it."""

    level: Level  # error: a run fails or is wrong; warning: it is slower or may fail; note: it could do more
    what: str
    remedy: str


@dataclass(frozen=True)
class RequiredPackage:
    """A package that pyproject.toml names."""

    requirement: Requirement
    extra: str | None  # the optional dependency that names it; None: always required

    def admits(self, version: str) -> bool:
        return self.requirement.specifier.contains(Version(version), prereleases=True)

    @property
    def command(self) -> str:
        """Return the command that installs a supported version of the package."""
        isolation = "--no-build-isolation " if self.extra == _SOURCE_BUILT else ""
        extras = f"[{','.join(sorted(self.requirement.extras))}]" if self.requirement.extras else ""
        return f"pip install {isolation}'{self.requirement.name}{extras}{self.requirement.specifier}'"


Needs = Mapping[str, RequiredPackage]


def needs(pyproject: Path) -> Needs:
    """Return the packages of a clone's `pyproject.toml` by name, or without such a file those of the installed wheel.

    The extra `dev` is left out. A package named by several extras belongs to the first one.
    """
    listed: list[tuple[str | None, Requirement]] = []
    if pyproject.exists():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        for extra, texts in ({None: project["dependencies"]} | project["optional-dependencies"]).items():
            listed += [(extra, Requirement(text)) for text in texts]
    else:
        for requirement in map(Requirement, requires("megavlm") or ()):
            marker = re.search(r"extra *== *['\"]([a-z]+)", str(requirement.marker or ""))
            listed.append((marker and marker[1], requirement))
    found: dict[str, RequiredPackage] = {}
    for extra, requirement in listed:
        if extra != "dev":
            found.setdefault(canonicalize_name(requirement.name), RequiredPackage(requirement, extra))
    return found


def problems(facts: Facts, needs: Needs) -> list[Problem]:
    """Return the problems that all rules find in the facts, errors first."""
    found = [finding for rule in RULES for finding in rule(facts, needs)]
    return sorted(found, key=lambda problem: ("error", "warning", "note").index(problem.level))


def packages(facts: Facts, needs: Needs) -> Iterator[Problem]:
    """Yield missing packages, unsupported versions and failed imports; Transformer Engine has its own rule."""
    for name, need in needs.items():
        have = facts.packages.get(name)
        if name == TE:
            continue
        if have is None:
            level: Level = "error" if need.extra is None else "note"
            yield Problem(level, f"{name} is not installed", need.command)
        elif not need.admits(have.version):
            yield Problem("error", f"{name} {have.version} is installed, {need.requirement} is needed", need.command)
        elif have.error is not None:
            yield Problem("error", f"{name} cannot be imported: {have.error}", f"{need.command} --force-reinstall")


def torch_and_driver(facts: Facts, needs: Needs) -> Iterator[Problem]:
    if not facts.driver_devices or facts.devices or "torch" not in facts.packages:
        return
    if facts.torch_cuda is None:
        what = f"the driver lists {facts.driver_devices} GPU(s), but torch is a CPU build"
        yield Problem("error", what, _torch_for(facts, needs))
    elif facts.visible_devices is not None and facts.visible_devices.strip() in ("", "-1"):
        what = f"CUDA_VISIBLE_DEVICES={facts.visible_devices} hides all {facts.driver_devices} GPU(s)"
        yield Problem("warning", what, "unset CUDA_VISIBLE_DEVICES")
    elif facts.driver_cuda is not None and _major(facts.torch_cuda) > _major(facts.driver_cuda):
        what = f"torch is built for CUDA {facts.torch_cuda}, driver {facts.driver} runs up to {facts.driver_cuda}"
        yield Problem("error", what, _torch_for(facts, needs))
    else:
        what = f"the driver lists {facts.driver_devices} GPU(s), torch sees none"
        yield Problem("error", what, "python -c 'import torch; torch.cuda.init()'  # says why")


def _torch_for(facts: Facts, needs: Needs) -> str:
    """Return the command for the newest build of torch that the driver can run, or advice to update the driver."""
    known = tuple(int(part) for part in (facts.driver_cuda or "99.9").split("."))
    for major, minor in _TORCH_CUDAS:
        if (major, minor) <= known:
            requirement = needs["torch"].requirement
            return f"pip install --force-reinstall --index-url {_TORCH_INDEX}{major}{minor} '{requirement}'"
    oldest = ".".join(map(str, _TORCH_CUDAS[-1]))
    return f"update the NVIDIA driver to one for CUDA {oldest} or newer: https://www.nvidia.com/drivers"


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def transformer_engine(facts: Facts, needs: Needs) -> Iterator[Problem]:
    need, have = needs[TE], facts.packages.get(TE)
    mcore = facts.packages.get("megatron-core")
    newest = newest_te(Version(mcore.version) if mcore else OLDEST_MCORE)
    if have is not None and not (need.admits(have.version) and Version(have.version).release[:2] <= newest.release):
        what = f"{TE} {have.version} is installed, megatron-core needs {OLDEST_TE} to {newest}"
        remedy = f"pip install --no-build-isolation '{need.requirement.name}[pytorch]=={newest}.*'"
        yield Problem("error" if facts.devices else "warning", what, remedy)
    elif have is not None and have.error is not None and facts.devices:
        remedy = f"{need.command} --force-reinstall --no-deps --no-cache-dir"
        yield Problem("error", f"{TE} {have.version} cannot be imported: {have.error}", remedy)
    elif have is None and any(device.capability >= (8, 0) for device in facts.devices):
        what = f"{TE} is not installed: no FP8, no fused layers; torch's own layers are used"
        yield Problem("warning", what, need.command)


def apex(facts: Facts, needs: Needs) -> Iterator[Problem]:
    if "apex" in facts.packages and not facts.apex_is_nvidias:
        what = "apex is not NVIDIA's, but another project of that name, which megatron-core takes for it"
        yield Problem("error", what, "pip uninstall -y apex")


def devices(facts: Facts, needs: Needs) -> Iterator[Problem]:
    for index, device in enumerate(facts.devices):
        if device.used > _MOST_USED * device.memory:
            what = (
                f"GPU {index}: {device.used / _GIB:.1f} of {device.memory / _GIB:.0f} GiB are taken by other processes"
            )
            yield Problem("warning", what, "nvidia-smi  # names them")
    lowest = min((device.capability for device in facts.devices), default=(99, 0))
    if lowest < (8, 0):
        what = f"compute capability {_dotted(lowest)} has no bf16 (8.0 has)"
        yield Problem("warning", what, "train with --precision fp16 or fp32")
    elif lowest < (8, 9):
        yield Problem(
            "note", f"compute capability {_dotted(lowest)} has no FP8 (8.9 has)", "train with --precision bf16"
        )
    if len(facts.devices) > 1 and lowest < (10, 0) and facts.max_connections != "1":
        what = "CUDA_DEVICE_MAX_CONNECTIONS is not 1: tensor-parallel communication overlaps less"
        yield Problem("note", what, "export CUDA_DEVICE_MAX_CONNECTIONS=1")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def storage(facts: Facts, needs: Needs) -> Iterator[Problem]:
    if facts.disk_free is not None and facts.disk_free < _LEAST_DISK:
        what = f"{facts.disk_free / _GIB:.1f} GiB are free here: checkpoints take 14 bytes per parameter and more"
        yield Problem("warning", what, "name a folder on another disk with --run-dir")
    if facts.shared_memory is not None and facts.shared_memory < _LEAST_SHARED_MEMORY:
        what = f"/dev/shm has {facts.shared_memory / 2**20:.0f} MiB: NCCL may fail"
        remedy = "mount -o remount,size=16G /dev/shm  # for a container: docker run --shm-size=16g"
        yield Problem("warning", what, remedy)


def communication(facts: Facts, needs: Needs) -> Iterator[Problem]:
    for backend, error in facts.communication.items():
        if error is not None:
            remedy = f"NCCL_DEBUG=INFO {program('doctor')}" if backend == "nccl" else needs["torch"].command
            yield Problem("error", f"{backend} cannot reduce on this machine: {error}", remedy)


def rates(facts: Facts, needs: Needs) -> Iterator[Problem]:
    for rate in facts.rates:
        if rate.peak is not None and rate.measured < _LEAST_SHARE * rate.peak:
            what = (
                f"{rate.what}: {rate.measured:.0f} {rate.unit} is {rate.measured / rate.peak:.0%} of the data sheet's"
            )
            yield Problem("warning", what, "nvidia-smi -q -d CLOCK,POWER,PERFORMANCE  # throttled, capped or shared?")


RULES: tuple[Callable[[Facts, Needs], Iterator[Problem]], ...] = (
    packages,
    torch_and_driver,
    transformer_engine,
    apex,
    devices,
    storage,
    communication,
    rates,
)
