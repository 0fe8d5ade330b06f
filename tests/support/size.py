"""Count what there is to know: `make size` prints it, and `tests/unit/test_size.py` holds the ceilings.

A code line holds a token that is neither a comment nor part of a docstring.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from megavlm.command_line.words import RUN_FLAGS
from megavlm.rules.fields import options

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "megavlm", ROOT / "tests"
# Lower one with each change that takes away; who raises one says in the commit by what. The goal stands behind it.
CEILINGS = {
    "code lines of the package": 49_666,  # 40,000
    "modules": 396,  # 380
    "code lines of the largest module": 309,
    "options": 356,
    "flags": 148,  # 150
    "code lines of tests": 37_676,  # 33,000
    "words of documentation": 39_500,  # 45,000
}
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Return the number of lines of code in a Python source."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for token in tokens if token.type not in _NO_CODE for n in range(token.start[0], token.end[0] + 1)}
    return len(lines - set(_docstring_lines(source)))


def _docstring_lines(source: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and node.body and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def modules(folder: Path) -> dict[Path, int]:
    """Return the code lines of each module below a folder."""
    return {path: code_lines(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def packages(found: Mapping[Path, int]) -> dict[str, tuple[int, int]]:
    """Return the code lines and the number of modules of each package, largest first."""
    sums: dict[str, tuple[int, int]] = {}
    for path, lines in found.items():
        parts = path.relative_to(PACKAGE).parts
        name = parts[0] if len(parts) > 1 else "."
        before = sums.get(name, (0, 0))
        sums[name] = before[0] + lines, before[1] + 1
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))


def words() -> int:
    """Return the number of words of the documentation: what has a letter or a digit, so no bars and rules of tables."""
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = (word for page in pages for word in page.read_text(encoding="utf-8").split())
    return sum(any(map(str.isalnum, word)) for word in found)


def counts() -> dict[str, int]:
    """Return what the budget of CONTRIBUTING.md bounds, by name."""
    package = modules(PACKAGE)
    return {
        "code lines of the package": sum(package.values()),
        "modules": len(package),
        "code lines of the largest module": max(package.values()),
        "options": len(options()),
        "flags": len(RUN_FLAGS) + sum(bool(option.flag) for option in options()),
        "code lines of tests": sum(modules(TESTS).values()),
        "words of documentation": words(),
    }


def main() -> None:
    package = modules(PACKAGE)
    print(f"{'package':14} {'code lines':>10} {'modules':>8}")
    for name, (lines, number) in packages(package).items():
        print(f"{name:14} {lines:10,} {number:8,}")
    print(f"median of a module: {median(package.values()):.0f} code lines")
    for name, count in counts().items():
        print(f"{name:34} {count:8,}  at most {CEILINGS[name]:,}")


if __name__ == "__main__":
    main()
