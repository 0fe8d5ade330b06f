"""Read a profile: settings for a network, one file of launch/profiles each."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from megavlm.errors import UserError

PROFILES = Path("launch/profiles")


def read_profile(name: str | None) -> Mapping[str, str]:
    """Return the variables of a profile, none without a name. Raises UserError for a name that no file has."""
    if name is None:
        return {}
    if not PROFILES.is_dir():
        raise UserError(f"--profile needs {PROFILES}, which a clone of the repository has: run this there")
    path = PROFILES / f"{name}.env"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in PROFILES.glob("*.env")))
        raise UserError(f"--profile {name} is not in {PROFILES}: choose one of {known}")
    words = shlex.split(path.read_text(encoding="utf-8"), comments=True)  # as the shell reads it (launch/slurm.sbatch)
    return dict(word.split("=", 1) for word in words)


def pairs(option: str, given: list[str]) -> dict[str, str]:
    """Return the values of a repeatable option NAME=VALUE by name."""
    for each in given:
        if not each.partition("=")[0] or "=" not in each:
            raise UserError(f"{option} {each} must be NAME=VALUE")
    return dict(each.split("=", 1) for each in given)
