"""Find the assistant's answers in a rendered conversation, for any chat template.

A template is a program. To find the text that it writes around each turn, a conversation whose texts are unique marks
is rendered; the text between the marks is the template's own ("gaps"). A real conversation must then consist of these
gaps with the real texts in between, character by character. If it does not (some templates cut the reasoning out of an
answer), the rendering of each prefix of the conversation must be a prefix of the whole rendering. The template's
capabilities, such as messages in parts, are detected by rendering short conversations.
"""

from __future__ import annotations

import re
import string
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from megavlm.data.chat.template import ChatTemplate, Message, TemplateError
from megavlm.data.tokenizers import TextTokenizer
from megavlm.errors import UserError
from megavlm.families import CHAT_TEMPLATES, chat_template_of
from megavlm.paths import read_bytes

Kind = tuple[str, tuple[str, ...] | None]  # role; its parts (text, image), or None where content is one string
GapOffset = tuple[int, int]  # number of a gap, offset in it

_MARK = re.compile("\ue000(\\d+)\ue001")
_EMPTY_THOUGHTS = re.compile(r"\s*<[^<>]+>\w*\s*<[^<>]+>\s*")
_BEGUN = re.compile(r"[<\[{#|/]+\w*$")  # a common beginning of two different marks, like the "<" of <|user|> and </s>


@dataclass(frozen=True)
class TurnSpans:
    """Character offsets of the opening, the answers and the possible splits in a rendered conversation.

    answers[k] = [start, end) is the assistant's turn k, from the end of the generation prompt to the end of the mark
    that ends the turn. The text before `opening` begins every piece of the conversation. cuts[k] is the end of exchange
    k, where the conversation may be split.
    """

    opening: int
    answers: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class Skeleton:
    """A template's own text for conversations of one shape: gaps[0] text gaps[1] … text gaps[-1]."""

    gaps: tuple[str, ...]
    order: tuple[int, ...]  # number of the text after each gap but the last
    answers: tuple[tuple[GapOffset, GapOffset], ...]
    cuts: tuple[GapOffset, ...]
    opening: GapOffset = (0, 0)

    def spans(self, rendered: str, texts: Sequence[str]) -> TurnSpans | None:
        """Return the offsets in a conversation rendered with real texts, which the template may have stripped.

        Returns None if the rendered text does not match the gaps.
        """
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

        def place(where: GapOffset) -> int:
            return starts[where[0]] + where[1]

        answers = tuple((place(start), place(end)) for start, end in self.answers)
        return TurnSpans(place(self.opening), answers, tuple(map(place, self.cuts)))


def marked(shape: Sequence[Kind]) -> tuple[list[Message], list[int]]:
    """Return a conversation of the given shape whose texts are unique marks, and the turn number of each mark."""
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
    """Return the text that a template writes around the texts of a conversation of this shape; `opening` is not set.

    Raises TemplateError if the template refuses the shape, leaves a text out or repeats one.
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

    def place(at: int) -> GapOffset:
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
    """Return the offset at which an answer begins: after the generation prompt, else at the answer's text."""
    if not before:
        return text
    prompt = template.render(before, generate=True)
    asks = prompt != template.render(before)
    return len(prompt) if asks and len(prompt) <= text and rendered.startswith(prompt) else text


def _tail(template: ChatTemplate, messages: list[Message], rendered: str, mark: re.Match[str]) -> str:
    """Return the template's text between an answer and the next turn.

    Some templates end a conversation with an extra mark. Then the result is the common prefix of the text after the
    answer here and of the text after the answer at the end of a conversation.
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
    """Return the end mark in the text after an answer: the text without trailing white space.

    If all of it is white space, the mark reaches to the first line break; "" if there is none.
    """
    if mark := tail.rstrip():
        return mark
    return tail[: tail.index("\n") + 1] if "\n" in tail else ""


def by_prefixes(template: ChatTemplate, messages: Sequence[Message], rendered: str, *, only_last: bool) -> TurnSpans:
    """Return the offsets of a conversation whose texts the template rewrites, from renderings of its prefixes.

    Raises TemplateError if the rendering of an earlier turn depends on later turns.
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
    return TurnSpans(0, tuple(answers), tuple(cuts))


_LARGEST = 2**24  # bytes of a template


def source_of(tokenizer: TextTokenizer, template: str, model_type: str | None) -> str | None:
    """Return the Jinja source of the template that `--chat-template` names; None if `auto` finds no template.

    Raises UserError for an unknown name, an unreadable file, or special tokens that the tokenizer lacks.
    """
    if template.endswith((".jinja", ".jinja2", ".j2")):
        try:
            return read_bytes(Path(template), at_most=_LARGEST).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--chat-template {template} cannot be read: check the path") from error
    name = template
    if template == "auto":
        if tokenizer.chat_template is not None:
            return tokenizer.chat_template
        own = chat_template_of(model_type)
        if own is None:
            return None
        name = own.name
    if name not in CHAT_TEMPLATES:
        raise UserError(
            f"--chat-template {name} is unknown: use auto, one of {', '.join(CHAT_TEMPLATES)}, or a .jinja file"
        )
    missing = [token for token in CHAT_TEMPLATES[name].needs if not _has(tokenizer, token)]
    if missing:
        raise UserError(
            f"--chat-template {name} needs the tokens {' '.join(missing)}, which the tokenizer lacks: choose "
            "vicuna, mistral or plain"
        )
    return CHAT_TEMPLATES[name].jinja


