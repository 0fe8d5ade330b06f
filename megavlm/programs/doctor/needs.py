"""Read the requirements in pyproject.toml, and the commands that install them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

_SOURCE_BUILT = "gpu"  # this extra compiles against the torch that is installed


@dataclass(frozen=True)
class RequiredPackage:
    """A required package."""

    requirement: Requirement
    extra: str | None  # the optional dependency that names it; None: always required
    cloned: bool = True  # whether commands are for a clone, in its root

    def admits(self, version: str) -> bool:
        return self.requirement.specifier.contains(Version(version), prereleases=True)

    @property
    def command(self) -> str:
        """Return the command that installs the package."""
        if not self.cloned:
            return self.exact_command
        if self.extra is None:
            return "pip install -e ."
        isolation = "--no-build-isolation " if self.extra == _SOURCE_BUILT else ""
        return f"pip install {isolation}-e '.[{self.extra}]'"

    @property
    def exact_command(self) -> str:
        """Return the command that replaces another version with a supported one."""
        isolation = "--no-build-isolation " if self.extra == _SOURCE_BUILT else ""
        return f"pip install {isolation}'{self.requirement.name}{self.requirement.specifier}'"


def needs(pyproject: Path) -> Mapping[str, RequiredPackage]:
    """Return the requirements in the `pyproject.toml` of a clone, or those of the installed wheel if there is none."""
    if pyproject.exists():
        return needs_of(pyproject)
    found: dict[str, RequiredPackage] = {}
    for text in requires("megavlm") or ():
        requirement = Requirement(text)
        extra = re.search(r"extra *== *['\"]([a-z]+)", str(requirement.marker or ""))
        if extra is None or extra[1] != "dev":
            name = canonicalize_name(requirement.name)
            found.setdefault(name, RequiredPackage(requirement, extra and extra[1], cloned=False))
    return found


def needs_of(pyproject: Path) -> Mapping[str, RequiredPackage]:
    """Return the requirements by package name, without those of `dev`; the first extra that names a package counts."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found: dict[str, RequiredPackage] = {}
    extras = {extra: texts for extra, texts in project["optional-dependencies"].items() if extra != "dev"}
    for extra, texts in ({None: project["dependencies"]} | extras).items():
        for text in texts:
            requirement = Requirement(text)
            found.setdefault(canonicalize_name(requirement.name), RequiredPackage(requirement, extra))
    return found
