"""VLMs of published sizes on one GPU, here and in Hugging Face Transformers: time, FLOP/s, memory.

    python benchmarks/gpu_vlm.py [--rounds 2] [--steps 5] [--out FILE.json]
    CUDA_VISIBLE_DEVICES= python benchmarks/gpu_vlm.py --device cpu --small     # the same code on toys

Sides take turns, each in a process of its own that keeps nothing on the device between its turns, so that each has all
of its memory. Figures are medians; ratios are medians over rounds. The result is printed and, but for `--small`,
appended to `benchmarks/records/gpu_vlm.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_model
from record import append, circumstances

from megavlm.planner.peaks import peak_tflops

HERE = Path(__file__).parent
GIB = 2**30
Answer = dict[str, Any]


@dataclass(frozen=True)
class Side:
    program: str  # "megavlm" or "transformers"
    precision: str

    @property
    def name(self) -> str:
        return f"{self.program} {self.precision}"


OURS, OURS_FP8 = Side("megavlm", "bf16"), Side("megavlm", "fp8")
AUTOCAST, PURE = Side("transformers", "autocast"), Side("transformers", "bf16")
# What takes most memory goes first: where it does not fit, that is known at once.
SIDES = (AUTOCAST, OURS, PURE, OURS_FP8)
SINGLE = (Side("transformers", "fp32"), Side("megavlm", "fp32"))


@dataclass(frozen=True)
class Row:
    """A line of the table that comes last. `met` is None where there is no target, or it is not judged here."""

    what: str
    figure: str
    target: str = ""
    met: bool | None = None


def main() -> None:
    options = parsed()
    before = circumstances()
    deadline = time.monotonic() + 60 * options.minutes
    sides = SINGLE if options.precision == "fp32" else SIDES
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(options.device, Path(folder))
        machine = workers.machine("megavlm")
        results = []
        for shape in gpu_model.shapes(small=options.small):
            if options.only not in shape.name:
                continue
            results.append(measure(shape, sides, workers, options=options, deadline=deadline))
            rows = [row for result in results for row in rows_of(result, machine["device"], judged=not options.small)]
            record = {**before, "machine": machine, "arguments": vars(options), "results": results}
            if options.out is not None:  # after each model: whoever ends the next one keeps this
                Path(options.out).write_text(json.dumps({"rows": [asdict(row) for row in rows], **record}, indent=1))
        workers.close()
    print(table(rows))
    if not options.small:
        append("gpu_vlm", record)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="toys instead of the published sizes; nothing recorded")
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), default="bf16", help="fp32: both sides, for comparison"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a side in a round")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--layers", type=int, help="language layers; default: as many as fit")
    parser.add_argument("--memory-share", type=float, default=0.75, help="of the GPU's memory that our step may take")
    parser.add_argument("--minutes", type=float, default=20.0, help="no side's turn begins after this")
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--out", metavar="FILE.json", help="write rows and figures there, too")
    return parser.parse_args()


class Workers:
    """A process for each program, started when first asked for, and again where one kept memory or died."""

    def __init__(self, device: str, folder: Path) -> None:
        self.folder = folder
        self._device = device
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._machines: dict[str, Any] = {}

    def machine(self, program: str) -> dict[str, Any]:
        self._process(program)
        found: dict[str, Any] = self._machines[program]
        return found

    def ask(self, program: str, task: Mapping[str, Any]) -> Answer:
        """What a program measures; `error` says why it could not."""
        answer, process = self.folder / "answer.json", self._process(program)
        answer.unlink(missing_ok=True)
        assert process.stdin is not None
        process.stdin.write(json.dumps({**task, "answer": str(answer)}) + "\n")
        process.stdin.flush()
        if _said(process) is None or not answer.exists():
            del self._processes[program]
            return {"error": f"ended with status {process.wait()}"}
        found: Answer = json.loads(answer.read_text())
        if found.get("left_bytes", 0) > GIB:
            self._end(self._processes.pop(program))
        return found

    def close(self) -> None:
        while self._processes:
            self._end(self._processes.popitem()[1])

    def _process(self, program: str) -> subprocess.Popen[str]:
        if program not in self._processes:
            command = [sys.executable, "-W", "ignore", str(HERE / "gpu_worker.py"), program, self._device]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
            )
            self._processes[program], self._machines[program] = process, _said(process)
            if self._machines[program] is None:
                raise SystemExit(f"{program} does not start: status {process.wait()}")
        return self._processes[program]

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def environment() -> dict[str, str]:
    """For workers: this repository first, no network, no noise."""
    paths = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    # Blocks that grow: a step's largest tensors come and go, and would tear holes into fixed ones.
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {**os.environ, **quiet, **allocator, "PYTHONPATH": os.pathsep.join(paths)}


def _said(process: subprocess.Popen[str]) -> Any:
    """The next line of JSON, whatever libraries print between; None where the process ends first."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            return json.loads(line)
        except ValueError:
            sys.stderr.write(line)
    return None


