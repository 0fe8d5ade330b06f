"""`config.json` as its families read it: nested, with the defaults of Transformers' classes, strict about meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from megavlm.errors import UserError
from megavlm.families.shared.expected import check_setting


@dataclass(frozen=True)
class Settings:
    """Holds a section of a `config.json`. `where` names it in messages."""

    values: Mapping[str, Any]
    where: str

    def get(self, name: str, default: Any) -> Any:
        """Return a setting; what is absent or null has the default of the configuration's class.

        Raises UserError for a type or size that no model has.
        """
        value = self.values.get(name)
        check_setting(name, value, self.where)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """Return a setting without a default."""
        value = self.get(name, None)
        if value is None:
            raise UserError(f"{self.where} has no {name!r}: this folder is incomplete or of another kind")
        return value

    def section(self, name: str) -> Settings:
        """Return a nested section, empty where it is absent."""
        values = self.get(name, {})
        if not isinstance(values, Mapping):
            raise UserError(f"{self.where}: {name!r} is no section: the file is damaged")
        return Settings(values, f"{self.where}: {name}")

    def square(self, name: str, default: int) -> int:
        """Return a side length that may be written as [side, side]."""
        value = self.get(name, default)
        sides = {value} if isinstance(value, int) else set(value)
        if len(sides) != 1:
            refuse(self, name, "only square ones are known here")
        return int(sides.pop())

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Return a setting translated to the value of `ModelConfig` for it."""
        value = self.get(name, default)
        if value not in choices:
            refuse(self, name, f"known are {', '.join(choices)}")
        return choices[value]

    def require(self, name: str, *expected: Any, why: str) -> None:
        """Refuse anything but the given values; absent is fine."""
        if self.get(name, expected[0]) not in expected:
            refuse(self, name, why)


def refuse(settings: Settings, name: str, why: str) -> NoReturn:
    """Raise UserError for a setting that is known but not supported: nothing else is computed in its place."""
    raise UserError(f"{settings.where}: {name} = {settings.values.get(name)!r:.200} is not supported: {why}")
