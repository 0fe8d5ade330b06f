"""Say on how many GPUs ten models can be trained on images and clips, and how fast: the planner's answers.

    python benchmarks/what_fits.py [MODEL …] [--write]     # --write: into docs/reports/what-fits.{md,csv}, too
    python benchmarks/what_fits.py --missing --write       # what is not kept yet; go on after an interruption

For each model, GPU, amount of images or length of a clip, and way to train, the smallest power of two of GPUs (up to
64) on which a layout fits, and its predicted tokens per second and GPU. Nothing here is measured.
`records/what_fits.json` keeps the answers, so that a part can be renewed. The page shows one sequence length, the CSV
file all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tables import with_table

from megavlm.arch.image_tokens import tokens_per_grid
from megavlm.config.schema import Config, DataConfig, LoraConfig, PrecisionConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.candidates import Space
from megavlm.planner.hardware import profile
from megavlm.planner.search import search

DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "what-fits.md"
ROWS = DOCUMENT.with_suffix(".csv")
ANSWERS = Path(__file__).parent / "records" / "what_fits.json"
GPUS = {"a100": "A100-80", "h100": "H100", "h200": "H200", "b200": "B200"}
MOST = 64
# Model → side of an image in pixels, or of a tile where images are cut into tiles.
MODELS = {
    "smolvlm_2b": 378,
    "qwen2_5_vl_3b": 896,
    "llava_1_5_7b": 336,
    "llava_onevision_7b": 378,
    "qwen2_5_vl_7b": 896,
    "internvl3_8b": 448,
    "qwen3_vl_8b": 1024,
    "qwen2_5_vl_32b": 896,
    "internvl3_38b": 448,
    "qwen2_5_vl_72b": 896,
}
# Sequence length → tokens of images in it.
BUDGETS = {2048: 1024, 8192: 4096, 16384: 12288}
# Frames of the one clip in a sequence → sequence length; models that read clips, of frames of this side in pixels.
CLIPS = {64: 16384, 256: 40960}
CLIP_MODELS = ("qwen2_5_vl_3b", "qwen2_5_vl_7b", "qwen3_vl_8b", "qwen2_5_vl_32b", "qwen2_5_vl_72b")
CLIP_SIDE = 448
WAYS = ("full", "LoRA", "frozen tower")
SHOWN_LENGTH, SHOWN_WAYS = 8192, ("full", "LoRA")  # on the page
# Sequences of a step, so many for each GPU: enough that a pipeline's bubble does not decide.
_BATCH = 16
# A narrow space: one sample a micro-batch, no interleaving, no offload. What does not fit here may fit with --offload.
SPACE = Space(
    pp=(1, 2, 4, 8), vpp=(1,), micro_batch=(1,), recompute=("none", "full"), sharding=("optimizer", "full"), offload=()
)


@dataclass(frozen=True)
class Case:
    model: str
    gpu: str
    seq_length: int
    way: str
    frames: int = 0  # of the clip; 0: the sequence has images

    @property
    def key(self) -> str:
        clip = f" {self.frames} frames" if self.frames else ""
        return f"{self.model} {self.gpu} {self.seq_length} {self.way}{clip}"

    @property
    def side(self) -> int:
        """Return the side in pixels of an image, of a tile, or of a frame."""
        return CLIP_SIDE if self.frames else MODELS[self.model]

    @property
    def pictures(self) -> int:
        """Return how many images, tiles, or groups of frames that share their patches are in a sequence."""
        if self.frames:
            return self.frames // published_model(self.model).vision.temporal_patch_size
        return max(1, round(BUDGETS[self.seq_length] / tokens_of(self.model, self.side)))


@dataclass(frozen=True)
class Answer:
    """The fewest GPUs, the tokens per second of each, and the layout; no GPUs where none up to MOST are enough."""

    gpus: int
    rate: float
    layout: str

    @property
    def cell(self) -> str:
        return f"{self.gpus}: {self.rate:,.0f}" if self.gpus else f"> {MOST}"


def cases(models: list[str]) -> Iterator[Case]:
    for model in models:
        for gpu in GPUS:
            for seq_length in BUDGETS:
                for way in WAYS:
                    yield Case(model, gpu, seq_length, way)
            for frames, seq_length in CLIPS.items() if model in CLIP_MODELS else ():
                for way in WAYS:
                    yield Case(model, gpu, seq_length, way, frames)


def configuration(case: Case, gpus: int) -> Config:
    """Return the run of a case on so many GPUs."""
    freeze: Any = {"full": (), "LoRA": ("vision", "projector"), "frozen tower": ("vision",)}[case.way]
    return Config(
        model=replace(published_model(case.model), freeze=freeze),
        lora=LoraConfig(rank=16 if case.way == "LoRA" else 0),
        precision=PrecisionConfig(dtype="bf16"),
        train=TrainConfig(seq_length=case.seq_length, global_batch_size=_BATCH * gpus),
        data=DataConfig(kind="synthetic", images_per_sample=(case.pictures,), image_sizes=(case.side,)),
    )


def tokens_of(model: str, side: int) -> int:
    """Return the tokens of an image, a tile or a group of frames with this side."""
    sizes = published_model(model)
    patches = side // sizes.vision.patch_size
    return tokens_per_grid((patches, patches), sizes.projector)


def answer(case: Case) -> Answer:
    """Return the planner's answer, by a search on more and more GPUs."""
    gpus = 1
    while gpus <= MOST:
        found = search(configuration(case, gpus), gpus, profile(case.gpu), space=SPACE, top=1).best
        if found:
            return Answer(gpus, found[0].tokens_per_second / gpus, found[0].candidate.label)
        gpus *= 2
    return Answer(0, 0.0, "")


