"""Where in a rendered conversation the assistant speaks, for any template.

A template is a program: what it writes around a text is found by rendering a conversation whose texts are marks that no
text holds. The gaps between the marks are the template's own words. The rendered conversation must then be these gaps
with the real texts in between, character by character; else (a template that cuts its reasoning out of an answer, say)
renderings of its beginnings must be beginnings of it.
"""

from __future__ import annotations

import re
import string
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from megavlm.data.chat.template import ChatTemplate, Message, TemplateError

Kind = tuple[str, tuple[str, ...] | None]  # role; its parts (text, image), or None where content is one string
Place = tuple[int, int]  # gap, character in it

_MARK = re.compile("\ue000(\\d+)\ue001")
_BEGUN = re.compile(r"[<\[{#|/]+\w*$")  # two marks that begin alike: <|user|>, </s>


@dataclass(frozen=True)
class Spans:
    """Characters of a rendered conversation.

    The assistant's turn k is answers[k] = [start, end), from what the model would be prompted with up to the mark that
    ends its turn. Up to `opening` the text is what any conversation begins with; up to cuts[k], where a new user turn
    may begin, lie the exchange k and all before it.
    """

    opening: int
    answers: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class Skeleton:
    """A template's own words for conversations of one shape: gaps[0] text gaps[1] … text gaps[-1]."""

    gaps: tuple[str, ...]
    order: tuple[int, ...]  # which text stands after which gap
    answers: tuple[tuple[Place, Place], ...]
    cuts: tuple[Place, ...]
    opening: Place = (0, 0)

    def spans(self, rendered: str, texts: Sequence[str]) -> Spans | None:
        """The same places where the marks are real texts, some of which the template may have stripped."""
        if not rendered.startswith(self.gaps[0]):
            return None
        at, starts = len(self.gaps[0]), [0]
        for number, gap in zip(self.order, self.gaps[1:], strict=True):
            text = texts[number]
            for written in (text, text.strip(), text.lstrip(), text.rstrip()):
                if rendered.startswith(written + gap, at):
                    break
            else:
                return None
            at += len(written)
            starts.append(at)
            at += len(gap)
        if at != len(rendered):
            return None

        def place(where: Place) -> int:
            return starts[where[0]] + where[1]

        answers = tuple((place(start), place(end)) for start, end in self.answers)
        return Spans(place(self.opening), answers, tuple(map(place, self.cuts)))


def marked(shape: Sequence[Kind]) -> tuple[list[Message], list[int]]:
    """A conversation of marks, and which turn each belongs to."""
    messages: list[Message] = []
    turns: list[int] = []

    def mark() -> str:
        turns.append(len(messages))
        return f"\ue000{len(turns) - 1}\ue001"

    for role, parts in shape:
        content: Any
        if parts is None:
            content = mark()
        else:
            content = [{"type": "image"} if part == "image" else {"type": "text", "text": mark()} for part in parts]
        messages.append({"role": role, "content": content})
    return messages, turns


def skeleton(template: ChatTemplate, shape: Sequence[Kind]) -> Skeleton:
    """What a template writes around the texts of a conversation of this shape, `opening` apart.

    Raises TemplateError where it refuses the shape, leaves a text out or repeats one.
    """
    messages, turns = marked(shape)
    rendered = template.render(messages)
    found = list(_MARK.finditer(rendered))
    order = [int(match[1]) for match in found]
    if sorted(order) != list(range(len(turns))):
        raise TemplateError("it leaves out or repeats what is said")
    ends = [0, *(match.end() for match in found)]
    starts = [*(match.start() for match in found), len(rendered)]
    gaps = tuple(rendered[end:start] for end, start in zip(ends, starts, strict=True))

    def place(at: int) -> Place:
        gap = bisect_left(starts, at)
        return gap, at - ends[gap]

    answers, cuts = [], []
    for turn, (role, _) in enumerate(shape):
        marks = [match for match in found if turns[int(match[1])] == turn]
        if role != "assistant" or not marks:
            continue
        last = turn == len(shape) - 1
        start = _start(template, messages[:turn], rendered, marks[0].start())
        after = marks[-1].end()
        tail = rendered[after:] if last else _tail(template, messages[: turn + 1], rendered, marks[-1])
        answers.append((place(start), place(after + len(_end_mark(tail)))))
        cuts.append(place(after + len(tail)))
    return Skeleton(gaps, tuple(order), tuple(answers), tuple(cuts))


def _start(template: ChatTemplate, before: list[Message], rendered: str, text: int) -> int:
    """Where an answer begins: behind the prompt for it, or at its text where the template knows no such prompt."""
    if not before:
        return text
    prompt = template.render(before, generate=True)
    asks = prompt != template.render(before)
    return len(prompt) if asks and len(prompt) <= text and rendered.startswith(prompt) else text


def _tail(template: ChatTemplate, messages: list[Message], rendered: str, mark: re.Match[str]) -> str:
    """What follows an answer before anything else is said.

    Some templates end conversations with a mark of its own: what follows the answer there, and here as well, is meant.
    """
    alone = template.render(messages)
    tail, rest = alone[alone.rindex(mark[0]) + len(mark[0]) :], rendered[mark.end() :]
    if rest.startswith(tail):
        return tail
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(tail, rest, strict=False))
    same = "".join(character for character, _ in pairs)
    if any(text[len(same) : len(same) + 1].isalnum() for text in (tail, rest)):
        same = same.rstrip(string.ascii_letters + string.digits)
    return _BEGUN.sub("", same)


def _end_mark(tail: str) -> str:
    """What of the text after an answer ends it: all but space at its end, or a line break where there is no more."""
    if mark := tail.rstrip():
        return mark
    return tail[: tail.index("\n") + 1] if "\n" in tail else ""


def by_prefixes(template: ChatTemplate, messages: Sequence[Message], rendered: str, *, only_last: bool) -> Spans:
    """Spans of a conversation whose texts the template rewrites, one exchange after the other.

    Raises TemplateError where what it writes for an earlier turn depends on later ones.
    """
    speakers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    answers, cuts = [], []
    for turn in speakers[-1:] if only_last else speakers:
        prompt = template.render(messages[:turn], generate=True)
        whole = template.render(messages[: turn + 1])
        if not (rendered.startswith(whole) and whole.startswith(prompt)):
            raise TemplateError("what it writes for an answer is not what follows the prompt for it")
        answers.append((len(prompt), max(len(prompt), len(whole.rstrip()))))
        cuts.append(len(whole))
    return Spans(0, tuple(answers), tuple(cuts))
