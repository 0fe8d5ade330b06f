"""Templates are programs of other people: what they write is bounded, and so is the time that they take."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from megavlm.data.chat.template import _RENDERER, ChatTemplate, TemplateError
from megavlm.families import CHAT_TEMPLATES

TALK = [{"role": "user", "content": "Hi \ud800 ü\n"}, {"role": "assistant", "content": "Hello"}]
GREEDY = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text": "{{ 'x' * 10**10 }}",
    "list": "{{ ([0] * 10**10) | length }}",
    "number": "{{ 9 ** (9 ** 9) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "centre": "{{ 'x'.center(10**10) }}",
    "filter": "{{ 'x' | center(10**10) }}",
    "doubled text": "{% set a = namespace(b='x') %}{% for _ in range(99) %}{% set a.b = a.b ~ a.b %}{% endfor %}",
    "doubled list": "{% set a = namespace(b=[1]) %}{% for _ in range(99) %}{% set a.b = a.b + a.b %}{% endfor %}",
    "doubled block": "{% set a %}x{% endset %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60 + "{{ a }}",
    "nested list": "{% set a = namespace(b=[]) %}{% for _ in range(60) %}{% set a.b = [a.b, a.b] %}{% endfor %}"
    "{{ a.b }}",
    "equal lists": "{% set a = namespace(b=[], c=[]) %}{% for _ in range(60) %}{% set a.b = [a.b, a.b] %}"
    "{% set a.c = [a.c, a.c] %}{% endfor %}{{ a.b == a.c }}",
    "macro": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "macro of two": "{% macro a(n) %}{% if n %}{{ a(n-1) }}{{ a(n-1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested sum": "{{ " + "+".join(["1"] * 20_000) + " }}",
    "lipsum": "{{ lipsum(n=10**8) }}",
    "replace": "{{ ('x' * 10**6) | replace('', 'x' * 10**6) }}",
    "long": "{% for _ in range(9999) %}{{ 'x' * 10000 }}{% endfor %}",
    "longer than any conversation": "{{ 'x' * 80000 }}",  # not too much for a process, and a cost to the tokenizer
    "sandbox": "{{ ''.__class__.__mro__ }}{{ raise_exception('no') }}",
    "not one": "{% for %}",
}


SLOW = ("equal lists", "nested list", "macro of two", "lipsum")  # they take all of their time, as do the loops


@pytest.mark.parametrize(
    "source",
    [pytest.param(text, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, text in GREEDY.items()],
)
def test_a_greedy_template_is_one_line_and_the_next_one_works(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(TALK)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000
    assert ChatTemplate("{{ messages[0].content }}").render(TALK) == TALK[0]["content"]


def text_of_a_fork() -> str:
    return ChatTemplate("{{ messages[1].content }}{{ bos }}", (("bos", "<s>"),)).render(TALK)


def test_forks_and_what_ends_the_process_change_nothing() -> None:
    before = text_of_a_fork()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.starmap(text_of_a_fork, [()] * 8) == [before] * 8
    assert _RENDERER._process is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        os.kill(_RENDERER._process.pid, number)
        assert text_of_a_fork() == before == "Hello<s>"


def test_a_fast_template_stays_fast() -> None:
    """Ten thousand conversations take seconds: the limits are per conversation and cost a message between processes."""
    template = ChatTemplate(CHAT_TEMPLATES["chatml"].jinja)
    template.render(TALK)
    began = time.process_time()
    for _ in range(500):
        template.render(TALK)
    assert time.process_time() - began < 0.5
