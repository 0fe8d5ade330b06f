"""Options about steps whose numbers are bad; `schema.py` defines how options are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megavlm.config.option import option


@dataclass(frozen=True)
class NumericsConfig:
    """What a run does about numbers that are not finite, and about sudden jumps of the gradient norm."""

    on_spike: Literal["skip", "rewind", "stop"] = option(
        "skip",
        "Step whose loss or gradient norm is not finite or a spike (--spike-factor): leave its batch out, go back to "
        "the newest checkpoint's weights and leave out all batches since, or end the run.",
    )
    spike_factor: float = option(
        1000.0,
        "A spike is a gradient norm above this factor times the median of the last 128 used steps; 0: none is. The "
        "default finds damage to numbers; to find unusual data, use 5 to 20.",
    )
    max_consecutive_skips: int = option(
        10, "Number of steps in a row with bad numbers that ends the run, with exit status 3 and without a checkpoint."
    )
    iterations_to_skip: tuple[str, ...] = option(
        (), "Iterations whose batches are left out, as numbers and ranges: 12 40-45. Default: no iteration."
    )
    check_weight_hash_across_dp_replicas_interval: int = option(
        0,
        "Steps between comparisons, by checksum, of weights and Adam moments that ranks hold alike (data-parallel "
        "replicas, and tensor-parallel ranks where nothing is cut); a difference ends the run with exit status 71 and "
        "names the rank. 0: no comparison.",
    )
    verify_micro_batch_interval: int = option(
        0,
        "Steps between checks in which each rank computes one micro-batch twice, forward and backward, and compares "
        "the results bit for bit; a difference ends the run with exit status 71 and names the rank and the module. "
        "0: no check.",
    )
