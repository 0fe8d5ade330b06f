"""Predict the gain of a colocated encoder over vision at the language model's TP, for GPUs.

    .venv/bin/python benchmarks/placement_paper.py [--micro-batches 32]

The planner simulates everything (`docs/planner.md` says what it leaves out); nothing is measured. The run has one
replica and one sample per micro-batch, in bf16, trains all parts and recomputes nothing, nor logits; memory is
ignored. The colocated encoder is compared with two pipelines: `glued` has the encoder and the first half of the
language layers on the first stage, `even` has the cut that balances FLOPs. Each column is how many times faster
colocated is than glued / than even.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megavlm.arch.dims import dims_of
from megavlm.arch.image_tokens import grid_of, tokens_per_grid
from megavlm.arch.layers import EMBEDDING, layer_names
from megavlm.config.schema import (
    Config,
    DataConfig,
    ExecutionConfig,
    ModelConfig,
    PlacementConfig,
    PrecisionConfig,
    TrainConfig,
)
from megavlm.families import published_model
from megavlm.planner.auto import predict
from megavlm.planner.hardware import PROFILES, Hardware

GPUS = ("h100", "h200", "b200")
IMAGES = ((4, 448), (2, 896), (2, 1344))  # of a sample: how many, and their side in pixels
TEXT = 1024  # tokens of a sample beside its images'


@dataclass(frozen=True)
class Layout:
    model: str
    tp: int
    pp: int


# The 7B has 28 heads, which 8 does not divide.
LAYOUTS = (Layout("qwen2_5_vl_7b", 4, 2), Layout("qwen3_vl_8b", 8, 2))


@dataclass(frozen=True)
class Gains:
    """How many times faster colocated is."""

    than_glued: float
    than_even: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=32)
    micro_batches = parser.parse_args().micro_batches
    for line in table(micro_batches):
        print(line)


def table(micro_batches: int) -> Iterator[str]:
    """Return a Markdown table."""
    yield f"| layout | images of a sample | tokens | {' | '.join(GPUS)} |"
    yield "|---" * (3 + len(GPUS)) + "|"
    for layout in LAYOUTS:
        for count, side in IMAGES:
            config = run_of(layout, count, side, micro_batches)
            cells = [gains(config, layout, PROFILES[gpu]) for gpu in GPUS]
            yield (
                " | ".join(
                    [
                        f"| {layout.model}, TP{layout.tp}·PP{layout.pp}",
                        f"{count} of {_whole(config.model, side)}²",
                        f"{config.train.seq_length:,}",
                        *(f"{each.than_glued:.2f} / {each.than_even:.2f}" for each in cells),
                    ]
                )
                + " |"
            )


def run_of(layout: Layout, count: int, side: int, micro_batches: int) -> Config:
    """Return a run in stages; the sequence holds exactly its images and its text."""
    sizes = published_model(layout.model)
    side = _whole(sizes, side)
    tokens = count * tokens_per_grid(grid_of(side, side, sizes.vision.patch_size), sizes.projector) + TEXT
    config = Config(
        model=sizes,
        precision=PrecisionConfig("bf16"),
        train=TrainConfig(seq_length=tokens, global_batch_size=micro_batches),
        execution=ExecutionConfig(loss_chunk_tokens=tokens),
        data=DataConfig(kind="synthetic", images_per_sample=(count,), image_sizes=(side,)),
    )
    degrees = replace(config.parallel, tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp)
    return replace(config, parallel=degrees)


def gains(config: Config, layout: Layout, hardware: Hardware) -> Gains:
    def seconds(placement: PlacementConfig) -> float:
        changed = replace(config, placement=placement)
        return predict(changed, dims_of(changed, world=layout.tp * layout.pp), hardware).seconds

    even = config.placement
    colocated = seconds(replace(even, encoder="colocated"))
    in_first = seconds(replace(even, pipeline_cuts=glued(config.model, layout.pp)))
    return Gains(in_first / colocated, seconds(even) / colocated)


def glued(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Return cuts that divide the language layers evenly and leave the encoder on the first stage."""
    first = layer_names(model).index(EMBEDDING) + 1
    return tuple(first + model.language.num_layers * stage // stages for stage in range(1, stages))


def _whole(model: ModelConfig, side: int) -> int:
    """Return the side length, rounded down to whole features."""
    multiple = model.vision.patch_size * model.projector.pixel_shuffle
    return side // multiple * multiple


if __name__ == "__main__":
    main()
