"""Options about steps whose numbers are bad; `schema.py` defines how options are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megavlm.config.option import AT_LEAST_0, AT_LEAST_1, KEY_ONLY, Valid, option


@dataclass(frozen=True)
class NumericsConfig:
    """What a run does about numbers that are not finite, and about sudden jumps of the gradient norm."""

    on_spike: Literal["skip", "rewind", "stop"] = option(
        "skip",
        "What to do after a step whose loss or gradient norm is not finite, or whose norm is a spike (--spike-factor): "
        "skip its batch; rewind, that is load the newest checkpoint's weights and skip all batches since; or stop.",
    )
    spike_factor: float = option(
        1000.0,
        "A gradient norm above this factor times the median of the last 128 steps that were not skipped is a spike; "
        "0: no norm is. The default finds corrupted numbers; 5 to 20 also finds unusual data.",
        valid=Valid("0 or greater than 1", lambda value: value == 0 or value > 1),
    )
    max_consecutive_skips: int = option(
        10,
        "Number of skipped steps in a row at which the run ends, with exit status 3 and without a checkpoint.",
        flag=KEY_ONLY,
        valid=AT_LEAST_1,
    )
    iterations_to_skip: tuple[str, ...] = option(
        (), "Iterations whose batches are skipped, as numbers and ranges: 12 40-45. Default: no iteration."
    )
    check_weight_hash_across_dp_replicas_interval: int = option(
        0,
        "Steps between comparisons, by checksum, of weights and Adam moments that ranks hold alike (data-parallel "
        "replicas, and tensor-parallel ranks where nothing is cut); a difference ends the run with exit status 71 and "
        "names the rank. 0: no comparison.",
        flag=KEY_ONLY,
        valid=AT_LEAST_0,
    )
    verify_micro_batch_interval: int = option(
        0,
        "Steps between checks in which each rank computes one micro-batch twice, forward and backward, and compares "
        "the results bit for bit; a difference ends the run with exit status 71 and names the rank and the module. "
        "0: no check.",
        flag=KEY_ONLY,
        valid=AT_LEAST_0,
    )
