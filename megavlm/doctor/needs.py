"""Read the requirements in pyproject.toml, and the commands that install them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
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

    def admits(self, version: str) -> bool:
        return self.requirement.specifier.contains(Version(version), prereleases=True)

    @property
    def command(self) -> str:
        """Return the command that installs the package."""
        if self.extra is None:
            return "pip install -e ."
        isolation = "--no-build-isolation " if self.extra == _SOURCE_BUILT else ""
        return f"pip install {isolation}-e '.[{self.extra}]'"

    @property
    def exact_command(self) -> str:
        """Return the command that replaces another version with a supported one."""
        isolation = "--no-build-isolation " if self.extra == _SOURCE_BUILT else ""
        return f"pip install {isolation}'{self.requirement}'"


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