def known() -> dict[str, Answer]:
    """Return the answers that are kept."""
    return {key: Answer(**values) for key, values in json.loads(ANSWERS.read_text(encoding="utf-8")).items()}


def table(answers: dict[str, Answer]) -> str:
    """Return the table of docs/reports/what-fits.md: sequences of one length with images."""
    lines = [f"| model | images | | {' | '.join(GPUS.values())} |", "|---|---|---|" + "---|" * len(GPUS)]
    for model, side in MODELS.items():
        for way in SHOWN_WAYS:
            case = Case(model, "", SHOWN_LENGTH, way)
            cells = [answers[replace(case, gpu=gpu).key].cell for gpu in GPUS]
            shown = f"`{model}` | {case.pictures} of {side}²" if way == SHOWN_WAYS[0] else " | "
            lines.append(f"| {shown} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rows(answers: dict[str, Answer]) -> str:
    """Return all answers as CSV. The column GPUs is 0 where the model does not fit on MOST GPUs."""
    lines = ["model,tokens,frames of a clip,pictures,side,trained,GPU,GPUs,tokens/s of each,layout"]
    for case in cases(list(MODELS)):
        found = answers[case.key]
        what = [case.model, case.seq_length, case.frames, case.pictures, case.side, case.way, GPUS[case.gpu]]
        lines.append(",".join(map(str, [*what, found.gpus, f"{found.rate:.0f}", found.layout])))
    return "\n".join(lines) + "\n"


def documented(text: str) -> str:
    """Return the document with the table of the answers that are kept."""
    return with_table(text, "benchmarks/what_fits.py", table(known()))


def main() -> None:
    given = _parser().parse_args()
    answers = known() if ANSWERS.exists() else {}
    for case in cases(given.models or list(MODELS)):
        if given.missing and case.key in answers:
            continue
        answers[case.key] = answer(case)
        print(f"{case.key}: {answers[case.key].cell}  {answers[case.key].layout}", flush=True)
        if given.write:
            kept = {key: vars(each) for key, each in answers.items()}
            ANSWERS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if given.write:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
        ROWS.write_text(rows(known()), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="Models to plan for; default: all.")
    parser.add_argument("--missing", action="store_true", help="Plan only what has no answer yet.")
    parser.add_argument("--write", action="store_true", help="Keep the answers, and renew the page and the CSV file.")
    return parser


if __name__ == "__main__":
    main()
