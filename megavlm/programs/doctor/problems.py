"""Rules that find problems in the facts about a machine or about all nodes of a run, with remedies.

There is one pure function per subject. Slow nodes are found by comparison with the other nodes, and with a planner
profile if one is given. With two nodes there is only one pair, so that only a profile can show that its link is slow.
"""

from __future__ import annotations

import re
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import requires
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megavlm.planner.hardware import Hardware
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
    return errors_first(finding for rule in RULES for finding in rule(facts, needs))


def errors_first(found: Iterable[Problem]) -> list[Problem]:
    """Return problems in the order of their levels: errors, warnings, notes."""
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
    if facts.devices and facts.max_connections == "1":
        what = "CUDA_DEVICE_MAX_CONNECTIONS=1 is refused by --encode-ahead and by runs that shard gradients or weights"
        yield Problem("warning", what, "unset CUDA_DEVICE_MAX_CONNECTIONS  # a run sets what its layout needs")


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


# Measurements of links, in bytes/s.
WITHIN, WORLD, EXCHANGE = "all-reduce within nodes", "all-reduce of all ranks", "exchange between two nodes"
_LEAST_OF_PROFILE = 0.7  # profiles hold what collectives reach, not data sheets
_LEAST_OF_OTHERS = {True: 0.85, False: 0.5}  # on a GPU; on a CPU, other work makes measurements vary


@dataclass(frozen=True)
class Survey:
    """Facts and measured speeds of all nodes of a run. Nodes are numbered from 0 in the order of their ranks."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]  # ranks of each node
    facts: tuple[Mapping[str, str], ...]
    on_gpu: bool
    speeds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # measurement → rank → value


def world_problems(survey: Survey, profile: Hardware | None) -> list[Problem]:
    """Return all problems, errors first: facts that differ between nodes, and nodes slower than others or a profile."""
    found = [*_shapes(survey), *_differences(survey), *_slow(survey)]
    if profile is not None:
        found += _below_profile(survey, profile)
    return errors_first(found)


def _shapes(survey: Survey) -> Iterator[Problem]:
    usual = statistics.mode(map(len, survey.ranks))
    for name, ranks in zip(survey.names, survey.ranks, strict=True):
        if len(ranks) != usual:
            what = f"node {name} has {len(ranks)} processes, others {usual}"
            yield Problem("error", what, "start as many on each, one for each GPU (torchrun --nproc-per-node)")


_REMEDIES: tuple[tuple[tuple[str, ...], Level, str], ...] = (
    (("code",), "error", "bring the same version of megavlm to all nodes"),
    (
        ("python", "torch", "CUDA of torch", "NCCL", "megatron-core", "transformer-engine", "numpy", "transformers"),
        "error",
        "install the same on all nodes: one environment on shared storage, or one container image",
    ),
    (
        ("GPUs",),
        "error",
        "leave the node out (sbatch --exclude), or have its GPUs looked at: nvidia-smi, dmesg | grep -i xid",
    ),
    (("driver", "Linux"), "warning", "bring the nodes to one version"),
)


def _differences(survey: Survey) -> Iterator[Problem]:
    """Yield a problem for each value of a fact that differs from the most common value."""
    for fact in dict.fromkeys(key for facts in survey.facts for key in facts):
        values = [facts.get(fact, "not set") for facts in survey.facts]
        usual = statistics.mode(values)  # of two nodes that differ, the first counts as usual
        odd: dict[str, list[str]] = defaultdict(list)
        for name, value in zip(survey.names, values, strict=True):
            if value != usual:
                odd[value].append(name)
        for value, names in odd.items():
            level, remedy = next(
                ((level, remedy) for keys, level, remedy in _REMEDIES if fact in keys),
                ("warning", "set it alike on all nodes, in a profile of launch/profiles"),
            )
            yield Problem(level, f"{_nodes(names)}: {fact} is {value}, elsewhere {usual}", remedy)


def _slow(survey: Survey) -> Iterator[Problem]:
    """Yield a problem for each node with ranks below a share of the median speed (85 % on GPUs, 50 % on CPUs)."""
    for what, speeds in survey.speeds.items():
        usual = statistics.median_high(speeds.values())
        slow = {rank: speed for rank, speed in speeds.items() if speed < _LEAST_OF_OTHERS[survey.on_gpu] * usual}
        for name, ranks in zip(survey.names, survey.ranks, strict=True):
            if mine := [rank for rank in ranks if rank in slow]:
                which = f"rank{'s'[: len(mine) > 1]} {', '.join(map(str, mine))} on " if len(mine) < len(ranks) else ""
                share = min(slow[rank] for rank in mine) / usual
                yield Problem(
                    "warning",
                    f"{which}node {name}: {what} at {share:.0%} of the others' {_shown(what, usual)}",
                    "look at its clocks, other processes and links (nvidia-smi -q -d CLOCK,POWER,PERFORMANCE, top, "
                    "nvidia-smi topo -m, ibstat, ethtool), or leave the node out (sbatch --exclude)",
                )


def _promised(survey: Survey, profile: Hardware) -> dict[str, float]:
    """Return the bandwidth that a profile promises for each measurement, in bytes/s.

    Within a node it is the bandwidth of the node's links, between two nodes one device's share of the network. A ring
    through all ranks enters each node once and uses all network adapters, but is no faster than the links in a node.
    """
    near, far = profile.near.bandwidth, profile.far.bandwidth
    world = near if len(survey.ranks) == 1 else min(near, far * min(map(len, survey.ranks)))
    return {WITHIN: near, WORLD: world, EXCHANGE: far}


def _below_profile(survey: Survey, profile: Hardware) -> Iterator[Problem]:
    for what, promised in _promised(survey, profile).items():
        speeds = survey.speeds.get(what, {})
        least = min(speeds.values(), default=promised)
        if least < _LEAST_OF_PROFILE * promised:
            who = f"rank {next(rank for rank, speed in speeds.items() if speed == least)}"
            has = f"the profile {profile.name} has {_shown(what, promised)}"
            remedy = "NCCL_DEBUG=INFO says which network NCCL takes; a profile of launch/profiles sets it up"
            yield Problem("warning", f"{what}: {_shown(what, least)} ({who}), {has}", remedy)


def _nodes(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"node{'s'[: len(names) > 1]} {shown}"


def _shown(what: str, speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s" if what in (WITHIN, WORLD, EXCHANGE) else f"{speed:.3g}"


def rows(survey: Survey) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each line of the report on all nodes."""
    first = survey.facts[0]
    yield "nodes", f"{len(survey.names)}: {', '.join(survey.names[:8])}{' …' if len(survey.names) > 8 else ''}"
    yield "ranks", str(sum(map(len, survey.ranks)))
    yield from ((fact, first[fact]) for fact in ("torch", "NCCL", "driver", "GPUs") if fact in first)
    for what, speeds in survey.speeds.items():
        slowest, usual, fastest = min(speeds.values()), statistics.median(speeds.values()), max(speeds.values())
        shown = (_shown(what, each) for each in (usual, slowest, fastest))
        yield what, "{}, slowest {}, fastest {}".format(*shown)
