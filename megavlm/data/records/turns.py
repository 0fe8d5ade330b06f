"""Convert a record, as JSON or parquet contain it, to a `Conversation`.

LLaVA records and messages differ only in their field names: `conversations` of `from` and `value`, or `messages` of
`role` and `content`; turns of either may use the names of the other. An `<image>` in a text stands for the next entry
of the record's `image` or `images`; the parts of a message may also hold their images themselves. A `<video>` stands
for the next entry of `video` or `videos`, and so does `<image>` in a record of videos without images (LLaVA-Video).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megavlm.config.messages import shown
from megavlm.data.records.pictures import PLACES, FindFile, image_of
from megavlm.data.records.videos import VIDEO_PLACES, FindVideo, no_videos, video_of
from megavlm.data.types import BadSample, Conversation, Reason, Role, Turn, Visual

Shape = Literal["llava", "messages", "text", "pairs"]
TAG, VIDEO_TAG = "<image>", "<video>"
_KINDS = {TAG: "images", VIDEO_TAG: "videos"}
FIELD: dict[Shape, str] = {"llava": "conversations", "messages": "messages", "text": "text", "pairs": "query"}
_OF_PAIRS = ("positive", "positives", "negative", "negatives", "id", "ids")
COLUMNS = (
    *FIELD.values(),
    *_OF_PAIRS,
    "system",
    "image",
    "images",
    "video",
    "videos",
)  # all fields of a record that are read

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
_VIDEO_PARTS = ("video", "video_url", "input_video")


@dataclass(frozen=True)
class _Slot:
    """Marks the position of an image or a video in a turn until it is known which of the record's belongs there."""

    tag: str


SLOT, VIDEO_SLOT = _Slot(TAG), _Slot(VIDEO_TAG)
Parts = list[str | Visual | _Slot]
Turns = list[tuple[Role, Parts]]


@dataclass(frozen=True)
class _Reader:
    """Finds what a record names; `has_videos`: its texts may have <video>, which is text in other records."""

    find: FindFile
    find_video: FindVideo
    has_videos: bool


def shape_of(record: Any) -> Shape | None:
    """Return the kind of a record, which its fields tell, or None if it has no known field."""
    if isinstance(record, Mapping):
        for shape, field in FIELD.items():
            if record.get(field) is not None:
                return shape
    return None


def conversation_of(record: Any, shape: Shape, find: FindFile, find_video: FindVideo = no_videos) -> Conversation:
    """Return the conversation in `record`; `find` returns an image by its name, `find_video` a video.

    Raises no error but BadSample.
    """
    try:
        return _conversation(record, shape, find, find_video)
    except RecursionError as error:
        raise BadSample(Reason.NOT_A_RECORD, "it is nested too deeply") from error


def text_turn(record: Mapping[str, Any], find: FindFile, find_video: FindVideo = no_videos) -> Turn:
    """Return the one turn of a record of plain text with its images, which may have no text. Raises BadSample."""
    named = _listed(record, "videos", "video")
    reader = _Reader(find, find_video, has_videos=bool(named))
    turns: Turns = [("text", _parts(record.get("text"), reader))]
    images = [image_of(image, find) for image in _listed(record, "images", "image")]
    return _placed(turns, images, [video_of(video, find_video, record.get("fps")) for video in named]).turns[0]


def _conversation(record: Any, shape: Shape, find: FindFile, find_video: FindVideo) -> Conversation:
    if not isinstance(record, Mapping):
        raise BadSample(Reason.NOT_A_RECORD, f"a record is an object with fields, not {shown(record)}")
    content = record.get(FIELD[shape])
    if content is None:
        raise BadSample(Reason.NOT_A_RECORD, f"it has no field `{FIELD[shape]}` but {shown(sorted(map(str, record)))}")
    named = _listed(record, "videos", "video")
    reader = _Reader(find, find_video, has_videos=bool(named))
    if shape == "text":
        turns: Turns = [("text", _parts(content, reader))]
    else:
        turns = _turns(content, record.get("system"), reader)
    images = [image_of(image, find) for image in _listed(record, "images", "image")]
    conversation = _placed(turns, images, [video_of(video, find_video, record.get("fps")) for video in named])
    if not any(_says_something(turn) for turn in conversation.turns if turn.role in ("assistant", "text")):
        raise BadSample(Reason.EMPTY, "it has no text" if shape == "text" else "the assistant says nothing")
    return conversation


