"""Predict the layouts that guides advise for a model of some size beside the planner's: a table of predictions.md.

    .venv/bin/python benchmarks/strategies.py [--write]     # --write: into docs/reports/predictions.md, too

The advice is `megavlm/planner/advice.py`'s, as `megavlm plan --explain` has it. Guides give neither sequence length nor
batch: those of our recipes of these sizes are taken, on H100, with the micro-batch and the recomputation with which the
advised layout is fastest. Nothing is offloaded, and nothing here is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tables import with_table

import recipes
from megavlm.arch.scenario import Sharding
from megavlm.planner.advice import ADVICE, ERROR, Advice, predicted, terms
from megavlm.planner.candidates import Space
from megavlm.planner.evaluator import GIB, Estimate
from megavlm.planner.search import search

DOCUMENT = Path(__file__).parents[1] / "docs" / "reports" / "predictions.md"
NAMES: dict[Sharding, str] = {"none": "", "optimizer": "ZeRO-1", "optimizer_gradients": "ZeRO-2", "full": "ZeRO-3"}
# The recipe of each size, by billions of parameters.
RECIPES = {2: "smolvlm_2b_1gpu", 7: "vlm_7b", 8: "qwen3_vl_8b", 13: "vlm_13b", 34: "vlm_34b", 70: "vlm_70b",
           175: "vlm_175b", 530: "vlm_530b", 540: "vlm_540b"}  # fmt: skip


def compared(advice: Advice) -> tuple[str, str]:
    """Return the line of the table for a piece of advice, and why the planner's layout is faster: empty where the two
    are within the planner's error.
    """
    recipe = recipes.read(recipes.FOLDER / f"{RECIPES[int(advice.billions)]}.yaml")
    found, other = (
        search(recipe.config, advice.gpus, recipe.hardware, space=space, top=1)
        for space in (Space(cp=(1,), offload=()), advice.space)
    )
    best, theirs, name = found.best[0], other.best[0], f"{advice.billions:g}B, {advice.gpus:,}"
    step, times = theirs.step, theirs.step.seconds / best.step.seconds
    said = f"{times:.2f} × (recompute {theirs.candidate.recompute}, {step.peak / GIB:.0f} GiB)"
    line = f"| {name} | {layout(theirs)} | {said} | {layout(best)} |"
    if times <= 1 + ERROR:
        return line, ""
    return line, f"- **{name}.** {terms(predicted(best, found.evaluator), predicted(theirs, other.evaluator))}"


def layout(found: Estimate) -> str:
    """Return the degrees above 1 and the sharding of a layout."""
    dims, sharding = found.candidate.dims, found.candidate.sharding
    degrees = {"TP": dims.tp, "PP": dims.pp, "VPP": dims.vpp, "DP": dims.dp}
    split = "·".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    return f"{split} {NAMES[sharding]}".strip()


def table() -> str:
    """Return the Markdown table, and a list of what makes the difference where it is more than the planner's error."""
    head = ["| size, GPUs | advised | its step, as a multiple of the planner's | the planner's |", "|---|---|---|---|"]
    lines, causes = zip(*map(compared, ADVICE), strict=True)
    return "\n".join([*head, *lines, "", *filter(None, causes)])


def documented(text: str) -> str:
    """Return the document with today's table."""
    return with_table(text, "benchmarks/strategies.py", table())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="Write the table to docs/reports/predictions.md, too.")
    given, found = parser.parse_args(), table()
    print(found)
    if given.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(with_table(text, "benchmarks/strategies.py", found), encoding="utf-8")


if __name__ == "__main__":
    main()
