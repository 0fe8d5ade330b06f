"""Rules about the order of a pipeline's passes (`--schedule`). `rules.py` defines what a rule is."""

from __future__ import annotations

from collections.abc import Callable

from megavlm.config.derived import shards_gradients
from megavlm.config.schema import Config


def schedule_has_stages(config: Config) -> str | None:
    schedule, pp = config.parallel.schedule, config.parallel.pipeline_model_parallel_size
    if schedule is None or pp > 1:
        return None
    return f"--schedule {schedule} orders the passes of pipeline stages, but there is one: use --pp 2, or leave it out"


def schedule_fits_chunks(config: Config) -> str | None:
    """Interleaving is for several chunks per stage; each of the other orders is for one."""
    schedule, vpp = config.parallel.schedule, config.parallel.virtual_pipeline_model_parallel_size
    if schedule == "interleaved" and vpp == 1:
        return "--schedule interleaved is for several chunks per stage: add --vpp 2, or leave it out"
    if schedule not in (None, "interleaved") and vpp > 1:
        return f"--schedule {schedule} has one chunk per stage, but there are --vpp {vpp}: use --vpp 1, or leave it out"
    return None


def split_backward_has_whole_gradients(config: Config) -> str | None:
    """ZeRO-2 and 3 reduce a layer's gradients as its backward pass ends, when those of its weights are not there."""
    if config.parallel.schedule != "zb-h1" or not shards_gradients(config):
        return None
    return (
        f"--schedule zb-h1 computes weight gradients later than --data-parallel-sharding "
        f"{config.parallel.data_parallel_sharding} reduces them: use --data-parallel-sharding optimizer, or another "
        "schedule"
    )


def split_backward_has_no_buffers(config: Config) -> str | None:
    """Transformer Engine computes no weight gradient later where its products overlap with communication."""
    if config.parallel.schedule != "zb-h1" or not config.parallel.tp_comm_overlap:
        return None
    return (
        "--schedule zb-h1 computes weight gradients later, which --tp-comm-overlap computes beside communication: "
        "leave --tp-comm-overlap out, or use another schedule"
    )


SCHEDULE_RULES: tuple[Callable[[Config], str | None], ...] = (
    schedule_has_stages,
    schedule_fits_chunks,
    split_backward_has_whole_gradients,
    split_backward_has_no_buffers,
)
