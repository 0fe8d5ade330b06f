"""Run one side of `cpu_step.py` in a process of its own: build its model, then run a step on request.

It writes lines of JSON: one when it is ready, then one answer for each line of its standard input (`step`,
`interception` or `memory`). Both sides start from the weights that the Transformers side writes to `--weights`.
"""

from __future__ import annotations

import argparse
import cProfile
import inspect
import json
import pstats
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_model
import torch
from transformers_models import their_optimizer

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("megavlm", "transformers"))
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    side = {"megavlm": ours, "transformers": theirs}[arguments.side]
    step, parameters = side(arguments.layers, arguments.weights)
    say({"parameters": parameters, "before_mib": resident_peak()})
    answers: dict[str, Callable[[], Any]] = {
        "step": lambda: vars(step()),
        "interception": lambda: interception(step),
        "memory": resident_peak,
    }
    for line in sys.stdin:
        say(answers[line.strip()]())


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def ours(layers: int, weights: Path) -> tuple[Callable[[], cpu_model.Times], int]:
    from megavlm.backend import activate

    options = cpu_model.config(layers=layers, micro_batch=2, global_batch=2)
    engine = cpu_model.our_engine(options, activate())
    chunk = engine.chunks[0].module
    values = torch.load(weights, weights_only=True, mmap=True)
    params = dict(chunk.named_parameters())
    assert params.keys() == values.keys(), params.keys() ^ values.keys()
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(values[name])
    batch = cpu_model.micro_batch(options, seed=1)
    return cpu_model.our_step(engine, [batch]), sum(p.numel() for p in params.values())


def theirs(layers: int, weights: Path) -> tuple[Callable[[], cpu_model.Times], int]:
    options = cpu_model.config(layers=layers, micro_batch=2, global_batch=2)
    torch.manual_seed(1)
    model = cpu_model.their_model(options)
    cpu_model.save_as_ours(model, options, weights)
    batch = cpu_model.their_batch(cpu_model.micro_batch(options, seed=1), options)
    step = cpu_model.their_step(model, their_optimizer(model), batch)
    return step, sum(p.numel() for p in model.parameters())


def resident_peak() -> float:
    """Return the largest resident set of this process in MiB (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def interception(step: Callable[[], cpu_model.Times]) -> dict[str, float]:
    """Return what the CPU backend's proxies cost in a step: calls into backend/cpu.py × the time of the slowest kind.

    Every call from megatron-core that would not happen on a GPU enters a function of that file (a tensor factory,
    `Tensor.type`, a `torch.cuda` function), so the profiler sees and counts it. Names that the proxy merely passes
    through are attributes of a module-like object: looked up like those of the real `torch`.
    """
    from megatron.core.pipeline_parallel import schedules

    proxy: Any = schedules.torch  # what the backend gave megatron-core's modules in place of torch
    profiler = cProfile.Profile()
    profiler.runcall(step)
    source = inspect.getsourcefile(type(proxy))
    table: dict[tuple[str, int, str], tuple[Any, ...]] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    calls = sum(row[1] for (file, _, _), row in table.items() if file == source)

    sample = torch.zeros(1)
    prices = (
        _price(lambda: proxy.zeros(1, device="cuda")) - _price(lambda: torch.zeros(1, device="cpu")),
        _price(lambda: sample.type()),
        _price(lambda: proxy.cuda.synchronize()),
    )
    price = max(prices)
    return {"calls": calls, "microseconds_per_call": price * 1e6, "seconds": calls * price}


def _price(call: Callable[[], Any], *, repeats: int = 20_000) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


if __name__ == "__main__":
    main()
