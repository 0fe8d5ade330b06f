"""The extensions of `examples/`, which a test uses as a user would who installed them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = ("acme_vlm", "arr_coc", "pooled_attention", "counting_dots", "margin_loss", "verl_engine")
POOLED = (
    "--extension pooled_attention --projector-kind pooled --set model.projector.connectors.pooled.tokens=5 "
    "model.projector.connectors.pooled.width=21"
).split()


def install() -> None:
    """Make the packages of `examples/` importable in this process and in those that it starts."""
    for name in PACKAGES:
        if (folder := str(EXAMPLES / name)) not in sys.path:
            sys.path.append(folder)


def forget() -> None:
    """Remove the extensions of a test from this process, which others use after it."""
    from megavlm.config.registry import BUILT_IN, registry

    for name in [name for name in registry() if name != BUILT_IN]:
        del registry()[name]


def train_with_examples(argv: Sequence[str], run_dir: str) -> str | None:
    """`train` in a process that has the packages, from folders if the flags name some; returns the line of a user's
    mistake, if there is one.
    """
    from megavlm.errors import UserError
    from tests.support.training import train_composed

    install()
    try:
        train_composed(list(argv), run_dir)
    except UserError as error:
        return str(error)
    finally:
        forget()
    return None
