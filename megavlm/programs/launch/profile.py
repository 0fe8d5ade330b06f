"""Read a profile: settings for a network, one file of launch/profiles each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from megavlm.config.messages import plain
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
    try:  # as the shell reads it (launch/slurm.sbatch)
        return dict(word.split("=", 1) for word in shlex.split(path.read_text(encoding="utf-8"), comments=True))
    except (OSError, ValueError) as error:
        raise UserError(f"--profile {name}: {path} must have lines NAME=VALUE for a shell: {error}") from error


def pairs(option: str, given: list[str]) -> dict[str, str]:
    """Return the values of a repeatable option NAME=VALUE by name."""
    for each in given:
        name, equals, _ = each.partition("=")
        if not name or not equals:
            raise UserError(f"{option} {plain(each)} must be NAME=VALUE")
        if option == "--env" and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {plain(name)} is no name of a variable: use letters, digits and _ only")
    return dict(each.split("=", 1) for each in given)
