"""Answers are found in templates of many kinds, without knowing any of their marks."""

from __future__ import annotations

import pytest

from megavlm.data.chat.spans import openings_of, skeleton
from megavlm.data.chat.template import ChatTemplate, TemplateError
from megavlm.families import CHAT_TEMPLATES

SPECIALS = (("bos_token", "<s>"), ("eos_token", "</s>"))
TALK = [("user", "Why? "), ("assistant", "So."), ("user", "<b>"), ("assistant", " Yes\n")]

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (  # what ends the conversation is not what ends a turn
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
LAST_LINE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
)
SPACES = "{% for m in messages %}{{ m.role.upper() + ': ' + m.content + ' ' }}{% endfor %}"
DATED = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "answers", "cuts", "opening"),
    [
        (LLAMA2, ["So. </s>", "Yes </s>"], ["</s>", "</s>"], ""),
        (GEMMA, ["So.<end_of_turn>", "Yes<end_of_turn>"], ["turn>\n", "turn>\n"], "<s>"),
        (PHI3, ["So.<|end|>", " Yes\n<|end|>\n</s>"], ["<|end|>\n", "</s>"], ""),
        (LAST_LINE, ["So.\n", " Yes\n\n</s>"], ["So.\n", "</s>"], ""),
        (SPACES, ["So.", " Yes\n"], ["So. ", "\n "], ""),
        (DATED, ["So.</assistant>", " Yes\n</assistant>"], ["assistant>"] * 2, "26 Jul 2024"),
        (CHAT_TEMPLATES["mistral"].jinja, [" So.</s>", "  Yes\n</s>"], ["</s>", "</s>"], "<s>"),
    ],
    ids=["llama2", "gemma", "phi3", "last line", "spaces", "dated", "mistral"],
)
def test_answers_cuts_and_openings(template: str, answers: list[str], cuts: list[str], opening: str) -> None:
    chat = ChatTemplate(template, SPECIALS)
    rendered = chat.render([{"role": role, "content": text} for role, text in TALK])
    found = skeleton(chat, [(role, None) for role, _ in TALK]).spans(rendered, [text for _, text in TALK])
    texts = [rendered[start:end] for start, end in found.answers]
    assert [text.lstrip(" ") for text in texts] == [answer.lstrip(" ") for answer in answers]
    assert [rendered[:cut].endswith(end) for cut, end in zip(found.cuts, cuts, strict=True)] == [True, True]
    assert found.cuts[-1] == len(rendered)
    openings, _ = openings_of(chat, in_parts=False)
    assert (openings[0][0] if openings else "") == opening


def test_a_template_that_rewrites_what_is_said_has_no_skeleton_for_it() -> None:
    chat = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content | replace('a', 'b') }}\n{% endfor %}")
    shape = [("user", None), ("assistant", None)]
    said = ["a?", "No."]
    rendered = chat.render([{"role": role, "content": text} for (role, _), text in zip(shape, said, strict=True)])
    assert skeleton(chat, shape).spans(rendered, said) is None
    with pytest.raises(TemplateError, match="leaves out"):
        skeleton(ChatTemplate("{{ messages[0].content }}"), shape)
