"""Plan for every recipe: whether it fits, how fast it is, and whether another layout is faster.

    python benchmarks/recipes.py [NAME …] [--write]     # --write: into recipes/*.yaml and docs/recipes.md, too

A recipe says for which model, devices and images its layout was chosen. All numbers are the planner's: nothing is
measured.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tables import with_table

from megavlm.arch.dims import dims_of
from megavlm.arch.kinds import model_parameters, step_flops
from megavlm.arch.layers import layer_names
from megavlm.arch.workload import times, typical_workload
from megavlm.config.schema import Config
from megavlm.families import with_published
from megavlm.planner.auto import predict
from megavlm.planner.evaluator import GIB, Estimate
from megavlm.planner.hardware import Hardware, for_precision, profile
from megavlm.planner.search import search
from megavlm.planner.step_time import StepEstimate
from megavlm.rules.defaults import resolve
from megavlm.rules.load import values_in_file

FOLDER = Path(__file__).parents[1] / "recipes"
DOCUMENT = FOLDER.parent / "docs" / "recipes.md"
MARK = "# planner: "
_PREFIX = re.compile("# (?:A VLM of .* from |[^,]*, )")  # of a recipe's first line: what its name says
CLOSE = 0.03  # layouts that differ by less are taken for equally fast: the model is not better than that


@dataclass(frozen=True)
class Recipe:
    """A recipe and the workload that its layout was chosen for."""

    path: Path
    config: Config  # resolved
    gpus: int
    hardware: Hardware

    @cached_property
    def step(self) -> StepEstimate:
        """Return the estimate of a step of the recipe's own layout."""
        return predict(self.config, dims_of(self.config, world=self.gpus), self.hardware)

    @property
    def peak(self) -> float:
        """Return the bytes of the fullest rank."""
        return max(memory.total for memory in self.step.memory)

    @property
    def mfu(self) -> float:
        assert self.hardware.peak is not None
        work = times(typical_workload(self.config), self.config.train.global_batch_size)
        return step_flops(self.config, work) / self.step.seconds / self.gpus / self.hardware.peak

    @property
    def own_line(self) -> str:
        """Return what the planner says of the recipe's layout."""
        return (
            f"{self.step.seconds:.2f} s a step, {self.mfu:.1%} MFU, {self.peak / GIB:.1f} of "
            f"{self.hardware.memory / GIB:.1f} GiB on the fullest rank"
        )

    def fastest(self) -> Estimate:
        """Return the fastest layout that a search finds."""
        return search(self.config, self.gpus, self.hardware, top=1).best[0]

    def line(self) -> str:
        """Return the whole comment: the recipe's layout, and the fastest one if it is clearly faster."""
        best = self.fastest()
        gain = self.step.seconds / best.step.seconds - 1
        found = f"{gain:.0%} faster: {best.candidate.label}" if gain > CLOSE else "no layout is clearly faster"
        return f"{self.own_line}; {found}"


def recipes(names: Sequence[str] = ()) -> list[Recipe]:
    """Return the recipes of these names, or all."""
    files = [FOLDER / f"{name}.yaml" for name in names] or sorted(FOLDER.glob("*.yaml"))
    return [read(file) for file in files]


def read(path: Path) -> Recipe:
    """Return the recipe that a YAML file describes."""
    config = resolve(with_published(Config(), values_in_file(path)))
    assert config.run.world_size is not None, path
    assert config.placement.hardware is not None, path
    hardware = for_precision(profile(config.placement.hardware), config.precision.dtype)
    return Recipe(path, config, config.run.world_size, hardware)


def said(path: Path) -> str:
    """Return the planner's comment in a recipe."""
    return next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(MARK))


def _order(recipe: Recipe) -> tuple[bool, str, int]:
    """Return what recipes are sorted by: those of published models first, then by family and size."""
    name = recipe.path.stem
    return name.startswith("vlm_"), name.partition("_")[0], recipe.gpus


def table(found: Sequence[Recipe]) -> str:
    """Return a Markdown table of the recipes: what their dry runs say."""
    sizes = {each.hardware.name.upper(): each.hardware.memory / GIB for each in found}
    room = " or ".join(f"{size:.1f} ({name})" for name, size in sorted(sizes.items()))
    rows = [
        f"| recipe | trains | parameters | GPUs | fullest rank, GiB of {room} | a step, s |",
        "|---|---|---|---|---|---|",
    ]
    for each in sorted(found, key=_order):
        model, what = each.config.model, each.path.read_text(encoding="utf-8").partition("\n")[0]
        count = sum(model_parameters(name, model) for name in layer_names(model)) / 1e9
        rows.append(
            f"| `{each.path.stem}` | {_PREFIX.sub('', what).rpartition(', on ')[0]} | {count:.1f} B | "
            f"{each.gpus:,} {each.hardware.name.upper()} | {each.peak / GIB:.1f} | "
            f"{each.step.seconds:.2f} |"
        )
    return "\n".join(rows)


def documented(text: str) -> str:
    """Return the document with the table of all recipes."""
    return with_table(text, "benchmarks/recipes.py", table(recipes()))


def main() -> None:
    given = _parser().parse_args()
    for recipe in recipes(given.names):
        line = f"{MARK}{recipe.line()}"
        print(f"{recipe.path.stem}: {line.removeprefix(MARK)}", flush=True)
        if given.write:
            text = recipe.path.read_text(encoding="utf-8")
            recipe.path.write_text(text.replace(said(recipe.path), line), encoding="utf-8")
    if given.write:
        DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="Recipes to plan for; default: all.")
    parser.add_argument("--write", action="store_true", help="Write the results into the recipes, too.")
    return parser


if __name__ == "__main__":
    main()
