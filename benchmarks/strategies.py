"""Predict the layouts that guides advise for a model of some size beside the planner's: a table of predictions.md.

    .venv/bin/python benchmarks/strategies.py [--write]     # --write: into docs/reports/predictions.md, too

The advice is that of two guides to training vision-language models. They give neither sequence length nor batch: those
of our recipes of these sizes are taken, on H100, with the micro-batch and the recomputation with which the advised
layout is fastest. Nothing is offloaded, and nothing here is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tables import with_table

import recipes
from megavlm.arch.scenario import Sharding
from megavlm.planner.candidates import Space
from megavlm.planner.evaluator import GIB, Estimate
from megavlm.planner.search import search

DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "predictions.md"
NAMES: dict[Sharding, str] = {"none": "", "optimizer": "ZeRO-1", "optimizer_gradients": "ZeRO-2", "full": "ZeRO-3"}


@dataclass(frozen=True)
class Advice:
    """A layout that a guide advises for a size of model, of which we have a recipe."""

    size: str
    recipe: str
    gpus: int
    tp: int
    pp: int
    sharding: Sharding

    @property
    def space(self) -> Space:
        """Return what is tried: this layout with any micro-batch and recomputation."""
        space = Space((self.tp,), (self.pp,), (1,), ("1f1b",), sharding=(self.sharding,), cp=(1,))
        return replace(space, placement=("stages",), offload=())


ADVICE = (
    Advice("2B", "smolvlm_2b_1gpu", 8, 1, 1, "none"),
    Advice("7B", "vlm_7b", 8, 1, 1, "optimizer_gradients"),
    Advice("13B", "vlm_13b", 8, 1, 1, "full"),
    Advice("13B", "vlm_13b", 8, 2, 1, "optimizer_gradients"),
    Advice("34B", "vlm_34b", 32, 8, 1, "full"),
    Advice("70B", "vlm_70b", 64, 8, 2, "optimizer"),
    Advice("175B", "vlm_175b", 256, 8, 4, "optimizer"),
    Advice("530B", "vlm_540b", 768, 8, 8, "optimizer"),  # Megatron-Turing's layout
    Advice("540B", "vlm_540b", 1024, 8, 8, "optimizer"),
)


def rows() -> Iterator[str]:
    """Yield a line of the table for each piece of advice."""
    for each in ADVICE:
        recipe = recipes.read(recipes.FOLDER / f"{each.recipe}.yaml")
        batch = 1152 if each.gpus % 3 == 0 else recipe.config.train.global_batch_size  # divided by DP
        config = replace(recipe.config, train=replace(recipe.config.train, global_batch_size=batch))
        best, advised = (
            search(config, each.gpus, recipe.hardware, space=space, top=1).best[0]
            for space in (Space(cp=(1,), offload=()), each.space)
        )
        step = advised.step
        said = f"recompute {advised.candidate.recompute}, {step.peak / GIB:.0f} GiB, idle {step.bubble:.0%}"
        slower = f"{step.seconds / best.step.seconds:.2f} × ({said})"
        yield f"| {each.size}, {each.gpus:,} | {layout(advised)} | {slower} | {layout(best)} |"


def layout(found: Estimate) -> str:
    """Return the degrees above 1 and the sharding of a layout."""
    dims, sharding = found.candidate.dims, found.candidate.sharding
    degrees = {"TP": dims.tp, "PP": dims.pp, "VPP": dims.vpp, "DP": dims.dp}
    split = "·".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    return f"{split} {NAMES[sharding]}".strip()


def table() -> str:
    """Return the Markdown table."""
    head = ["| size, GPUs | advised | its step, as a multiple of the planner's | the planner's |", "|---|---|---|---|"]
    return "\n".join([*head, *rows()])


def documented(text: str) -> str:
    """Return the document with today's table."""
    return with_table(text, "benchmarks/strategies.py", table())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="Write the table to docs/reports/predictions.md, too.")
    given = parser.parse_args()
    print(table())
    if given.write:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