def _turns(content: Any, system: Any, find: _Reader) -> Turns:
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


def _parts(content: Any, find: _Reader) -> Parts:
    """Return the texts, images, videos and slots of one turn, in order."""
    match content:
        case None:  # what an assistant says when it only calls a tool
            return []
        case str():
            return _split(content, videos=find.has_videos)
        case Mapping():
            return _part(content, find)
        case list():
            return [piece for part in content for piece in _parts(part, find)]
    raise BadSample(Reason.NOT_A_RECORD, f"a turn holds {shown(content)}, neither a text nor a list of parts")


def _part(part: Mapping[str, Any], find: _Reader) -> Parts:
    kind = part.get("type")
    if kind in _TEXT_PARTS or (kind is None and isinstance(part.get("text"), str)):
        text = part.get("text")
        if not isinstance(text, str):
            raise BadSample(Reason.NOT_A_RECORD, f"a part of type text holds {shown(text)}")
        return _split(text, videos=find.has_videos)
    if kind in _IMAGE_PARTS:
        return [image_of(part, find.find) if any(part.get(place) is not None for place in PLACES) else SLOT]
    if kind in _VIDEO_PARTS:
        has_own = any(part.get(place) is not None for place in VIDEO_PLACES)
        return [video_of(part, find.find_video, part.get("fps")) if has_own else VIDEO_SLOT]
    raise BadSample(Reason.UNSUPPORTED, f"a part of type {shown(kind)}: only text, images and videos are read")


def _split(text: str, *, videos: bool) -> Parts:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may hold half of a surrogate pair, which no tokenizer accepts
        raise BadSample(Reason.NOT_A_RECORD, f"{shown(text)} is not valid Unicode: {error}") from error
    pieces = re.split(f"({TAG}|{VIDEO_TAG})" if videos else f"({TAG})", text)
    slots = {TAG: SLOT, VIDEO_TAG: VIDEO_SLOT}
    return [slots[piece] if number % 2 else piece for number, piece in enumerate(pieces)]


def _listed(record: Mapping[str, Any], *fields: str) -> list[Any]:
    for field in fields:
        value = record.get(field)
        if value is not None and value != [] and value != "":
            return list(value) if isinstance(value, list) else [value]
    return []


def _placed(turns: Turns, images: Sequence[Visual], videos: Sequence[Visual]) -> Conversation:
    """Return the conversation with an image or a video in each slot; if there are no slots, they come first.

    Raises BadSample if there are not as many images, or videos, as slots.
    """
    pieces = [piece for _, parts in turns for piece in parts]
    slots = [piece for piece in pieces if isinstance(piece, _Slot)]
    own = sum(not isinstance(piece, str | _Slot) for piece in pieces)
    visuals = [*images, *videos]
    if visuals and not slots and not own:
        role, speaker = next((turn for turn in turns if turn[0] in ("user", "text")), turns[0])
        slots = [SLOT] * len(images) + [VIDEO_SLOT] * len(videos)
        speaker[:0] = [piece for slot in slots for piece in (slot, "" if role == "text" else "\n")]
    if videos and not images and VIDEO_SLOT not in slots:
        rest = {SLOT: iter(videos), VIDEO_SLOT: iter(())}
        wanted = {TAG: len(videos)}
    else:
        rest = {SLOT: iter(images), VIDEO_SLOT: iter(videos)}
        wanted = {TAG: len(images), VIDEO_TAG: len(videos)}
    for tag, count in wanted.items():
        found = sum(slot.tag == tag for slot in slots)
        if found != count and not (not slots and own == len(visuals)):
            raise BadSample(Reason.IMAGE_COUNT, f"its texts have {found} {tag} for {count} {_KINDS[tag]}")
    filled = [
        (role, [next(rest[piece]) if isinstance(piece, _Slot) else piece for piece in parts]) for role, parts in turns
    ]
    return Conversation(tuple(Turn(role, _joined(parts)) for role, parts in filled))


def _joined(parts: Iterable[str | Visual]) -> tuple[str | Visual, ...]:
    """Return the parts with neighbouring texts joined and empty texts removed."""
    joined: list[str | Visual] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def _says_something(turn: Turn) -> bool:
    return any(isinstance(part, str) and part.strip() for part in turn.parts)
