"""Train a checked configuration in this process, or print the plan and estimates (`--dry-run`). No torch at import."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

from megavlm.arch.dims import dims_of
from megavlm.arch.plan import make_plan, start_line, table
from megavlm.checkpoint.begun import as_begun
from megavlm.checkpoint.folders import newest
from megavlm.config.derived import device_queues, replica_size
from megavlm.config.messages import several
from megavlm.config.schema import Config
from megavlm.planner.auto import complaint, device_of, explain, predict, starting_line, verdict
from megavlm.planner.hardware import profile
from megavlm.planner.host_memory import host_line
from megavlm.planner.memory import table as memory_table
from megavlm.resilience.signals import StopRequest
from megavlm.rules.check import check
from megavlm.rules.defaults import resolve, start_table


def start(config: Config, stop: StopRequest, *, began: float) -> None:
    """Build the run of a configuration and train it to its end, or to a request to stop. Raises as `loop.fit` does.

    `began` is when the process began, in seconds since 1970.
    """
    from megavlm import backend

    chosen = backend.activate(queues=device_queues(config))  # before anything imports megatron-core

    from megavlm.train.build import build
    from megavlm.train.loop import fit

    run = build(config, chosen, began=began)
    gc.collect()
    gc.freeze()  # full collections leave out what stays: on an H100 steps took up to 6 % less time
    fit(run, stop, explain=explain)


def dry_run(config: Config, *, world: int) -> None:
    """Print plan and memory estimate for at least as many processes as the layout needs. Raises UserError."""
    from megavlm.train.build_source import vocab_size_of

    world = max(world, replica_size(config))
    check(config, world=world)
    requested, given = config, as_begun(config)
    config = resolve(given, vocab_size=vocab_size_of(given))
    dims = dims_of(config, world=world)
    continued = newest(Path(config.run.run_dir) / "checkpoints")
    print(start_line(config, continued=continued))
    print(table(make_plan(config, dims), config))
    print(start_table(given, asked=requested))
    name = device_of(config)
    hardware = profile(name)
    step = predict(config, dims, hardware)
    print(memory_table(step.memory))
    if step.host:
        print(host_line(step.host, dims.world, hardware))
    if config.data.datasets:
        from megavlm.data.file_source import FilesSource
        from megavlm.data.survey import data_table, loading_line, with_counted_length

        source = FilesSource(config)
        config = with_counted_length(config, source)
        print(data_table(config, source))
        if line := loading_line(config, source, replicas=dims.dp, step=step.seconds):
            print(line)
        for warning in source.warnings():
            print(f"warning: {warning}")
    if config.evaluation.sample_interval:
        from megavlm.data.survey import samples_line

        print(samples_line(config))
    print(starting_line(config, dims, hardware, step.seconds, name=name, resumes=continued is not None))
    if (iterations := config.train.train_iters) is not None:
        minutes, steps = round(step.seconds * iterations / 60), several(iterations, "iteration")
        took = f"{steps} of {step.seconds:.3g} s on {name}, as the planner estimates them (--hardware)"
        print(f"about {minutes // 60} h {minutes % 60:02} min: {took}")
    if line := verdict(config, dims, hardware, step.peak, name=name):
        print(line)


def memory_complaint(config: Config, *, world: int, devices_per_node: int, gpu: str) -> str | None:
    """Return a line if the planner estimates that a rank needs more memory than a GPU of this name has, else None."""
    from megavlm.train.build_source import vocab_size_of

    hardware = replace(profile(gpu), devices_per_node=devices_per_node)
    config = resolve(config, vocab_size=vocab_size_of(config))
    return complaint(config, dims_of(config, world=world), hardware, name=gpu)
