"""Templates are programs of other people: what they do wrong is one line."""

from __future__ import annotations

import pytest

from megavlm.data.chat.template import ChatTemplate, TemplateError

TALK = [{"role": "user", "content": "Hi \ud800 ü\n"}, {"role": "assistant", "content": "Hello"}]
WRONG = {
    "macro": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "sandbox": "{{ ''.__class__.__mro__ }}",
    "refusal": "{{ raise_exception('no\x1b[2J') }}",
    "change": "{{ messages.append(1) }}",
    "not one": "{% for %}",
}


@pytest.mark.parametrize("source", WRONG.values(), ids=list(WRONG))
def test_a_wrong_template_is_one_line_and_the_next_one_works(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(TALK)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert ChatTemplate("{{ messages[0].content }}{{ bos }}", (("bos", "<s>"),)).render(TALK) == "Hi \ud800 ü\n<s>"
