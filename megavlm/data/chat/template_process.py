"""Render chat templates in Jinja's sandbox: the program of a process with limits on memory and time.

A template is a program that comes with a model. The sandbox blocks its access to Python's objects, but nothing in Jinja
prevents endless loops or texts of gigabytes. The operating system's limits on this process do. The process is started
by `megavlm.data.chat.template`, imports nothing of megavlm, and ends with its input. Each request is a line of JSON
`[source, specials, messages, add_generation_prompt]`. Each reply is a line `[text, error]`, one of which is null.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import date
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2.0  # processor time for one conversation: a thousand times that of the longest
MEMORY = 2**30  # bytes of address space, Python included
# Limit on the characters that a template may write, since the main process has to tokenize them.
FREE, TIMES = 2**16, 64  # FREE characters, plus TIMES for each character of the conversation

# A template that writes today's date would give different tokens tomorrow. This is the date that Llama's templates use
# if there is no clock.
_TODAY = date(2024, 7, 26)


class _Generation(Extension):
    """Renders the text between `{% generation %}` and `{% endgeneration %}`, Transformers' tags around answers."""

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
    """Return JSON without HTML escapes, unlike Jinja's own `tojson` filter."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def answer(source: str, specials: dict[str, str], messages: list[Any], generate: bool) -> list[str | None]:
    """Render a conversation: return [text, None], or [None, error message]."""
    try:
        text = _compiled(source).render(
            messages=messages, add_generation_prompt=generate, tools=None, documents=None, **specials
        )
    except Exception as error:  # whatever a template does
        reason = str(error).strip().partition("\n")[0][:500]
        return [None, f"{reason} ({type(error).__name__})"]
    given = len(json.dumps(messages, ensure_ascii=False))
    if len(text) > FREE + TIMES * given:
        return [None, f"it writes {len(text)} characters for a conversation of {given}"]
    return [text, None]


def main() -> None:
    """Answer requests until the input ends; a template that takes too long ends the process."""
    for limit, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, value))
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)  # meant for the run, which goes on to its checkpoint
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends a process that does not expect it
        reply = json.dumps(answer(*request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(f"{reply}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
