"""Render chat templates: Jinja's sandbox, with what Transformers gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megavlm.errors import one_line

Message = Mapping[str, Any]

# A template that writes today's date would give different tokens tomorrow. This is the date that Llama's templates use
# if there is no clock.
_TODAY = date(2024, 7, 26)


class TemplateError(ValueError):
    """The template has an error or refuses a conversation."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template and what it may ask for: special tokens (`bos_token`, `eos_token`, …), `enable_thinking`."""

    source: str
    specials: tuple[tuple[str, str | bool], ...] = ()

    def render(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        """Return a conversation's text; `generate` adds the generation prompt, which precedes an answer.

        Raises TemplateError.
        """
        given = {"messages": messages, "add_generation_prompt": generate, "tools": None, "documents": None}
        try:
            return _compiled(self.source).render(given, **dict(self.specials))
        except Exception as error:  # whatever a template does
            reason = one_line(str(error).strip().partition("\n")[0][:500])
            raise TemplateError(f"{reason} ({type(error).__name__})") from error


class _Generation(Extension):
    """Renders what is between `{% generation %}` and `{% endgeneration %}`, which Transformers uses to mark answers."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(source)


def _to_json(value: Any, **options: Any) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
