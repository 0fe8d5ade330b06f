"""Predict the time of a step of `gpu_vlm.py` on a GPU: megavlm's before and now, and Transformers'.

    python benchmarks/predict_gpu.py [--write]          # --write: into docs/design/performance-model.md, too

The predictions are those of `explain.py` for the shapes of `gpu_model.py`. Transformers' passes and
launches come from the last record of `host_time.py`. Only the rate of square products was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_model
from explain import POSSIBLE, Explained, StepPart, explained, played
from tables import with_table

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import is_transformer, model_parameters
from megavlm.arch.layers import LANGUAGE_LAYER, VISION_LAYER, kind_of, number_of
from megavlm.arch.scenario import Scenario, scenario_of
from megavlm.arch.workload import attends_in_windows
from megavlm.planner.hardware import Hardware, profile
from megavlm.planner.terms import NOW, TE_HOST, HostTime, MemoryPasses, work_terms

DOCUMENT = Path(__file__).parents[1] / "docs" / "design" / "performance-model.md"
RECORDS = Path(__file__).parent / "records" / "host_time.jsonl"
GPUS = {"h100": 79.2, "h200": 139.8}  # GiB that CUDA reports, of which `gpu_vlm.py` plans for 75 %
SHARE = 0.75
OURS = TE_HOST
THEIRS = HostTime(layer=(100e-6, 0.0), attention_call=15e-6, waits=True)  # seven modules; one SDPA call a window
# Bytes per trained parameter: gradient's norm 4, clipping 8, AdamW 28; weights, gradients are cast inside the layers.
THEIR_UPDATE = 40
TERMS = {
    "products": ("products",),
    "attention": ("attention", "empty tiles of windows"),
    "norms, residuals": ("norms", "residuals"),
    "rotation, QKV, biases": ("rotation", "QKV split", "copies of queries", "copies of values", "biases"),
    "activation": ("activation",),
    "casts to FP8": ("casts to FP8",),
    "weight gradients": ("weight gradients",),
    "cross entropy": ("cross entropy",),
    "other passes": ("passes", "other"),
}


@dataclass(frozen=True)
class Predicted:
    """The predicted step of each program, for one shape on one GPU."""

    shape: gpu_model.Shape
    gpu: str
    steps: dict[str, Explained]

    def language_tflops(self, program: str) -> float:
        return float(gpu_model.language_flops(self.shape) / self.steps[program].language / 1e12)

    def ratio(self, program: str) -> float:
        return self.steps["Transformers"].seconds / self.steps[program].seconds


def predictions() -> list[Predicted]:
    """Return the predictions of each model whose launches are counted for each GPU, with as many layers as fit."""
    found, counted = [], counts()["transformers"]["counted"]
    for of_model in (each for each in gpu_model.models(small=False) if each[0].name in counted):
        for gpu in GPUS:
            shape = gpu_model.fitting(of_model, memory=SHARE * GPUS[gpu] * 2**30)
            assert shape is not None, f"{of_model[0].name} does not fit {gpu}"
            found.append(predicted(shape, gpu))
    return found


def predicted(shape: gpu_model.Shape, gpu: str) -> Predicted:
    hardware = profile(gpu)
    programs: dict[str, MemoryPasses] = {"now": NOW, "possible": POSSIBLE}
    steps: dict[str, Explained] = {}
    fp8: dict[str, Explained] = {}
    for name, passes in programs.items():
        for found, key, precision in ((steps, name, "bf16"), (fp8, f"{name}, FP8", "fp8")):
            found[key] = explained(case(shape, precision), hardware, passes, OURS)
    return Predicted(shape, gpu, {**steps, **fp8, "Transformers": transformers(shape, hardware)})


def case(shape: gpu_model.Shape, precision: str = "bf16", *, whole: bool = False) -> Scenario:
    """Return the scenario of a shape; `whole`: logits are computed of all tokens, and stay in memory."""
    config = gpu_model.run_config(shape, precision=precision)
    found = replace(scenario_of(config, Dims(), on_gpu=True), work=gpu_model.workload(shape))
    everything = replace(found.work, trained_tokens=found.work.tokens)
    return replace(found, work=everything, loss_chunk=everything.tokens) if whole else found


def transformers(shape: gpu_model.Shape, hardware: Hardware) -> Explained:
    """Return Transformers' step, made of its counted passes and launches and megavlm's products."""
    whole = case(shape, whole=True)
    counted = counts()["transformers"]["counted"][shape.name]["stretches"]
    parts = [_their_part(name, whole, hardware, counted) for name in whole.names]
    trained = sum(model_parameters(name, shape.model) for name in whole.names)
    return played(parts, trained * THEIR_UPDATE, hardware, THEIRS)


def _their_part(name: str, whole: Scenario, hardware: Hardware, counted: dict[str, Any]) -> StepPart:
    vision = whole.model.vision
    key = name
    if kind_of(name) == VISION_LAYER:
        windowed = vision.window_size is None or attends_in_windows(vision, number_of(name))
        key = f"{VISION_LAYER}{1 if windowed else 2}"
    elif kind_of(name) == LANGUAGE_LAYER:
        key = f"{LANGUAGE_LAYER}1"
    sides = [counted.get(f"{key} {way}") for way in ("forward", "backward")]
    if sides[0] is None:  # patches and their norm run before the first layer that is followed
        return StepPart(name)
    passes, host = [], []
    for side, rates, each in zip(sides, (hardware.forward, hardware.backward), THEIRS.operation, strict=True):
        launches, moved = (side["launches"], side["moved_bytes"]) if side else (0, 0)
        calls = sum(n for op, n in side["operations"].items() if op.endswith("flash_attention")) if side else 0
        # The embedding's backward range ends with clipping, which is counted with the update.
        passes.append(0.0 if name == "embedding" and rates is hardware.backward else moved / rates.bandwidth)
        host.append(launches * each + calls * THEIRS.attention_call)
    python = THEIRS.layer if is_transformer(name) else (0.0, 0.0)
    terms = {**work_terms(name, whole, hardware), "passes": (passes[0], passes[1])}
    return StepPart(name, terms, (host[0] + python[0], host[1] + python[1]))


def counts() -> dict[str, Any]:
    """Return the last record of `host_time.py`, by side."""
    sides: dict[str, Any] = json.loads(RECORDS.read_text(encoding="utf-8").splitlines()[-1])["sides"]
    return sides


def tables() -> list[str]:
    """Return the lines of the tables of docs/design/performance-model.md."""
    found = predictions()
    lines = summary(found)
    for each in found:
        if each.gpu == "h100":  # which has been measured
            lines += ["", *milliseconds(each)]
    return lines


def summary(found: Sequence[Predicted]) -> list[str]:
    lines = [
        "| shape | GPU | language layers | step, ms: now | possible | Transformers | gain: now | possible "
        "| possible, FP8 |",
        "|---" * 9 + "|",
    ]
    programs = ("now", "possible")
    for each in found:
        cells = [each.shape.name, each.gpu.upper(), str(each.shape.num_layers)]
        cells += [f"{1e3 * each.steps[name].seconds:.0f}" for name in (*programs, "Transformers")]
        cells += [f"{each.ratio(name):.2f} ×" for name in (*programs, "possible, FP8")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| language part, TFLOP/s | GPU | bf16: now | possible | FP8: now | possible |",
        "|---" * 6 + "|",
    ]
    for each in found:
        rates = [each.language_tflops(name + fp8) for fp8 in ("", ", FP8") for name in programs]
        lines.append(f"| {each.shape.name} | {each.gpu.upper()} | {' | '.join(f'{rate:.0f}' for rate in rates)} |")
    return lines


def milliseconds(each: Predicted) -> list[str]:
    """Return a table of the milliseconds of a step, by term."""
    programs = ("now", "possible", "Transformers")
    lines = [f"| {each.shape.name}, {each.gpu.upper()}, ms | {' | '.join(programs)} |", "|---" * 4 + "|"]
    rows: dict[str, list[float]] = {}
    for program in programs:
        step = each.steps[program]
        spread = {
            f"language layers: {label}": _sum(step.of("language.layers."), terms) for label, terms in TERMS.items()
        }
        spread["last norm, output and loss"] = sum(step.of("language.norm").values()) + sum(step.of("output").values())
        spread["vision layers: products, attention"] = _sum(step.of("vision.layers."), ("products", "attention"))
        spread["vision layers: empty tiles of windows"] = _sum(step.of("vision.layers."), ("empty tiles of windows",))
        spread["vision layers: passes"] = sum(step.of("vision.layers.").values()) - sum(
            spread[f"vision layers: {rest}"] for rest in ("products, attention", "empty tiles of windows")
        )
        others = ("patch_embed", "vision.norm", "projector", "embedding")
        spread["patches, projector, embedding"] = sum(sum(step.of(name).values()) for name in others)
        spread["gradients and update"] = sum(step.of("update").values())
        spread["the device waits for the host"] = step.waiting()
        spread["step"] = step.seconds
        for label, seconds in spread.items():
            rows.setdefault(label, []).append(seconds)
    shown = {label: values for label, values in rows.items() if any(1e3 * value >= 0.05 for value in values)}
    return lines + [
        f"| {label} | {' | '.join(f'{1e3 * value:.1f}' for value in values)} |" for label, values in shown.items()
    ]


def _sum(terms: dict[str, float], names: Sequence[str]) -> float:
    return sum(terms.get(name, 0.0) for name in names)


def documented(text: str) -> str:
    """Return the document with today's tables."""
    return with_table(text, "benchmarks/predict_gpu.py", "\n".join(tables()))


def main() -> None:
    if _parser().parse_args().write:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print("\n".join(tables()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="Write the tables to their page, too.")
    return parser


if __name__ == "__main__":
    main()
