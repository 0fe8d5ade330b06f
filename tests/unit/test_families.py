"""A family is one file: what it declares is found, and no other file of the product knows any family's names."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megavlm import families
from megavlm.families import FAMILIES
from megavlm.families.shared.family import ALL_PARTS

ROOT = Path(__file__).parents[2]
NEW = """
from dataclasses import replace
from megavlm.families.smolvlm import FAMILY as _SMOLVLM

FAMILY = replace(_SMOLVLM, name="mine", model_types=("mine",))
"""
# Also the name of a format of conversations in users' data.
RECORDS = {"llava"}


def names_of_families() -> set[str]:
    """Everything by which files of models name a family."""
    names = {family.name for family in FAMILIES}.union(*(family.model_types for family in FAMILIES))
    names |= {name for family in FAMILIES for reader in family.image_processors for name in reader.classes}
    names |= {name for family in FAMILIES if family.videos for name in family.videos.classes}
    names |= families.PUBLISHED.keys()
    names |= {family.image_text for family in FAMILIES} - {"<image>"}
    return names - RECORDS


def mentions(source: str, names: set[str]) -> Iterator[str]:
    """Strings that are a family's name, and imports of a family's module."""
    modules = {name for name in sys.modules if name.startswith("megavlm.families.") and ".shared" not in name}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(value)) if value in names:
                yield value
            case ast.ImportFrom(module=str(module)) if module in modules:
                yield module


def test_no_other_file_names_a_family() -> None:
    shipped = [ROOT / "pretrain_vlm.py", *ROOT.glob("tools/*.py"), *ROOT.glob("megavlm/**/*.py")]
    others = [file for file in shipped if not file.is_relative_to(ROOT / "megavlm/families")]
    names = names_of_families()
    found = {file: set(mentions(file.read_text(encoding="utf-8"), names)) for file in others}
    assert len(others) > 100
    assert {file: named for file, named in found.items() if named} == {}


@pytest.mark.parametrize("line", ["x == 'qwen2_5_vl'", "d['<|image_pad|>']", "def f():\n  return ('GotOcr2', 1)"])
def test_the_check_sees_a_name(line: str) -> None:
    assert list(mentions(line, names_of_families()))


def test_a_new_file_is_all_that_a_family_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(NEW)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    found = [family.name for family in families._declared()]
    assert sorted(found) == sorted([*(family.name for family in FAMILIES), "mine"])


def test_names_belong_to_one_family() -> None:
    assert max(Counter(kind for family in FAMILIES for kind in family.model_types).values()) == 1
    assert len(families.PUBLISHED) == sum(map(len, families._RELEASED.values()))
    readers = {id(reader): reader for family in FAMILIES for reader in family.image_processors}.values()
    named = [(name, kind) for each in readers for name in each.classes for kind in each.model_types or ("any",)]
    assert max(Counter(named).values()) == 1


def test_every_published_model_can_be_planned_for() -> None:
    for name in families.PUBLISHED:
        assert families.published_model(name).language.vocab_size


def test_every_vlm_can_be_trained_on_users_data() -> None:
    whole = [family for family in FAMILIES if family.parts == ALL_PARTS]
    assert len(whole) >= 6
    assert [f.name for f in whole if not (f.image_processors and f.chat_template and f.inputs)] == []
