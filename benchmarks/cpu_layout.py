"""Time steps of one layout of `cpu_step.py`; rank 0 prints one line of JSON. torchrun starts this program."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import cpu_model
import torch
import torch.distributed as dist

from megavlm.backend import activate
from megavlm.config.schema import ParallelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--pp", type=int, required=True)
    parser.add_argument("--vpp", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True, help="micro-batches of one sample, over all ranks")
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    options = cpu_model.config(
        layers=arguments.layers,
        micro_batch=1,
        global_batch=arguments.micro_batches,
        parallel=ParallelConfig(
            tensor_model_parallel_size=arguments.tp,
            pipeline_model_parallel_size=arguments.pp,
            virtual_pipeline_model_parallel_size=arguments.vpp,
        ),
    )
    engine = cpu_model.our_engine(options, activate())
    share = arguments.micro_batches // engine.groups.dims.dp
    first = engine.groups.coords.dp * share
    batches = [cpu_model.micro_batch(options, seed=first + index) for index in range(share)]
    step = cpu_model.our_step(engine, batches)
    step()  # allocates the optimizer's state
    times = []
    for _ in range(arguments.steps):
        dist.barrier()
        times.append(asdict(step()))
    ranks: list[list[dict[str, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, times)
    if dist.get_rank() == 0:
        print(json.dumps(ranks), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
