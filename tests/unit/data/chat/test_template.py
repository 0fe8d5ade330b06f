"""Templates are programs of other people: what they write is bounded, and so is the time that they take."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from megavlm.data.chat.template import _RENDERER, ChatTemplate, TemplateError

TALK = [{"role": "user", "content": "Hi \ud800 ü\n"}, {"role": "assistant", "content": "Hello"}]
GREEDY = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text": "{{ 'x' * 10**10 }}",
    "doubled text": "{% set a = namespace(b='x') %}{% for _ in range(99) %}{% set a.b = a.b ~ a.b %}{% endfor %}",
    "macro": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "longer than any conversation": "{{ 'x' * 80000 }}",  # not too much for a process, and a cost to the tokenizer
    "sandbox": "{{ ''.__class__.__mro__ }}{{ raise_exception('no') }}",
    "not one": "{% for %}",
}


@pytest.mark.parametrize("source", GREEDY.values(), ids=list(GREEDY))
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
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        os.kill(_RENDERER._process.pid, number)
        assert text_of_a_fork() == before == "Hello<s>"
