"""What a run would do, printed without a device: plan, memory, data and duration (`--dry-run`). No torch at import."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megavlm.arch.dims import dims_of
from megavlm.arch.plan import make_plan, start_line, table
from megavlm.checkpoint.begun import as_begun
from megavlm.checkpoint.folders import newest
from megavlm.config.derived import replica_size
from megavlm.config.messages import several
from megavlm.config.schema import Config
from megavlm.planner.auto import complaint, device_of, predict, verdict
from megavlm.planner.hardware import profile
from megavlm.planner.host_memory import host_line
from megavlm.planner.memory import table as memory_table
from megavlm.rules.check import check
from megavlm.rules.defaults import resolve, start_table
from megavlm.train.build_source import vocab_size_of


def dry_run(config: Config, *, world: int) -> None:
    """Print plan and memory estimate for at least as many processes as the layout needs. Raises UserError."""
    world = max(config.run.world_size or 1 if world == 1 else world, replica_size(config))
    check(config, world=world)
    requested, given = config, as_begun(config)
    config = resolve(given, vocab_size=vocab_size_of(given))
    dims = dims_of(config, world=world)
    continued = newest(Path(config.run.run_dir) / "checkpoints")
    print(start_line(config, continued=continued))
    print(table(make_plan(config, dims), config))
    print(start_table(given, asked=requested))
    name = device_of(config, on_gpu=config.precision.dtype != "fp32")
    hardware = profile(name)
    step = predict(config, dims, hardware)
    print(memory_table(step.memory))
    if step.host:
        print(host_line(step.host, dims.world, hardware))
    if config.data.datasets:
        from megavlm.data.file_source import FilesSource
        from megavlm.data.survey import data_table, with_counted_length

        source = FilesSource(config)
        config = with_counted_length(config, source)
        print(data_table(config, source))
        for warning in source.warnings():
            print(f"warning: {warning}")
    if config.evaluation.sample_interval:
        from megavlm.data.survey import samples_line

        print(samples_line(config))
    if (iterations := config.train.train_iters) is not None:
        minutes, steps = round(step.seconds * iterations / 60), several(iterations, "iteration")
        took = f"{steps} of {step.seconds:.3g} s on {name}, as the planner estimates them (--hardware)"
        print(f"about {minutes // 60} h {minutes % 60:02} min: {took}")
    if line := verdict(config, dims, hardware, step.peak, name=name):
        print(line)


def memory_complaint(config: Config, *, world: int, devices_per_node: int, gpu: str) -> str | None:
    """Return a line if the planner estimates that a rank needs more memory than a GPU of this name has, else None."""
    hardware = replace(profile(gpu), devices_per_node=devices_per_node)
    config = resolve(config, vocab_size=vocab_size_of(config))
    return complaint(config, dims_of(config, world=world), hardware, name=gpu)
