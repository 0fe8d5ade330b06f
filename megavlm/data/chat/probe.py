"""Find a chat template, and find out what it does by rendering short conversations with it."""

from __future__ import annotations

from pathlib import Path

from megavlm.data.chat.spans import Kind, skeleton
from megavlm.data.chat.template import ChatTemplate, TemplateError
from megavlm.data.tokenizers.text import TextTokenizer
from megavlm.errors import UserError
from megavlm.families import CHAT_TEMPLATES, chat_template_of
from megavlm.paths import read_bytes

_LARGEST = 2**24  # bytes of a template


def source_of(tokenizer: TextTokenizer, template: str, model_type: str | None) -> str | None:
    """Return the Jinja source of the template that `--chat-template` names; None if `auto` finds none."""
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
    """Return whether the template takes messages in parts, and what it writes for an image.

    Raises TemplateError if it writes neither the text of a part nor that of a string.
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


def openings_of(template: ChatTemplate, in_parts: bool) -> tuple[tuple[tuple[str, str], ...], str]:
    """Return the template's own text before the first user turn, and the end of an answer, which is trained.

    The first is a list of openings: (text, "") without a system turn, then the texts before and after the system turn
    with one. What a second exchange begins with, too, belongs to a user turn and not to the opening. An opening is left
    out if it cannot be told from the user turn, as when a template writes the system turn into the first user turn.
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
        told = skeleton(template, (("system", kinds), *talk))
    except TemplateError:
        return tuple(openings), end_of_turn
    if told.order[:2] == (0, 1) and told.gaps[1].endswith(header):
        openings.append((told.gaps[0], told.gaps[1].removesuffix(header)))
    return tuple(openings), end_of_turn
