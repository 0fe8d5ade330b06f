"""Convert a record, as JSON or parquet contain it, to a `Conversation`.

LLaVA records and messages differ only in their field names: `conversations` of `from` and `value`, or `messages` of
`role` and `content`; turns of either may use the names of the other. An `<image>` in a text stands for the next entry
of the record's `image` or `images`; the parts of a message may also hold their images themselves.
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
COLUMNS = (*FIELD.values(), "system", "image", "images")  # all fields of a record that are read

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
    """Marks the position of an image in a turn until it is known which of the record's images belongs there."""


SLOT = _Slot()
Parts = list[str | ImageRef | _Slot]
Turns = list[tuple[Role, Parts]]


def shape_of(record: Any) -> Shape | None:
    """Return the kind of a record, which its fields tell, or None if it has no known field."""
    if isinstance(record, Mapping):
        for shape, field in FIELD.items():
            if record.get(field) is not None:
                return shape
    return None


def conversation_of(record: Any, shape: Shape, find: FindFile) -> Conversation:
    """Return the conversation in `record`; `find` returns an image by its name. Raises no error but BadSample."""
    try:
        return _conversation(record, shape, find)
    except RecursionError as error:
        raise BadSample(Reason.NOT_A_RECORD, "it is nested too deeply") from error


def _conversation(record: Any, shape: Shape, find: FindFile) -> Conversation:
    if not isinstance(record, Mapping):
        raise BadSample(Reason.NOT_A_RECORD, f"a record is an object with fields, not {shown(record)}")
    content = record.get(FIELD[shape])
    if content is None:
        raise BadSample(Reason.NOT_A_RECORD, f"it has no field `{FIELD[shape]}` but {shown(sorted(map(str, record)))}")
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
            raise BadSample(Reason.NOT_A_RECORD, f"its turns are a text that is not JSON: {shown(content)}") from error
    if not isinstance(content, list):
        raise BadSample(Reason.NOT_A_RECORD, f"its turns are not a list but {shown(content)}")
    if not content:
        raise BadSample(Reason.EMPTY, "it has no turns")
    turns: Turns = [("system", _parts(system, find))] if system else []
    for turn in content:
        if not isinstance(turn, Mapping):
            raise BadSample(Reason.NOT_A_RECORD, f"a turn is an object with fields, not {shown(turn)}")
        name = turn.get("role", turn.get("from"))
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise BadSample(Reason.ROLE, f"the role {shown(name)} is not one of {', '.join(_ROLES)}")
        turns.append((role, _parts(turn.get("content", turn.get("value")), find)))
    return turns


def _parts(content: Any, find: FindFile) -> Parts:
    """Return the texts, images and slots of one turn, in order."""
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
    except UnicodeEncodeError as error:  # JSON may hold half of a surrogate pair, which no tokenizer accepts
        raise BadSample(Reason.NOT_A_RECORD, f"{shown(text)} is not valid Unicode: {error}") from error
    first, *others = text.split(TAG)
    return [first, *(piece for other in others for piece in (SLOT, other))]


def _images(record: Mapping[str, Any]) -> list[Any]:
    for field in ("images", "image"):
        value = record.get(field)
        if value is not None and value != [] and value != "":
            return list(value) if isinstance(value, list) else [value]
    return []


def _placed(turns: Turns, images: list[ImageRef]) -> Conversation:
    """Return the conversation with one image in each slot; if there are no slots, the images come first.

    Raises BadSample if there are not as many images as slots.
    """
    pieces = [piece for _, parts in turns for piece in parts]
    slots = sum(isinstance(piece, _Slot) for piece in pieces)
    own = sum(isinstance(piece, ImageRef) for piece in pieces)
    if images and not slots and not own:
        role, speaker = next((turn for turn in turns if turn[0] in ("user", "text")), turns[0])
        speaker[:0] = [piece for _ in images for piece in (SLOT, "" if role == "text" else "\n")]
        slots = len(images)
    if slots != len(images) and not (slots == 0 and own == len(images)):
        raise BadSample(Reason.IMAGE_COUNT, f"its texts have {slots} {TAG} for {len(images)} images")
    rest = iter(images)
    filled = [(role, [next(rest) if isinstance(piece, _Slot) else piece for piece in parts]) for role, parts in turns]
    return Conversation(tuple(Turn(role, _joined(parts)) for role, parts in filled))


def _joined(parts: Iterable[str | ImageRef]) -> tuple[str | ImageRef, ...]:
    """Return the parts with neighbouring texts joined and empty texts removed."""
    joined: list[str | ImageRef] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def _says_something(turn: Turn) -> bool:
    return any(isinstance(part, str) and part.strip() for part in turn.parts)
