"""Answers are found in templates of many kinds, what templates write is bounded, and long talks are split."""

from __future__ import annotations

import multiprocessing
import os
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.data.chat import EncodedConversation, EncodedTurn, split
from megavlm.data.chat.spans import openings_of, skeleton
from megavlm.data.chat.template import _RENDERER, ChatTemplate, TemplateError
from megavlm.families import CHAT_TEMPLATES
from megavlm.inputs.bad_sample import BadSample, Reason
from tests.support.hostile import reason_of
from tests.support.tokenizers import TEMPLATES

SPECIALS = (("bos_token", "<s>"), ("eos_token", "</s>"))
TALK = [("user", "Why? "), ("assistant", "So."), ("user", "<b>"), ("assistant", " Yes\n")]

SPACES = "{% for m in messages %}{{ m.role.upper() + ': ' + m.content + ' ' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "answers", "cuts", "opening"),
    [
        (TEMPLATES["llama2"], ["So. </s>", "Yes </s>"], ["</s>", "</s>"], ""),
        (TEMPLATES["gemma2"], ["So.<end_of_turn>", "Yes<end_of_turn>"], ["turn>\n", "turn>\n"], "<s>"),
        (TEMPLATES["phi3"], ["So.<|end|>", " Yes\n<|end|>\n</s>"], ["<|end|>\n", "</s>"], ""),
        (TEMPLATES["last_line"], ["So.\n", " Yes\n\n</s>"], ["So.\n", "</s>"], ""),
        (SPACES, ["So.", " Yes\n"], ["So. ", "\n "], ""),
        (TEMPLATES["dated"], ["So.</assistant>", " Yes\n</assistant>"], ["assistant>"] * 2, "26 Jul 2024"),
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
    openings, _ = openings_of(chat, in_parts=False, system_in_parts=False)
    assert (openings[0][0] if openings else "") == opening


def test_a_template_that_rewrites_what_is_said_has_no_skeleton_for_it() -> None:
    chat = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content | replace('a', 'b') }}\n{% endfor %}")
    shape = [("user", None), ("assistant", None)]
    said = ["a?", "No."]
    rendered = chat.render([{"role": role, "content": text} for (role, _), text in zip(shape, said, strict=True)])
    assert skeleton(chat, shape).spans(rendered, said) is None
    with pytest.raises(TemplateError, match="leaves out"):
        skeleton(ChatTemplate("{{ messages[0].content }}"), shape)


RENDERED = [{"role": "user", "content": "Hi \ud800 ü\n"}, {"role": "assistant", "content": "Hello"}]
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
        ChatTemplate(source).render(RENDERED)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000
    assert ChatTemplate("{{ messages[0].content }}").render(RENDERED) == RENDERED[0]["content"]


def text_of_a_fork() -> str:
    return ChatTemplate("{{ messages[1].content }}{{ bos }}", (("bos", "<s>"),)).render(RENDERED)


def test_forks_and_what_ends_the_process_change_nothing() -> None:
    before = text_of_a_fork()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.starmap(text_of_a_fork, [()] * 8) == [before] * 8
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        os.kill(_RENDERER._process.pid, number)
        assert text_of_a_fork() == before == "Hello<s>"


IMAGE = -1


def turn(length: int, *, images: int = 0, trained: bool = True, divisible: bool = False, first: int = 0) -> EncodedTurn:
    """Tokens first, first + 1, …, the last two of which are trained; images are single tokens at the start."""
    tokens = np.arange(first, first + length)
    tokens[:images] = IMAGE
    mask = np.arange(length) >= (0 if divisible else length - 2 if trained else length)
    return EncodedTurn(tokens, mask, images, divisible=divisible)


def conversation(*turns: EncodedTurn, opening: int = 1) -> EncodedConversation:
    return EncodedConversation(EncodedTurn(np.full(opening, 7), np.zeros(opening, bool), 0), turns)


