"""Measure which differences are normal: of layouts, orders of sums and precisions, beside Transformers' own in bf16.

    python benchmarks/normal.py [--families llava gemma3]    # differences of one step of tiny models
    python benchmarks/normal.py --steps 300                  # how the loss of a small LLaVA on digits drifts apart
    python benchmarks/normal.py --write                      # renew docs/reports/normal.md from the records

A step gives a loss, a gradient norm, and the logits of each sample; a figure is the relative difference of those of two
runs (of logits |a − b| / |b| with the Euclidean norm), as root mean square over draws of words and pixels. The unit is
what bf16 changes in Transformers: weights rounded to bf16, all computation in bf16, gradients kept in fp32. For the
drift, all sides train with AdamW on the same samples of `preferences.py` from the same weights, Transformers in a plain
loop of PyTorch. Both append to `records/normal.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from preferences import ROOT, write_data
from record import append, circumstances
from tables import with_table

from megavlm.checkpoint.hf.hf_files import transformers_model
from megavlm.checkpoint.hf.pretrained import ALL_PARTS, Pretrained, with_pretrained_model
from megavlm.config.schema import Config
from megavlm.data.types import Sample
from megavlm.inputs.batch import MicroBatch
from tests.support import hf
from tests.support.gates import LAYOUTS
from tests.support.pool import Pools
from tests.support.tiny_models import FAMILIES
from tests.support.training import metrics, started, train_composed

DOCUMENT, RECORDS = ROOT / "docs/reports/normal.md", ROOT / "benchmarks/records/normal.jsonl"
MODELS = ("llava", "qwen2.5-vl", "qwen3-vl", "internvl", "gemma3")
DRAWS = 4
FIGURES = ("loss", "norm", "logits")
UNIT = "Transformers, bf16"
STILL = "--lr 1e-12"  # a step that changes no weight, so that each draw is the first


@dataclass(frozen=True)
class Case:
    """A run of megavlm: its layout, and how samples are put into micro-batches."""

    beside: str  # the case to which its difference is shown
    world: int = 1
    flags: str = ""
    rows: Literal["alone", "packed", "micro-batches of one"] = "alone"


ONE, ONE_BF16, BF16 = "one process", "one process, bf16", "--precision bf16"
CASES = {
    ONE: Case("Transformers"),
    **{LAYOUTS[name].title: Case(ONE, *LAYOUTS[name][1:]) for name in ("tp2", "tp2-pp2-vpp2", "cp2", "zero3")},
    "micro-batches of one sample": Case(ONE, rows="micro-batches of one"),
    "packed": Case(ONE, rows="packed"),
    ONE_BF16: Case(ONE, flags=BF16),
    "TP2, bf16": Case(ONE_BF16, 2, f"--tp 2 {BF16}"),
    "packed, bf16": Case(ONE_BF16, flags=BF16, rows="packed"),
}


@dataclass(frozen=True)
class Steps:
    """The loss and gradient norm of each draw, and each sample's logits by (draw, micro-batch, place in it)."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    logits: dict[tuple[int, int, int], NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True)
class Tiny:
    """The Hugging Face folder of a tiny model, the image sizes of each micro-batch, and the number of random draws."""

    folder: Path
    images: Sequence[Any]
    draws: int

    @classmethod
    def of(cls, name: str, root: Path, draws: int = DRAWS) -> Tiny:
        build, images = FAMILIES[name]
        torch.manual_seed(2)
        return cls(hf.save(build(), root / name), images, draws)

    def samples(self, config: Config, draw: int) -> list[list[Sample]]:
        return [hf.samples_of(config, sizes, seed=1000 * draw + number) for number, sizes in enumerate(self.images)]


class InBf16:
    """A model of Transformers that computes in bf16, with weights that are rounded from fp32 at each call."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.parameters = model, model.parameters

    def __call__(self, **given: Any) -> Any:
        rounded = {name: param.bfloat16() for name, param in self._model.named_parameters()}
        given = {name: _in_bf16(value) for name, value in given.items()}
        output = torch.func.functional_call(self._model, rounded, kwargs=given)
        output.logits = output.logits.float()
        return output


def _in_bf16(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


def of_transformers(tiny: Tiny, bf16: bool) -> Steps:
    """Return the steps of Transformers' model; every micro-batch trains equally many tokens."""
    config, pretrained = hf.config_for(tiny.folder), Pretrained.of(tiny.folder, *ALL_PARTS)
    model = transformers_model(tiny.folder, dtype=torch.float32)
    theirs, found = InBf16(model) if bf16 else model, Steps()
    for draw in range(tiny.draws):
        model.zero_grad()
        losses = []
        for number, samples in enumerate(tiny.samples(config, draw)):
            batch = hf.batch_of_rows(config, [[sample] for sample in samples])
            loss, logits = hf.loss_of(theirs, pretrained, batch, config)
            (loss / len(tiny.images)).backward()
            losses.append(loss.item())
            found.logits.update({(draw, number, place): each for place, each in enumerate(by_sample(batch, logits))})
        found.losses.append(statistics.fmean(losses))
        gradients = [param.grad for param in model.parameters() if param.grad is not None]
        found.norms.append(float(nn.utils.get_total_norm(gradients)))
    return found


