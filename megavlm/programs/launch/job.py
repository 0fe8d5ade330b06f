"""What every launcher is asked for, and what it would do: commands, which `--dry-run` prints and a submitter runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


def program() -> tuple[str, ...]:
    """Return the program that torchrun starts: the clone's script, or in another folder the installed package."""
    return ("pretrain_vlm.py",) if Path("pretrain_vlm.py").exists() else ("-m", "megavlm", "train")


@dataclass(frozen=True)
class Job:
    """A run on machines that are alike."""

    nodes: int
    processes: int  # per node, one for each GPU
    flags: tuple[str, ...]  # of pretrain_vlm.py

    @property
    def world(self) -> int:
        return self.nodes * self.processes


@dataclass(frozen=True)
class Command:
    """A command, and the variables that it gets beside those of its parent."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])