def lengths(encoded: EncodedConversation, seq_length: int) -> tuple[list[int], int]:
    found = split(encoded, seq_length)
    return [len(piece) for piece in found.pieces], found.dropped


def test_the_first_piece_is_the_longest_beginning_that_fits_and_each_begins_with_the_opening() -> None:
    encoded = conversation(turn(5), turn(5), turn(6), opening=3)
    assert lengths(encoded, 13) == ([13, 9], 0)
    assert all(piece.tokens[:3].tolist() == [7, 7, 7] for piece in split(encoded, 13).pieces)


def test_nothing_follows_an_image_into_another_piece() -> None:
    assert lengths(conversation(turn(5, images=1), turn(5), turn(5)), 11) == ([11], 1)
    assert lengths(conversation(turn(5, images=1), turn(9), turn(3)), 8) == ([6], 2)


def test_images_of_a_later_piece_are_its_own() -> None:
    found = split(conversation(turn(6), turn(6, images=2), turn(6)), 7)
    assert [piece.images for piece in found.pieces] == [range(0, 0), range(0, 2)]
    assert found.dropped == 1


def test_an_exchange_that_fits_nowhere_is_dropped() -> None:
    assert lengths(conversation(turn(20), turn(5)), 10) == ([6], 1)
    assert lengths(conversation(turn(20, images=1), turn(5), turn(4)), 30) == ([30], 0)
    assert reason_of(split, conversation(turn(20, images=1), turn(5)), 10) is Reason.TOO_LONG


def test_turns_at_the_end_that_train_nothing_are_left_out_with_their_images() -> None:
    found = split(conversation(turn(5, images=1), turn(5, images=1, trained=False)), 20)
    assert [(len(piece), piece.images) for piece in found.pieces] == [(6, range(0, 1))]
    assert reason_of(split, conversation(turn(5, trained=False)), 20) is Reason.EMPTY


def test_text_is_cut_anywhere_but_not_behind_an_image() -> None:
    assert lengths(conversation(turn(25, divisible=True)), 10) == ([10, 10, 8], 0)
    pictured = conversation(turn(4, divisible=True), turn(3, images=1), turn(9, divisible=True))
    assert lengths(pictured, 10) == ([10], 1)


TURNS = st.lists(
    st.builds(
        lambda length, images, trained, divisible: (length, images if not divisible else 0, trained, divisible),
        st.integers(4, 12),
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)  # a busy machine is no failure
@given(shapes=TURNS, seq_length=st.integers(2, 30), opening=st.integers(0, 3))
def test_whatever_comes(shapes: list[tuple[int, int, bool, bool]], seq_length: int, opening: int) -> None:
    turns, first = [], 100
    for length, images, trained, divisible in shapes:
        turns.append(turn(length, images=images, trained=trained, divisible=divisible, first=first))
        first += length
    encoded = conversation(*turns, opening=opening)
    try:
        found = split(encoded, seq_length)
    except BadSample:
        return
    owner = {int(token): n for n, t in enumerate(turns) for token in t.tokens if token != IMAGE}
    pictured = [n for n, t in enumerate(turns) if t.images]
    after: list[int] = []
    for piece in found.pieces:
        assert len(piece) <= seq_length
        assert piece.trained[1:].any()
        assert (piece.tokens == IMAGE).sum() == len(piece.images)
        body = piece.tokens[opening:]
        words = body[body != IMAGE].tolist()
        assert words == sorted(words)
        inside = sorted({owner[word] for word in words})
        for n in inside:  # nothing is cut that must not be, and no token of a turn is left out
            if not turns[n].divisible:
                assert set(turns[n].tokens.tolist()) <= set(body.tolist())
        assert not [n for n in pictured if n < inside[0]], "its question may be about an image that is not in it"
        after += words
    assert after == sorted(after)
    assert len(after) == len(set(after)), "no token twice"
    images = [image for piece in found.pieces for image in piece.images]
    assert images == sorted(set(images))
    if len(encoded) <= seq_length:
        assert len(found.pieces) == 1
        assert found.dropped == 0
