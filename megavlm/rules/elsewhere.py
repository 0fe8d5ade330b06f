"""Options of Transformers, TRL, LLaMA-Factory, ms-swift, DeepSpeed, Megatron-LM and LLaVA, and what they are here."""

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
    """Return `elsewhere.toml`, which only a mistake asks for."""
    return tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text(encoding="utf-8"))


@cache
def meanings() -> Mapping[str, str]:
    """Return what does here what each option of other trainers does there, or why nothing does, by its name there.

    A text that starts with `--` is an option, with its value where it has to have that one and a note after a comma.
    """
    return {name: meaning for meaning, names in _table()["meanings"].items() for name in names.split()}


def hint(word: str, *, written: Callable[[str], str]) -> str:
    """Return what a message says of an option of another trainer: `": here it is --lr"`, or why it is not needed.

    A misspelt one is named as well. `written` returns an option as it is written where the word stood. Empty for words
    that are like no such option.
    """
    bare = _bare(word)
    near = difflib.get_close_matches(bare, meanings(), n=1, cutoff=0.8)
    if not near:
        return ""
    meaning = re.sub("megavlm ([a-z]+)", lambda found: program(found[1]), meanings()[near[0]])
    said = f": here it is {written(meaning)}" if meaning.startswith("--") else f": {meaning}"
    return said if near[0] == bare else f": did you mean {near[0]}?{said[1:]}"


def exact_hint(word: str, *, written: Callable[[str], str]) -> str:
    """Return what `hint` says of a word that is spelt as another trainer spells it; an empty string for others."""
    return hint(word, written=written) if _bare(word) in meanings() else ""


def value_hint(word: str, choices: Collection[str]) -> str:
    """Return `": did you mean X?"` for a value that another trainer has for one of the choices; "" for other words."""
    if _bare(word) == "fp8" and "fp16" in choices:
        return ": FP8 is an option of its own, --fp8 hybrid, beside bf16"
    return f": did you mean {found}?" if (found := choice_of(word, choices)) else ""


def choice_of(word: str, choices: Collection[str]) -> str | None:
    """Return the choice for which another trainer has a word; None for other words."""
    bare = _bare(word).removeprefix("torch.")
    words = {**_table()["values"], **{rule.name: rule.elsewhere for rule in RULES.values()}}
    same = (choice for choice in choices if bare == choice.lower() or bare in words.get(choice, "").split())
    return next(same, None)


def _bare(word: str) -> str:
    return word.lstrip("-").replace("_", "-").lower()
