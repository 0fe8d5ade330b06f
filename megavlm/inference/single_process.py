"""Build a model on a single process, without parallelism and optimizer, for conversions and comparisons."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from megavlm.arch.dims import Dims
from megavlm.arch.plan import make_plan
from megavlm.backend import Backend
from megavlm.config.schema import Config
from megavlm.model.vlm import VLMChunk
from megavlm.parallel.groups import Groups, build_groups, destroy_groups
from megavlm.parallel.rendezvous import Meeting, start
from megavlm.pipeline.schedule import pipeline_config

ONE = Dims()


def single_process_groups(backend: Backend) -> Groups:
    """Return process groups of this process alone, also under torchrun; existing groups are destroyed first."""
    destroy_groups()
    start(backend, timeout_minutes=10, meeting=Meeting(dist.HashStore(), rank=0, world=1))
    return build_groups(ONE, tied_owners=(0, 0), seed=0, timeout_minutes=10)


def full_model(config: Config, groups: Groups, backend: Backend) -> VLMChunk:
    """Return the model as one chunk with uninitialised weights (on a CPU, memory is used only once they are set)."""
    config = replace(
        config,
        parallel=replace(config.parallel, vision_tensor_model_parallel_size=1),
        placement=replace(config.placement, encoder="stages"),
    )
    return VLMChunk(
        config,
        make_plan(config, ONE),
        0,
        vocab_size=config.model.language.vocab_size,
        groups=groups,
        pipeline=pipeline_config(config, ONE),
    )
