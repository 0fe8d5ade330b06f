"""The package's own connectors. A new connector needs a module here and one in `megavlm/model/connectors`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from megavlm.arch.connector import Connector
from megavlm.config.registry import BUILT_IN, Extension, registry


def _declared() -> tuple[Connector, ...]:
    """Return the connectors of all modules of this package, in the modules' order."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    connectors = (value for module in modules for value in vars(module).values() if isinstance(value, Connector))
    return tuple({id(connector): connector for connector in connectors}.values())


registry()[BUILT_IN] = Extension(connectors=_declared())
