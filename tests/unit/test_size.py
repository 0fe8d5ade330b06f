"""The budget of CONTRIBUTING.md: what a reader has to know may only become less."""

from __future__ import annotations

from tests.support.size import CEILINGS, code_lines, counts


def test_nothing_has_grown() -> None:
    """What is new takes something else away; where it does not, the commit says why and raises the ceiling."""
    found = counts()
    assert found.keys() == CEILINGS.keys()
    assert {name: count for name, count in found.items() if count > CEILINGS[name]} == {}


def test_lines_of_code_are_those_that_do_something() -> None:
    source = '''"""Says
    what it is."""

# A comment.
x = [
    1,  # the first

    2,
]


def f():
    """Returns nothing."""
    text = """two
    lines"""
'''
    assert code_lines(source) == 7
