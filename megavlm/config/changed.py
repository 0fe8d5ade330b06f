"""Say in which options a run that goes on differs from what it did before."""

from __future__ import annotations

from typing import Any

from megavlm.config.fields import options, value_at
from megavlm.config.resolve import is_set
from megavlm.config.schema import Config

# The former neither compute nor read anything else; other sizes of the model are refused, with a line of their own.
_ASIDE = ("run", "logging", "model.vision", "model.projector", "model.language")


def changed_options(before: Config, now: Config) -> str | None:
    """Return a line with each option that has another value than before, or None if there is none.

    Both configurations are as given, with the values of `start_defaults`.
    """
    changed = [
        f"{option.name} {_shown(new)} (before: {_shown(old)})"
        for option in options()
        if option.section not in _ASIDE
        and (new := value_at(now, option.path)) != (old := value_at(before, option.path))
    ]
    if not changed:
        return None
    bend = "; from here, the learning rate follows the schedule of the new length" if _bends(before, now) else ""
    return f"this run goes on with other options: {', '.join(changed)}{bend}"


def _bends(before: Config, now: Config) -> bool:
    """Return whether the learning rate jumps, because it decays until the last step and that has moved."""
    optimizer = now.optimizer
    moved = (before.train.train_iters, before.train.epochs) != (now.train.train_iters, now.train.epochs)
    return moved and not is_set(optimizer, "lr_decay_iters") and optimizer.lr_decay_style != "constant"


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "default"
    if isinstance(value, tuple):
        return " ".join(str(getattr(each, "path", each)) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
