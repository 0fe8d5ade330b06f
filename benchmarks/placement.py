"""Compare placements of the encoder, in the pipeline or colocated, with the same model and data on two processes.

    .venv/bin/python benchmarks/placement.py [--rounds 3] [--steps 2] [--only WORD] [--profile mine.json] [--dry]

Sides take turns in the same two processes, each with one thread. There are two figures per side: the step time by the
clock, and the processor time per step of the busier process. The latter is a lower bound on the step if no process ever
waits, and depends little on other work; bubbles and waiting show only in the clock. For a frozen encoder, `vision` is
the processor time of the encoder in the main thread, including the look-up in a cache.

The planner's gain for a hardware profile is printed beside each gain by the clock (`megavlm calibrate` with two
processes makes one for this machine), but for encoding ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import record

SHARED = (
    "--no-save --no-tensorboard --seed 7 --train-iters 1000 --global-batch-size 8 --seq-length 256 --set "
    "model.vision.num_layers=8 model.vision.hidden_size=256 model.vision.ffn_hidden_size=1024 "
    "model.vision.num_attention_heads=4 model.vision.patch_size=14 model.projector.pixel_shuffle=2 "
    "model.vision.activation=gelu_tanh model.language.num_layers=8 model.language.hidden_size=384 "
    "model.language.num_attention_heads=6 model.language.vocab_size=4096 model.language.ffn_hidden_size=1024 "
    "data.answer_share=0.5"
)
IMAGE = "--set model.vision.image_size=224 --images-per-sample 2"
# patch_embed, 8 vision layers, norm, projector; then embedding and half of the language layers stay on the first stage.
GLUED = "--pipeline-cuts 16"


@dataclass(frozen=True)
class Side:
    name: str
    flags: str


@dataclass(frozen=True)
class Question:
    """A comparison: how many times faster each of `sides` is than `baseline`."""

    name: str
    baseline: Side
    sides: tuple[Side, ...]
    model: str = IMAGE


def questions(cache: str) -> list[Question]:
    """Return all comparisons; `cache` is an empty folder."""
    # Passes of two images: as many patches as a micro-batch has in stages, so that caches hold as much of a pass.
    whole = "--placement colocated --set placement.encoder_keep_chunks=64 --encoder-chunk-patches"
    colocated = Side("colocated", f"{whole} 512")
    pipelines = Question(
        "PP2, trained encoder",
        Side("glued to the first stage", f"--pp 2 {GLUED}"),
        (Side("stages, cut evenly", "--pp 2"), Side(colocated.name, f"--pp 2 {colocated.flags}")),
        f"{IMAGE} --global-batch-size 16",
    )
    frozen = f"--pp 2 --global-batch-size 2 --freeze vision projector {colocated.flags}"
    still = Question(
        "PP2, frozen encoder, two micro-batches",
        Side("colocated", frozen),
        (
            Side("encoded ahead", f"{frozen} --encode-ahead"),
            Side("cache, later epochs", f"{frozen} --vision-cache {cache}"),  # the untimed step fills it
        ),
    )
    # Images of 8 × 8, 16 × 16 and 24 × 24 patches; as many patches in all, as far as they go.
    sizes = [
        Question(
            f"TP2, {count} images of {side} × {side} pixels per sample",
            Side("tensor-parallel", "--tp 2"),
            (Side(colocated.name, f"--tp 2 {colocated.flags}"),),
            f"--set model.vision.image_size={side} --images-per-sample {count}",
        )
        for side, count in ((112, 8), (224, 2), (336, 1))
    ]
    return [pipelines, *sizes, still]


@dataclass(frozen=True)
class Timing:
    clock: float  # seconds per step
    busiest: float  # the larger processor time of both processes, seconds per step
    loss: float
    vision: float  # seconds per step, of the busier process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a side in a round")
    parser.add_argument("--only", default="", help="run only comparisons whose name contains this")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    parser.add_argument("--profile", default="cpu", help="hardware profile of the planner's predictions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        measure(arguments, [q for q in questions(cache) if arguments.only in q.name])


def measure(arguments: argparse.Namespace, asked: Sequence[Question]) -> None:
    circumstances = record.circumstances()
    argvs = [
        [*SHARED.split(), *question.model.split(), *side.flags.split()]
        for question in asked
        for side in (question.baseline, *question.sides)
    ]
    rounds = run(argvs * arguments.rounds, steps=arguments.steps)
    timings = [rounds[place :: len(argvs)] for place in range(len(argvs))]
    results = []
    for question in asked:
        base, *others = (timings.pop(0) for _ in (question.baseline, *question.sides))
        share = vision_share([*SHARED.split(), *question.model.split()])
        print(f"\n{question.name}: {share:.0%} of the forward FLOPs are vision")
        shown(question.baseline.name, base)
        result = {"question": question.name, "vision_share": share, question.baseline.name: medians(base)}
        for side, timing in zip(question.sides, others, strict=True):
            assert abs(timing[0].loss / base[0].loss - 1) < 1e-5, "the sides compute different things"
            clock, busiest = (ratio(base, timing, name) for name in ("clock", "busiest"))
            gain = predicted_gain(question, side, profile=arguments.profile)
            foretold = f", planner {gain:.2f} ×" if gain else ""
            shown(side.name, timing, f"   {clock:.2f} × by the clock, {busiest:.2f} × by processor time{foretold}")
            result[side.name] = {**medians(timing), "gain_clock": clock, "gain_busiest": busiest, "gain_planner": gain}
        results.append(result)
    if not arguments.dry:
        rounds_and_steps = {"rounds": arguments.rounds, "steps": arguments.steps, "profile": arguments.profile}
        record.append("placement", {**circumstances, **rounds_and_steps, "results": results})


def predicted_gain(question: Question, side: Side, *, profile: str) -> float | None:
    """Return how many times faster than the baseline a side is by the planner; None for what it does not model."""
    from megavlm.arch.dims import dims_of
    from megavlm.command_line.parsing import parse
    from megavlm.planner.auto import predict
    from megavlm.planner.hardware import profile as hardware_of
    from megavlm.rules.defaults import resolve

    def seconds(flags: str) -> float:
        config = resolve(parse([*SHARED.split(), *question.model.split(), *flags.split()]))
        return predict(config, dims_of(config, world=2), hardware_of(profile)).seconds

    if "--vision-cache" in side.flags or "--encode-ahead" in side.flags:
        return None
    return seconds(question.baseline.flags) / seconds(side.flags)


def ratio(base: Sequence[Timing], other: Sequence[Timing], name: str) -> float:
    """Return the median over rounds of the ratio of neighbouring measurements."""
    return statistics.median(getattr(a, name) / getattr(b, name) for a, b in zip(base, other, strict=True))


def medians(timings: Sequence[Timing]) -> dict[str, float]:
    rows = [asdict(timing) for timing in timings]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def shown(name: str, timings: Sequence[Timing], gain: str = "") -> None:
    found = medians(timings)
    vision = f", vision {found['vision']:6.3f} s" if found["vision"] else ""
    print(f"  {name:26} {found['clock']:6.2f} s a step, busiest process {found['busiest']:6.2f} s{vision}{gain}")


def vision_share(argv: Sequence[str]) -> float:
    """Return the encoder's share of forward FLOPs."""
    from megavlm.arch.kinds import layer_cost
    from megavlm.arch.layers import encoder_names, layer_names
    from megavlm.arch.workload import typical_workload
    from megavlm.command_line.parsing import parse
    from megavlm.rules.defaults import resolve

    config = resolve(parse(list(argv)))
    work = typical_workload(config)
    flops = {name: layer_cost(name, config.model, work).forward_flops for name in layer_names(config.model)}
    return sum(flops[name] for name in encoder_names(config.model)) / sum(flops.values())