def of_megavlm(pools: Pools, tiny: Tiny, case: Case) -> Steps:
    """Return the steps of a run of megavlm, with the logits of all ranks."""
    ranks = pools(case.world).run(_on_rank, tiny, case, timeout=1200)
    return Steps(ranks[0].losses, ranks[0].norms, {key: each for rank in ranks for key, each in rank.logits.items()})


def _on_rank(tiny: Tiny, case: Case) -> Steps:
    argv = f"--init-from {tiny.folder} --seq-length {hf.LENGTH} --mbs {len(tiny.images[0])} --gbs 8 --no-save"
    argv = f"{argv} --images-per-sample 0 --no-tensorboard {hf.ADAMW} {STILL} {case.flags}"
    found = Steps()
    with started(argv.split(), str(tiny.folder / "run"), with_pretrained_model) as made:
        engine, groups = made.engine, made.engine.groups
        for draw in range(tiny.draws):
            batches: dict[tuple[int, int], MicroBatch] = {}  # by micro-batch and the place of its first sample
            for number, samples in enumerate(tiny.samples(made.config, draw)):
                rows = [samples] if case.rows == "packed" else [[sample] for sample in samples]
                parts = [[row] for row in rows] if case.rows == "micro-batches of one" else [rows]
                batches |= {(number, place): hf.batch_of_rows(made.config, part) for place, part in enumerate(parts)}
            mine = dict(list(batches.items())[groups.coords.dp :: groups.dims.dp])
            given = list(mine.values())
            # Context-parallel ranks have no whole rows, and shards of ZeRO-3 are gathered in training steps alone.
            whole = groups.dims.cp == 1 and "full" not in case.flags
            logits = engine.schedule.logits(given) if whole else []
            if logits and groups.coords.pp == groups.dims.pp - 1:
                for ((number, first), batch), each in zip(mine.items(), logits, strict=True):
                    for place, own in enumerate(by_sample(batch, each), first):
                        found.logits[draw, number, place] = own
            colocated = engine.schedule.colocated
            result = engine.train_step(given if colocated is None else colocated.with_own_images(given))
            found.losses.append(result.loss)
            found.norms.append(result.grad_norm)
    return found


def by_sample(batch: MicroBatch, logits: Tensor) -> list[NDArray[np.float32]]:
    """Return the logits of each sample of a micro-batch, without padding, in fp32."""
    flat = logits.detach().float().flatten(0, 1).numpy()
    starts = [first for first, _ in batch.text.prefixes]
    return [flat[start : start + length] for start, length in zip(starts, batch.text.lengths, strict=True)]


def apart(ours: Steps, theirs: Steps) -> dict[str, float]:
    """Return the relative difference of each figure that both have: root mean squares over draws, or over samples."""
    found = {}
    for name, pairs in (
        ("loss", zip(ours.losses, theirs.losses, strict=True)),
        ("norm", zip(ours.norms, theirs.norms, strict=True)),
    ):
        found[name] = _root_mean_square(abs(a - b) / abs(b) for a, b in pairs)
    if ours.logits and theirs.logits:
        assert ours.logits.keys() == theirs.logits.keys()
        each = ((ours.logits[key], theirs.logits[key]) for key in theirs.logits)
        found["logits"] = _root_mean_square(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in each)
    return found


