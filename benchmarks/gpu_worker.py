"""Run one side of `gpu_vlm.py` in a process of its own: build a model, run steps, free it, for each task.

A task is a line of JSON on standard input; the result is written to the file that the task names. If a side runs out of
memory or fails, its result says so, and the others are measured all the same.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_model
import torch
from gpu_side import Side, Watch, attention_of, is_out_of_memory
from gpu_trace import traced

OUT_OF_MEMORY = "out of memory"


def main() -> None:
    side = _side(sys.argv[1])(sys.argv[2])
    print(json.dumps(side.machine()), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        Path(task["answer"]).write_text(json.dumps(answer_of(side, task)))
        print(json.dumps("done"), flush=True)


def _side(program: str) -> type[Side]:
    """Return the benchmark side that runs `program`; only that program's packages are imported."""
    if program == "megavlm":
        from gpu_megavlm import Ours

        return Ours
    from gpu_transformers import Theirs

    return Theirs


def answer_of(side: Side, task: dict[str, Any]) -> dict[str, Any]:
    """Return the measurement or the error; free the model in any case."""
    try:
        answer = run(side, task)
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        answer = {"error": OUT_OF_MEMORY if is_out_of_memory(error) else said}
    try:
        side.release()
        gc.collect()
        if side.on_gpu:
            torch.cuda.empty_cache()
            answer["left_bytes"] = torch.cuda.memory_allocated()
    except Exception as error:  # a device that refuses everything after a failure
        answer["release_error"] = str(error)[:300]
    return answer


def run(side: Side, task: dict[str, Any]) -> dict[str, Any]:
    """Build the model, warm up, and return the measurement."""
    shape = gpu_model.shape_named(task["shape"], layers=task["layers"], small=task["small"])
    began = time.perf_counter()
    watch = Watch(side.on_gpu)
    step = side.build(shape, task, watch)
    settle: Callable[[], None] = torch.cuda.synchronize if side.on_gpu else lambda: None
    losses = [step() for _ in range(task["warm_up"])]
    settle()
    built = time.perf_counter() - began
    if side.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    side.tally.clear()
    # As a training loop runs: the host begins a step while the device still updates weights.
    start = time.perf_counter()
    losses += [step() for _ in range(task["steps"])]
    settle()
    seconds = [(time.perf_counter() - start) / task["steps"]] * task["steps"]
    tokens, positions, waited = side.tally.tokens, side.tally.positions, [*side.tally.waited]
    watch.seconds.clear()
    for _ in range(task["steps"]):
        step()
        settle()
        watch.note()
    return {
        "step_seconds": seconds,
        "language_seconds": watch.seconds,
        "data_seconds": waited,
        "tokens": tokens,
        "positions": positions,
        "losses": [float(loss) for loss in losses],
        "peak_bytes": side.peak_bytes(step),
        "parameters": side.parameters(),
        "layers": side.attention,
        "attention": attention_of(step, on_gpu=side.on_gpu),
        "build_seconds": built,
        **({"trace": traced(step, settle, _trace_file(task), on_gpu=side.on_gpu)} if task["trace"] else {}),
    }


def _trace_file(task: dict[str, Any]) -> Path:
    words = ("trace", task["program"], task["precision"], task["flags"], "files" * task["files"])
    return Path(task["trace"]) / ("-".join(filter(None, words)).replace(" ", "") + ".json.gz")


if __name__ == "__main__":
    main()