def _has(tokenizer: TextTokenizer, token: str) -> bool:
    tokens = tokenizer.encode(token)
    return int((tokens.ends - tokens.starts).max()) == len(token)


def image_style(template: ChatTemplate, placeholder: str, image_text: str) -> tuple[bool, str]:
    """Return whether the template accepts messages in parts, and its text for an image.

    Raises TemplateError if the template renders the user's text neither from parts nor from a string.
    """
    word = "\ue000"
    complaint = "it leaves out what the user says"
    answer = [{"type": "text", "text": "x"}]
    parts = [{"type": "image"}, {"type": "text", "text": word}]
    try:
        rendered = template.render([{"role": "user", "content": parts}, {"role": "assistant", "content": answer}])
        if rendered.count(word) == 1 and "'type'" not in rendered:
            for written in (placeholder, image_text):
                if rendered.count(written) == 1:
                    return True, written
    except TemplateError:
        pass
    try:
        rendered = template.render([{"role": "user", "content": word}, {"role": "assistant", "content": "x"}])
        if rendered.count(word) == 1:
            return False, placeholder
    except TemplateError as error:
        complaint = str(error)
    raise TemplateError(complaint)


def takes_system_in_parts(template: ChatTemplate) -> bool:
    """Return whether a template that takes messages in parts takes those of a system turn, too (Gemma 4's does not)."""
    kinds = ("text",)
    try:
        skeleton(template, (("system", kinds), ("user", kinds), ("assistant", kinds)))
    except TemplateError:
        return False
    return True


def field_of_thoughts(template: ChatTemplate, in_parts: bool) -> str | None:
    """Return the field of a message that the template writes as thoughts before the answer; None if there is none."""
    word = "\ue000"
    content = [{"type": "text", "text": "x"}] if in_parts else "x"
    for name in ("reasoning_content", "thinking"):
        answer = {"role": "assistant", "content": content, name: word}
        with suppress(TemplateError):
            if word in template.render([{"role": "user", "content": content}, answer]):
                return name
    return None


def silence_of(template: ChatTemplate, in_parts: bool) -> tuple[str, str] | None:
    """Return the text before an answer, and the empty thoughts that follow it in the generation prompt alone; None if
    the template has none.
    """
    kinds = ("text",) if in_parts else None
    talk, _ = marked((("user", kinds), ("assistant", kinds)))
    asked, prompt, whole = template.render(talk[:1]), template.render(talk[:1], generate=True), template.render(talk)
    before = whole[: whole.rindex("\ue000")]
    header, thoughts = before.removeprefix(asked), prompt.removeprefix(before)
    fits = asked + header + thoughts == prompt and header and _EMPTY_THOUGHTS.fullmatch(thoughts)
    return (header, thoughts) if fits else None


def openings_of(
    template: ChatTemplate, in_parts: bool, *, system_in_parts: bool
) -> tuple[tuple[tuple[str, str], ...], str]:
    """Return the template's openings (its text before the first user turn), and the text that ends an answer.

    The openings are (text, "") for conversations without a system turn, then the texts before and after the system
    turn. Text that also begins a second exchange belongs to a user turn and not to the opening. An opening is left out
    if it cannot be separated from the user turn, for example if a template writes the system turn into the first user
    turn. The text that ends an answer is trained with the answer.
    """
    kinds = ("text",) if in_parts else None
    talk: tuple[Kind, ...] = (("user", kinds), ("assistant", kinds)) * 2
    bare = skeleton(template, talk)
    if len(bare.answers) != 2:
        raise TemplateError("it leaves out what the assistant says")
    gap, behind = bare.cuts[0]
    header = bare.gaps[gap][behind:] if gap == 2 else ""
    first_end = bare.answers[0][1]
    end_of_turn = bare.gaps[first_end[0]][: first_end[1]]
    if not header or not bare.gaps[0].endswith(header):
        return (), end_of_turn
    openings = [(bare.gaps[0].removesuffix(header), "")]
    try:
        with_system = skeleton(template, (("system", kinds if system_in_parts else None), *talk))
    except TemplateError:
        return tuple(openings), end_of_turn
    if with_system.order[:2] == (0, 1) and with_system.gaps[1].endswith(header):
        openings.append((with_system.gaps[0], with_system.gaps[1].removesuffix(header)))
    return tuple(openings), end_of_turn
