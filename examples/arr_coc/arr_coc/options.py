"""The options of `arr_coc`, keys of `model.projector.connectors.arr_coc` in files and of --set."""

from __future__ import annotations

from dataclasses import dataclass

from megavlm.extension import AT_LEAST_1, option


@dataclass(frozen=True)
class ArrCoc:
    """An allocator of image tokens."""

    budget: int = option(2304, "Number of tokens of an image.", valid=AT_LEAST_1)
    fewest: int = option(64, "Fewest tokens of a region.", valid=AT_LEAST_1)
    most: int = option(400, "Most tokens of a region.", valid=AT_LEAST_1)
    regions: int = option(
        3, "Number of rows, and of columns, of regions that an image is divided into.", valid=AT_LEAST_1
    )
    scorer_size: int = option(128, "Inner width of the scorers.", valid=AT_LEAST_1)
    queries: int = option(16, "Number of learned questions that patches are scored by.", valid=AT_LEAST_1)
    hidden_size: int = option(1024, "Inner width of the MLP behind the pooling.", valid=AT_LEAST_1)
