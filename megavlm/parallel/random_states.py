"""The states of all random generators of a rank: torch's own, and those of megatron-core's tracker."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def random_states() -> dict[str, Any]:
    """Return the states of all random generators of this rank."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set all random generators of this rank."""
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(dict(states["tracker"]))  # a copy: the tracker changes it
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
