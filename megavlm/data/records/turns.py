"""From a record, as JSON or parquet give it, to a `Conversation`.

LLaVA's records and messages differ in names alone: `conversations` of `from` and `value`, or `messages` of `role` and
`content`. Both spellings are read in both. An `<image>` in a text stands for the next entry of the record's `image` or
`images`; the parts of a message may also hold their images themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from megavlm.config.messages import shown
from megavlm.data.records.pictures import PLACES, FindFile, image_of
from megavlm.data.types import BadSample, Conversation, ImageRef, Reason, Role, Turn

Shape = Literal["llava", "messages", "text"]
TAG = "<image>"
FIELD: dict[Shape, str] = {"llava": "conversations", "messages": "messages", "text": "text"}
COLUMNS = (*FIELD.values(), "system", "image", "images")  # all that is looked at in a record

_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image", "image_url", "input_image")


class _Slot:
    """Stands where one of the record's images belongs until it is known which."""


SLOT = _Slot()
Parts = list[str | ImageRef | _Slot]
Turns = list[tuple[Role, Parts]]


def shape_of(record: Any) -> Shape | None:
    """Which kind of record this is, by the fields it has."""
    if isinstance(record, Mapping):
        for shape, field in FIELD.items():
            if record.get(field) is not None:
                return shape
    return None


def conversation_of(record: Any, shape: Shape, find: FindFile) -> Conversation:
    """The conversation in `record`; `find` opens images by name. Raises BadSample, and nothing else."""
    try:
        return _conversation(record, shape, find)
    except RecursionError as error:
        raise BadSample(Reason.NOT_A_RECORD, "it is nested too deeply") from error


def _conversation(record: Any, shape: Shape, find: FindFile) -> Conversation:
    if not isinstance(record, Mapping):
        raise BadSample(Reason.NOT_A_RECORD, f"a record is an object with fields, not {shown(record)}")
    content = record.get(FIELD[shape])
    if content is None:
        raise BadSample(Reason.NOT_A_RECORD, f"no `{FIELD[shape]}` among its fields {shown(sorted(map(str, record)))}")
    if shape == "text":
        turns: Turns = [("text", _parts(content, find))]
    else:
        turns = _turns(content, record.get("system"), find)
    conversation = _placed(turns, [image_of(image, find) for image in _images(record)])
    if not any(_says_something(turn) for turn in conversation.turns if turn.role in ("assistant", "text")):
        raise BadSample(Reason.EMPTY, "it has no text" if shape == "text" else "the assistant says nothing")
    return conversation


def _turns(content: Any, system: Any, find: FindFile) -> Turns:
    if isinstance(content, str):  # tables often hold conversations as a column of JSON texts
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BadSample(Reason.NOT_A_RECORD, f"its turns are a text, and no JSON: {shown(content)}") from error
    if not isinstance(content, list):
        raise BadSample(Reason.NOT_A_RECORD, f"its turns are no list but {shown(content)}")
    if not content:
        raise BadSample(Reason.EMPTY, "it has no turns")
    turns: Turns = [("system", _parts(system, find))] if system else []
    for turn in content:
        if not isinstance(turn, Mapping):
            raise BadSample(Reason.NOT_A_RECORD, f"a turn is an object with fields, not {shown(turn)}")
        name = turn.get("role", turn.get("from"))
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise BadSample(Reason.ROLE, f"{shown(name)} is not one of {', '.join(_ROLES)}")
        turns.append((role, _parts(turn.get("content", turn.get("value")), find)))
    return turns


def _parts(content: Any, find: FindFile) -> Parts:
    """Texts, images and slots of one turn."""
    match content:
        case None:  # what an assistant says when it only calls a tool
            return []
        case str():
            return _split(content)
        case Mapping():
            return _part(content, find)
        case list():
            return [piece for part in content for piece in _parts(part, find)]
    raise BadSample(Reason.NOT_A_RECORD, f"a turn holds {shown(content)}, neither a text nor a list of parts")


def _part(part: Mapping[str, Any], find: FindFile) -> Parts:
    kind = part.get("type")
    if kind in _TEXT_PARTS or (kind is None and isinstance(part.get("text"), str)):
        text = part.get("text")
        if not isinstance(text, str):
            raise BadSample(Reason.NOT_A_RECORD, f"a part of type text holds {shown(text)}")
        return _split(text)
    if kind in _IMAGE_PARTS:
        return [image_of(part, find) if any(part.get(place) is not None for place in PLACES) else SLOT]
    raise BadSample(Reason.UNSUPPORTED, f"a part of type {shown(kind)}: only text and images are read")


def _split(text: str) -> Parts:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no tokenizer takes
        raise BadSample(Reason.NOT_A_RECORD, f"{shown(text)} is no Unicode text: {error}") from error
    first, *others = text.split(TAG)
    return [first, *(piece for other in others for piece in (SLOT, other))]


def _images(record: Mapping[str, Any]) -> list[Any]:
    for field in ("images", "image"):
        value = record.get(field)
        if value is not None and value != [] and value != "":
            return list(value) if isinstance(value, list) else [value]
    return []


def _placed(turns: Turns, images: list[ImageRef]) -> Conversation:
    """The turns with their slots filled, one image each. Where no text says where images belong, they come first."""
    pieces = [piece for _, parts in turns for piece in parts]
    slots = sum(isinstance(piece, _Slot) for piece in pieces)
    own = sum(isinstance(piece, ImageRef) for piece in pieces)
    if images and not slots and not own:
        role, speaker = next((turn for turn in turns if turn[0] in ("user", "text")), turns[0])
        speaker[:0] = [piece for _ in images for piece in (SLOT, "" if role == "text" else "\n")]
        slots = len(images)
    if slots != len(images) and not (slots == 0 and own == len(images)):
        raise BadSample(Reason.IMAGE_COUNT, f"{slots} {TAG} in its texts for {len(images)} images")
    rest = iter(images)
    filled = [(role, [next(rest) if isinstance(piece, _Slot) else piece for piece in parts]) for role, parts in turns]
    return Conversation(tuple(Turn(role, _joined(parts)) for role, parts in filled))


def _joined(parts: Iterable[str | ImageRef]) -> tuple[str | ImageRef, ...]:
    """Neighbouring texts as one, none of them empty."""
    joined: list[str | ImageRef] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def _says_something(turn: Turn) -> bool:
    return any(isinstance(part, str) and part.strip() for part in turn.parts)
