"""Map options of Transformers, TRL, LLaMA-Factory, ms-swift, DeepSpeed, Megatron-LM and LLaVA to this program's."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megavlm.config.optimizer_schema import RULES
from megavlm.program import program


@cache
def _table() -> dict[str, dict[str, Any]]:
    """Return the content of `elsewhere.toml`; it is read only when a user's option is unknown."""
    return tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text(encoding="utf-8"))


@cache
def meanings() -> Mapping[str, str]:
    """Return this program's counterpart of each option of other trainers, or why there is none, by the option's name.

    A text that starts with `--` is an option, with its value if only that value matches, and a note after a comma.
    """
    return {name: meaning for meaning, names in _table()["meanings"].items() for name in names.split()}


def hint(word: str, *, written: Callable[[str], str]) -> str:
    """Return a hint for an option of another trainer: `": here it is --lr"`, or why the option is not needed.

    For a misspelt option the hint names the option meant. `written` spells one of our options as the place of the
    word needs it (flag or key). Return an empty string for words that resemble no known option.
    """
    bare = _bare(word)
    near = difflib.get_close_matches(bare, meanings(), n=1, cutoff=0.8)
    if not near:
        return ""
    meaning = re.sub("megavlm ([a-z]+)", lambda found: program(found[1]), meanings()[near[0]])
    said = f": here it is {written(meaning)}" if meaning.startswith("--") else f": {meaning}"
    return said if near[0] == bare else f": did you mean {near[0]}?{said[1:]}"


def exact_hint(word: str, *, written: Callable[[str], str]) -> str:
    """Return the `hint` for a word that is exactly an option of another trainer; an empty string for other words."""
    return hint(word, written=written) if _bare(word) in meanings() else ""


def value_hint(word: str, choices: Collection[str]) -> str:
    """Return `": did you mean X?"` if a word is another trainer's name for one of the choices; "" for other words."""
    if _bare(word) == "fp8" and "fp16" in choices:
        return ": FP8 is an option of its own, --fp8 hybrid, beside bf16"
    return f": did you mean {found}?" if (found := choice_of(word, choices)) else ""


def choice_of(word: str, choices: Collection[str]) -> str | None:
    """Return the choice that a word names here or in another trainer; None for other words."""
    bare = _bare(word).removeprefix("torch.")
    words = {**_table()["values"], **{rule.name: rule.elsewhere for rule in RULES.values()}}
    same = (choice for choice in choices if bare == choice.lower() or bare in words.get(choice, "").split())
    return next(same, None)


def _bare(word: str) -> str:
    return word.lstrip("-").replace("_", "-").lower()
