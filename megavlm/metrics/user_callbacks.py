"""Load the callbacks that a user names with `--callback my_module:MyCallback`: their own code, with their rights."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from megavlm.config.messages import described, did_you_mean, plain
from megavlm.config.registry import Entry, registered
from megavlm.errors import UserError
from megavlm.metrics.callback import Callback


def load(names: Sequence[str]) -> list[Callback]:
    """Import, make and return callbacks, in the order of their names. Raises UserError, which names the one that fails.

    Modules are found where Python finds them, and then in the working directory.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return [_load(name) for name in names]


def _load(name: str) -> Callback:
    entry = registered("callbacks").get(name)
    module_name, _, attribute = (entry.code if isinstance(entry, Entry) else name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"--callback {plain(name)}: Python finds no module {plain(error.name)}: add its folder to PYTHONPATH"
            ) from error
        raise UserError(f"--callback {plain(name)} cannot be imported: {described(error)}") from error
    except Exception as error:
        raise UserError(f"--callback {plain(name)} cannot be imported: {described(error)}") from error
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, [name for name, each in vars(module).items() if isinstance(each, type)])
        hint = hint or ": name a class that it has"
        raise UserError(f"--callback {plain(name)}: {plain(module_name)} has no {plain(attribute)}{hint}")
    try:
        made = getattr(module, attribute)()
    except Exception as error:
        raise UserError(f"--callback {plain(name)} cannot be made: {described(error)}") from error
    if not isinstance(made, Callback):
        raise UserError(
            f"--callback {plain(name)} makes a {type(made).__name__}: derive it from megavlm.metrics.callback.Callback"
        )
    return made