def run(argvs: Sequence[Sequence[str]], *, steps: int, world: int = 2) -> list[Timing]:
    """Time the steps of each configuration, one after the other, in `world` processes."""
    import torch.multiprocessing as mp

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    mp.start_processes(_work, (world, port, argvs, steps, answers), nprocs=world, start_method="spawn")
    return answers.get()


def _work(rank: int, world: int, port: int, argvs: Sequence[Sequence[str]], steps: int, answers: Any) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), **place}
    import torch

    from megavlm import backend

    torch.set_num_threads(1)
    chosen = backend.activate()
    timings = [_time(argv, chosen, steps=steps) for argv in argvs]
    if rank == 0:
        answers.put(timings)


def _time(argv: Sequence[str], chosen: Any, *, steps: int) -> Timing:
    import torch.distributed as dist

    from megavlm.command_line.parsing import parse
    from megavlm.parallel.groups import destroy_groups
    from megavlm.train.build import build
    from megavlm.train.loop import close

    destroy_groups()
    with contextlib.redirect_stdout(io.StringIO()):
        run = build(parse([*argv, "--run-dir", tempfile.gettempdir()]), chosen)
    engine = run.engine
    batches = run.data_loader.next_step().batches
    spent_on_vision = watched(engine)
    upcoming = batches if run.config.placement.encode_ahead else None
    first = engine.train_step(batches, upcoming=upcoming)  # allocates the optimizer's state
    spent_on_vision.clear()
    dist.barrier()
    began, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        engine.train_step(batches, upcoming=upcoming)
    processor = time.process_time() - processor
    dist.barrier()
    clock = time.perf_counter() - began
    spent: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(spent, (processor, sum(spent_on_vision)))
    close(run)
    busiest, vision = (max(values) / steps for values in zip(*spent, strict=True))
    return Timing(clock=clock / steps, busiest=busiest, loss=first.loss, vision=vision)


def watched(engine: Any) -> list[float]:
    """Return a list to which each pass of a colocated frozen encoder in this thread adds its processor time."""
    calls: list[float] = []
    colocated = engine.schedule.colocated
    if colocated is None or colocated.encoder.trained:
        return calls
    forward = colocated.encoder.forward

    def timed(*arguments: Any) -> Any:
        passes = forward(*arguments)
        advance = passes.advance  # each pass is computed when it is asked for

        def timed_pass() -> bool:
            began = time.thread_time()
            more: bool = advance()
            if threading.current_thread() is threading.main_thread():
                calls.append(time.thread_time() - began)
            return more

        passes.advance = timed_pass
        return passes

    colocated.encoder.forward = timed
    return calls


if __name__ == "__main__":
    main()
