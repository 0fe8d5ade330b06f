"""Compare VLMs of published sizes on one GPU with Hugging Face Transformers: time, FLOP/s, memory.

    python benchmarks/gpu_vlm.py [--rounds 2] [--steps 5] [--their-compile] [--out FILE.json]
    python benchmarks/gpu_vlm.py --ablate --only LLaVA                          # megavlm, with and without options
    python benchmarks/gpu_vlm.py --micro-batches 4 --sides 'megavlm bf16,megavlm fp8'
    CUDA_VISIBLE_DEVICES= python benchmarks/gpu_vlm.py --device cpu --small     # the same code on small models

Steps follow one another as in a training loop: the device is waited for after the last.
Sides take turns, each in a process of its own that frees the device's memory after its turn, so that each can use all
of it. Figures are medians; ratios are medians over rounds. After each turn the result is written to `--out`, after each
model printed and, but for `--small`, appended to `benchmarks/records/gpu_vlm.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_model
from gpu_sides import Side, chosen
from gpu_table import GIB, good, rows_of, table
from gpu_workers import OUT_OF_MEMORY, Answer, Workers
from record import append, circumstances

Result = dict[str, Any]


def main() -> None:
    options = parsed()
    before = circumstances()
    deadline = time.monotonic() + 60 * options.minutes
    try:
        sides = chosen(
            precision=options.precision,
            ablate=options.ablate,
            their_compile=options.their_compile,
            names=options.sides,
        )
    except ValueError as error:
        raise SystemExit(f"gpu_vlm.py: --sides: {error}") from error
    finished: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(options.device, Path(folder))
        machine = workers.machine("megavlm")
        record = {**before, "machine": machine, "arguments": vars(options)}

        def written(results: Sequence[Result]) -> list[Any]:
            """Whoever ends the program at its next turn keeps this."""
            rows = [row for each in results for row in rows_of(each, machine["device"], judged=not options.small)]
            if options.out is not None:
                whole = {"rows": [asdict(row) for row in rows], **record, "results": results}
                Path(options.out).write_text(json.dumps(whole, indent=1))
            return rows

        for shapes in gpu_model.models(small=options.small):
            if options.only not in shapes[0].name:
                continue
            for result in measure(shapes, sides, workers, options=options, deadline=deadline):
                rows = written([*finished, result])
            finished.append(result)
            print(table(rows), flush=True)
            if not options.small:
                append("gpu_vlm", {**record, "results": [result]})
        workers.close()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="small models instead of the published sizes; record nothing"
    )
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), default="bf16", help="fp32: both sides, for comparison"
    )
    parser.add_argument("--ablate", action="store_true", help="measure megavlm alone, once for each set of options")
    parser.add_argument("--their-compile", action="store_true", help="measure Transformers under torch.compile as well")
    parser.add_argument(
        "--sides", metavar="NAME,…", help="measure only these sides, named as in the table; default: all"
    )
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a step; default: 1")
    parser.add_argument(
        "--trace", metavar="FOLDER", help="also trace two steps of each side; write the traces to this folder"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a side in a round")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--layers", type=int, help="language layers; default: as many as fit")
    parser.add_argument(
        "--memory-share", type=float, default=0.75, help="share of the GPU's memory that megavlm's step may take"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="no turn begins after this time")
    parser.add_argument("--only", default="", help="measure only models whose name contains this")
    parser.add_argument("--out", metavar="FILE.json", help="also write rows and figures to this file")
    return parser.parse_args()


def measure(
    shapes: Sequence[gpu_model.Shape],
    sides: Sequence[Side],
    workers: Workers,
    *,
    options: argparse.Namespace,
    deadline: float,
) -> Iterator[Result]:
    """What is known of a model after each turn: all sides, round after round, with as many layers as fit.

    Where a side runs out of memory, all begin again with fewer layers; not in an ablation, whose sides differ in that.
    """
    memory = options.memory_share * workers.machine("megavlm")["memory"]
    shape = shapes[0].with_layers(options.layers or shapes[0].num_layers)
    if not options.small and options.layers is None:
        found = gpu_model.fitting(shapes, memory=memory)
        if found is None:
            yield {"shape": shapes[0].name, "error": f"one language layer needs more than {memory / GIB:.0f} GiB"}
            return
        shape = found
    of = shapes[0].num_layers
    while True:
        print(f"{shape.name} with {shape.num_layers} of {of} language layers", flush=True)
        answers: dict[str, list[Answer]] = {side.name: [] for side in sides}
        result = {"of": of, **described(shape, sides, options=options), "answers": answers}
        again = shape.num_layers > 1 and options.layers is None and not options.ablate
        for side in turns(sides, rounds=options.rounds):
            answers[side.name].append(turn(side, shape, workers, options=options, deadline=deadline))
            yield result
            if again and answers[side.name][-1].get("error") == OUT_OF_MEMORY:
                break
        else:
            return
        shape = shape.with_layers(max(1, shape.num_layers * 4 // 5))


def turns(sides: Sequence[Side], *, rounds: int) -> Iterator[Side]:
    """Each side once a round."""
    for _ in range(rounds):
        yield from sides


def described(shape: gpu_model.Shape, sides: Sequence[Side], *, options: argparse.Namespace) -> Result:
    """What a model's figures are counted from."""
    ours = [side for side in sides if side.program == "megavlm"]
    return {
        "shape": shape.name,
        "layers": shape.num_layers,
        "tokens": shape.seq_length,
        "patches": gpu_model.workload(shape).patches,
        "micro_batches": options.micro_batches,
        "step_flops": options.micro_batches * gpu_model.whole_flops(shape),
        "language_flops": gpu_model.language_flops(shape),
        "predicted_bytes": {side.name: predicted(side, shape, on_gpu=options.device == "cuda") for side in ours},
        "ablation": [side.name for side in ours] if options.ablate else [],
    }


def predicted(side: Side, shape: gpu_model.Shape, *, on_gpu: bool) -> float:
    """Bytes of tensors at a step's peak, by the planner's count."""
    memory = gpu_model.predicted_memory(shape, precision=side.precision, flags=side.flags, on_gpu=on_gpu)
    return memory.total - memory.communicators


def turn(
    side: Side, shape: gpu_model.Shape, workers: Workers, *, options: argparse.Namespace, deadline: float
) -> Answer:
    """One side, once, if there is time."""
    # Weights of published sizes take minutes to write and read; files have a tokenizer of their own; and theirs, which
    # are read, may not be among the chosen sides.
    shares = options.small and not (options.ablate or options.sides or side.files or side.compiled)
    task = {
        **side.task,
        "shape": shape.name,
        "small": options.small,
        "layers": shape.num_layers,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "micro_batches": options.micro_batches,
        "trace": options.trace and str(Path(options.trace).resolve()),
        "weights": str(workers.folder) if shares else None,
    }
    in_time = time.monotonic() < deadline
    answer = workers.ask(side.program, task) if in_time else {"error": f"--minutes {options.minutes} were over"}
    print(f"  {side.name:32} {_brief(answer)}", flush=True)
    return answer


def _brief(answer: Mapping[str, Any]) -> str:
    if not good([dict(answer)]):
        return str(answer["error"])
    step, language = (statistics.median(answer[f"{part}_seconds"]) for part in ("step", "language"))
    memory = answer["peak_bytes"] / GIB
    loss = f"loss {answer['losses'][0]:.5f} … {answer['losses'][-1]:.5f}"
    return f"{step:8.4f} s a step, language {language:8.4f} s, {memory:6.2f} GiB, {loss}"


if __name__ == "__main__":
    main()