def _root_mean_square(values: Iterator[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


def measured(pools: Pools, tiny: Tiny, cases: Mapping[str, Case] = CASES) -> dict[str, dict[str, float]]:
    """Return the differences of each case, and those of the unit."""
    found: dict[str, Steps] = {
        name: of_transformers(tiny, bf16) for name, bf16 in (("Transformers", False), (UNIT, True))
    }
    differences = {UNIT: apart(found[UNIT], found["Transformers"])}
    for name, case in cases.items():
        found[name] = of_megavlm(pools, tiny, case)
        differences[name] = apart(found[name], found[case.beside])
        print(f"{tiny.folder.name}: {name}: {differences[name]}", flush=True)
    return differences


DRIFTS = {  # name: the two sides
    "megavlm and Transformers": ("megavlm", "Transformers"),
    "megavlm in bf16 and fp32": ("megavlm, bf16", "megavlm"),
    "Transformers in bf16 and fp32": (UNIT, "Transformers"),
}


def drift(pools: Pools, root: Path, steps: int) -> dict[str, Any]:
    """Return the relative difference of the losses of each pair of DRIFTS after some steps, and the losses there."""
    write_data(root)
    runpy.run_path(str(ROOT / "examples/first_run/small_model.py"))["main"](root / "model")
    argv = f"--init-from {root / 'model'} --datasets {root / 'questions.jsonl'},image_root={root} --seq-length 64 "
    argv += f"--mbs 4 --gbs 4 --num-workers 0 --train-iters {steps} --no-save --no-tensorboard {hf.ADAMW}"
    losses = {}
    for name, flags in (("megavlm", ""), ("megavlm, bf16", BF16)):
        pools(1).run(train_composed, f"{argv} {flags}".split(), str(root / name), timeout=7200)
        losses[name] = [each["loss"] for each in metrics(root / name)]
    for name, bf16 in (("Transformers", False), (UNIT, True)):
        [losses[name]] = pools(1).run(_plain_loop, argv.split(), root / "model", steps, bf16, timeout=7200)
    apart = {
        name: [abs(a - b) / b for a, b in zip(losses[ours], losses[theirs], strict=True)]
        for name, (ours, theirs) in DRIFTS.items()
    }
    ends = [1, *(n for power in range(9) for n in (3 * 10**power, 10 ** (power + 1)) if n < steps), steps]
    windows = [slice(min(9 * end // 10, end - 1), end) for end in ends]  # a tenth of the steps so far
    return {
        "steps": ends,
        "loss": [statistics.fmean(losses["Transformers"][window]) for window in windows],
        **{name: [statistics.median(each[window]) for window in windows] for name, each in apart.items()},
    }


def _plain_loop(argv: Sequence[str], folder: Path, steps: int, bf16: bool) -> list[float]:
    """Return the losses of Transformers' model with torch's AdamW on the micro-batches of a run."""
    with started(argv, str(folder / f"run{bf16}"), with_pretrained_model) as made:
        model, batches = transformers_model(folder, dtype=torch.float32), made.data_loader.next_step
        theirs = InBf16(model) if bf16 else model
        pretrained = Pretrained.of(folder, *ALL_PARTS)
        return list(hf.losses_of(theirs, pretrained, made.config, (batches().batches for _ in range(steps))))


def table() -> str:
    """Return the tables of the newest records of each family and of the drift, in Markdown."""
    records = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    families = {name: found for record in records for name, found in record.get("families", {}).items()}
    made = [record["drift"] for record in records if "drift" in record]
    rows = [["", *families], [f"**{UNIT}**", *(cell(found[UNIT]) for found in families.values())]]
    rows += [[case, *(cell(found[case], found[UNIT]) for found in families.values())] for case in CASES]
    tables = [rows]
    tables += [
        [["steps", *map(str, last["steps"])], *([name, *map(shown, last[name])] for name in ("loss", *DRIFTS))]
        for last in made[-1:]
    ]
    return "\n\n".join(map(_markdown, tables))


def cell(found: Mapping[str, float], unit: Mapping[str, float] | None = None) -> str:
    """Return loss, norm and logits, in multiples of the unit if there is one."""
    ratios = {name: value / (1.0 if unit is None else unit[name]) for name, value in found.items()}
    return "/".join(shown(ratios[name]) if name in ratios else "–" for name in FIGURES)


def shown(value: float) -> str:
    """Return a figure with two digits where it is near 1, else with one."""
    if 0.1 <= value < 100:
        return f"{value:.2g}"
    digits, _, exponent = f"{value:.0e}".partition("e")
    return f"{digits}e{int(exponent)}" if value else "0"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def documented(text: str) -> str:
    """Return the page's text with its tables computed from the newest records."""
    return with_table(text, "benchmarks/normal.py", table())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=[], choices=[*FAMILIES], metavar="NAME")
    parser.add_argument("--steps", type=int, default=0, help="of training, for the drift")
    parser.add_argument("--write", action="store_true", help="Write the tables to docs/reports/normal.md, too.")
    given = parser.parse_args()
    families = given.families or ([] if given.steps or given.write else MODELS)
    pools, record = Pools(), dict[str, Any](circumstances())
    with tempfile.TemporaryDirectory() as folder:
        for name in families:
            found = measured(pools, Tiny.of(name, Path(folder)))
            append("normal", {**record, "draws": DRAWS, "families": {name: found}})
        if given.steps:
            append("normal", {**record, "drift": drift(pools, Path(folder), given.steps)})
    pools.close()
    if given.write:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
        print(table())


if __name__ == "__main__":
    main()