def measure(
    shape: gpu_model.Shape, sides: Sequence[Side], workers: Workers, *, options: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """All sides in turn, round after round, with as many layers as fit; fewer where a side runs out of memory."""
    layers = options.layers or shape.model.language.num_layers
    if not options.small and options.layers is None:
        memory = options.memory_share * workers.machine("megavlm")["memory"]
        layers = gpu_model.layers_that_fit(shape, memory=memory)
    while True:
        answers: dict[str, list[Answer]] = {side.name: [] for side in sides}
        print(f"{shape.name} with {layers} of {shape.model.language.num_layers} language layers", flush=True)
        for _ in range(options.rounds):
            run_round(shape.with_layers(layers), sides, workers, answers, options=options, deadline=deadline)
            if out_of_memory(answers) and layers > 1 and options.layers is None:
                break
        if not (out_of_memory(answers) and layers > 1 and options.layers is None):
            break
        layers = max(1, layers * 4 // 5)
    cut = shape.with_layers(layers)
    return {
        "shape": shape.name,
        "layers": layers,
        "of": shape.model.language.num_layers,
        "tokens": shape.seq_length,
        "patches": gpu_model.workload(shape).patches,
        "step_flops": gpu_model.whole_flops(cut),
        "language_flops": gpu_model.language_flops(cut),
        "predicted_bytes": {
            side.name: gpu_model.predicted_memory(cut, precision=side.precision, on_gpu=options.device == "cuda").total
            for side in sides
            if side.program == "megavlm"
        },
        "answers": answers,
    }


def run_round(
    shape: gpu_model.Shape,
    sides: Sequence[Side],
    workers: Workers,
    answers: dict[str, list[Answer]],
    *,
    options: argparse.Namespace,
    deadline: float,
) -> None:
    """Each side once, as long as all fit and there is time."""
    weights = workers.folder if options.small else None  # of published sizes they take minutes to write and read
    for side in sides:
        task = {
            "shape": shape.name,
            "small": options.small,
            "layers": shape.model.language.num_layers,
            "precision": side.precision,
            "steps": options.steps,
            "warm_up": options.warm_up,
            "weights": None if weights is None else str(weights),
        }
        in_time = time.monotonic() < deadline
        answer = workers.ask(side.program, task) if in_time else {"error": f"--minutes {options.minutes} were over"}
        answers[side.name].append(answer)
        print(f"  {side.name:24} {_brief(answer)}", flush=True)
        if answer.get("error") == "out of memory":
            return


def out_of_memory(answers: Mapping[str, Sequence[Answer]]) -> bool:
    return any(answer.get("error") == "out of memory" for each in answers.values() for answer in each)


def _brief(answer: Answer) -> str:
    if "error" in answer:
        return answer["error"]
    step, language = (statistics.median(answer[f"{part}_seconds"]) for part in ("step", "language"))
    memory = answer["peak_bytes"] / GIB
    loss = f"loss {answer['losses'][0]:.5f} … {answer['losses'][-1]:.5f}"
    return f"{step:8.4f} s a step, language {language:8.4f} s, {memory:6.2f} GiB, {loss}, {answer['attention']}"


def median(answers: Sequence[Answer], part: str) -> float | None:
    """Over all rounds."""
    found = [value for answer in answers if "error" not in answer for value in answer[part]]
    return statistics.median(found) if found else None


def ratio(theirs: Sequence[Answer], ours: Sequence[Answer]) -> float | None:
    """How many times as fast ours is: the median over rounds of neighbouring medians."""
    pairs = [(a, b) for a, b in zip(theirs, ours, strict=False) if "error" not in a and "error" not in b]
    if not pairs:
        return None
    return statistics.median(
        statistics.median(a["step_seconds"]) / statistics.median(b["step_seconds"]) for a, b in pairs
    )


def rows_of(result: Mapping[str, Any], device: str, *, judged: bool) -> list[Row]:
    """The table's lines of one model; targets where the sizes are the published ones."""
    answers, name = result["answers"], result["shape"]
    rows = [Row(f"{name}: language layers", f"{result['layers']} of {result['of']}")]

    def add(what: str, value: float | None, form: str, target: str = "", met: bool | None = None) -> None:
        figure = "not measured" if value is None else form.format(value)
        shown = judged and bool(target)
        rows.append(
            Row(f"{name}: {what}", figure, target if shown else "", met if shown and value is not None else None)
        )

    for side in (side for side in (OURS, OURS_FP8, SINGLE[1]) if side.name in answers):
        own = answers[side.name]
        least_tflops, least_ratio = (700, 2.0) if side is OURS_FP8 else (500, 1.5)
        step, language = (median(own, f"{part}_seconds") for part in ("step", "language"))
        if step is None or language is None:
            rows.append(Row(f"{name}: {side.name}", f"not measured: {own[0]['error'] if own else 'no round'}"))
            continue
        rate = result["language_flops"] / language / 1e12
        whole = result["step_flops"] / step / 1e12
        peak = peak_tflops(device, side.precision)
        add(f"{side.name}, step", step, "{:.4f} s")
        add(f"{side.name}, language part", rate, "{:.3g} TFLOP/s", f"≥ {least_tflops}", rate >= least_tflops)
        add(f"{side.name}, whole step", whole, "{:.3g} TFLOP/s")
        add(f"{side.name}, MFU of the whole step", None if peak is None else whole / peak, "{:.1%}")
        against = {AUTOCAST.name: f"≥ {least_ratio}", PURE.name: "", SINGLE[0].name: ""}
        for other, target in ((other, target) for other, target in against.items() if other in answers):
            faster = ratio(answers[other], own)
            add(f"{side.name}, times as fast as {other}", faster, "{:.2f} ×", target, (faster or 0) >= least_ratio)
        peaks = [answer["peak_bytes"] for answer in own if "error" not in answer]
        add(f"{side.name}, peak memory", max(peaks) / GIB, "{:.2f} GiB")
        for other in (other for other in against if other in answers):
            theirs = [answer["peak_bytes"] for answer in answers[other] if "error" not in answer]
            share = max(peaks) / max(theirs) if theirs else None
            target = "< 1" if other == AUTOCAST.name else ""
            add(f"{side.name}, peak memory over that of {other}", share, "{:.2f}", target, (share or 9) < 1)
        off = result["predicted_bytes"][side.name] / max(peaks) - 1
        add(f"{side.name}, predicted peak memory", off, "{:+.1%}", "within 10 %", abs(off) <= 0.1)
    return rows


def table(rows: Sequence[Row]) -> str:
    """For people."""
    widths = [max(len(getattr(row, part)) for row in rows) for part in ("what", "figure", "target")]
    signs = {None: "", True: "met", False: "missed"}
    return "\n".join(
        f"{row.what:<{widths[0]}}  {row.figure:>{widths[1]}}  {row.target:<{widths[2]}}  {signs[row.met]}".rstrip()
        for row in rows
    )


if __name__ == "__main__":
    main()
