"""Submit each variant as a job of its own to Vertex AI or Kubernetes, through `megavlm launch`."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Sequence

from megavlm.programs.sweep.grid import Grid, Variant

Launch = Callable[[Sequence[str]], int]  # `megavlm.programs.launch.launch.main`


def command(scheduler: str, grid: Grid, variant: Variant, options: Sequence[str], *, title: str) -> list[str]:
    """Return the words after `megavlm launch` that submit a variant."""
    shape = ["--nodes", str(grid.nodes), "--gpus-per-node", str(grid.processes)]
    return [scheduler, *shape, "--name", job_name(title, variant.name), *options, "--", *variant.flags]


def job_name(title: str, variant: str) -> str:
    """Return a name that Kubernetes takes, different for each variant: a letter, then letters, digits and dashes."""
    plain = re.sub(r"[^a-z0-9]+", "-", f"{title}-{variant}".lower()).lstrip("-0123456789").rstrip("-") or "sweep"
    return f"{plain[:43].rstrip('-')}-{hashlib.sha256(variant.encode()).hexdigest()[:8]}"


def check_all(launch: Launch, commands: Sequence[Sequence[str]]) -> int:
    """Return 0 if every job passes the launcher's own checks, which print a line on what is wrong; else its status."""
    for words in commands:
        cut = list(words).index("--")
        with contextlib.redirect_stdout(io.StringIO()):
            status = launch([*words[:cut], "--dry-run", *words[cut:]])
        if status:
            return status
    return 0


def submit_all(launch: Launch, commands: Sequence[Sequence[str]], *, submitted: Callable[[int], None]) -> int:
    """Submit the jobs in turn, and tell `submitted` the number of each; return the first status that is not 0."""
    for number, words in enumerate(commands):
        if status := launch(words):
            return status
        submitted(number)
    return 0
