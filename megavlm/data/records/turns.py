"""Read the turns of a record and insert its images and videos at their tags (`shapes.py` defines the fields).

A turn has `from` and `value`, or `role` and `content` (or `text`), or is an exchange: `user` (`human`) and `assistant`.
Thoughts of an answer, in a field of their own, come before its text. An `<image>` in a text stands for the next entry
of the record's `image` or `images`; the parts of a message may also contain images directly. A `<video>` stands for the
next entry of `video` or `videos`, and so does `<image>` in a record of videos without images (LLaVA-Video). An
`<audio>` stands for the next entry of `audio` or `audios`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from megavlm.config.messages import shown
from megavlm.data.records.media import (
    PLACES,
    VIDEO_PLACES,
    FindFile,
    FindVideo,
    are_frames,
    image_of,
    limited,
    sound_of,
    video_of,
)
from megavlm.data.types import Conversation, Role, Turn, Visual
from megavlm.inputs.bad_sample import BadSample, Reason

TAG, VIDEO_TAG, AUDIO_TAG = "<image>", "<video>", "<audio>"
_KINDS = {TAG: "images", VIDEO_TAG: "videos", AUDIO_TAG: "audios"}
VISUALS = ("image", "images", "video", "videos", "audio", "audios", "fps")  # fields of a record of any kind

_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
# Roles of messages and fields of answers that hold calls of tools.
_OF_TOOLS = ("tool", "function", "function_call", "observation", "tool_call", "tool_calls", "tool_response")
_SPEAKERS, _CONTENTS = ("role", "from"), ("content", "value", "text")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # of an answer, before its text
_EXCHANGE: dict[str, Role] = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_UNTYPED = ("image", "image_url", "video", "audio")  # fields that say the type of a part without one
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image", "image_url", "input_image")
_VIDEO_PARTS = ("video", "video_url", "input_video")
_AUDIO_PARTS = ("audio", "audio_url", "input_audio")


@dataclass(frozen=True)
class _Slot:
    """A placeholder in a turn for an image, video or sound of the record that has not been assigned yet."""

    tag: str


SLOT, VIDEO_SLOT, AUDIO_SLOT = _Slot(TAG), _Slot(VIDEO_TAG), _Slot(AUDIO_TAG)
Parts = list[str | Visual | _Slot]
Turns = list[tuple[Role, Parts]]


@dataclass(frozen=True)
class Reader:
    """Looks up the images and videos that a record names. Tags in its texts other than `tags` are plain text."""

    find: FindFile
    find_video: FindVideo
    tags: tuple[str, ...]


def conversation(
    record: Mapping[str, Any], read: Callable[[Reader], Turns], find: FindFile, find_video: FindVideo
) -> Conversation:
    """Return the turns that `read` finds in a record, with the record's images and videos in place of their tags.

    `find` looks up an image by its name, `find_video` a video. Raises BadSample.
    """
    held = {TAG: True, VIDEO_TAG: listed(record, "videos", "video"), AUDIO_TAG: listed(record, "audios", "audio")}
    turns = read(Reader(find, find_video, tuple(tag for tag, files in held.items() if files)))
    return _placed(turns, *visuals_of(record, find, find_video))


def visuals_of(record: Mapping[str, Any], find: FindFile, find_video: FindVideo) -> tuple[list[Visual], ...]:
    """Return the images, the videos and the sounds in a record's fields. Raises BadSample."""
    videos = [video_of(video, find_video, record.get("fps")) for video in listed(record, "videos", "video")]
    sounds = [sound_of(sound, find) for sound in listed(record, "audios", "audio")]
    return [image_of(image, find) for image in listed(record, "images", "image")], [*videos], [*sounds]


def text_turn(record: Mapping[str, Any], find: FindFile, find_video: FindVideo) -> Turn:
    """Return the single turn of a plain-text record with its images; the text may be missing. Raises BadSample."""
    return conversation(
        record, lambda reader: [("text", parts_of(record.get("text"), reader))], find, find_video
    ).turns[0]


def system_turn(record: Mapping[str, Any], reader: Reader) -> Turns:
    """Return the turn of the field `system`; no turn if the field is empty."""
    system = record.get("system")
    return [("system", parts_of(system, reader))] if system else []


def turns_in(content: Any, reader: Reader) -> Turns:
    """Return the turns in a field's value, a list of messages or exchanges. Raises BadSample."""
    turns: Turns = []
    for turn in objects(content, "turns"):
        if not isinstance(turn, Mapping):
            raise BadSample(Reason.NOT_A_RECORD, f"a turn is an object with fields, not {shown(turn)}")
        name = _first(turn, _SPEAKERS)
        if name is None and (said := [(role, turn[key]) for key, role in _EXCHANGE.items() if key in turn]):
            turns += [(role, parts_of(text, reader)) for role, text in said]
            continue
        if name in _OF_TOOLS or any(turn.get(field) for field in _OF_TOOLS):
            raise BadSample(Reason.ROLE, "it has calls of tools, which are not trained: leave the record out")
        role = _ROLES.get(name.lower()) if isinstance(name, str) else None
        if role is None:
            raise BadSample(Reason.ROLE, f"the role {shown(name)} is not one of {', '.join(_ROLES)}")
        if not any(field in turn for field in _CONTENTS):
            fields = shown(sorted(map(str, turn)))
            raise BadSample(Reason.NOT_A_RECORD, f"a turn has no field `content` or `value`, but {fields}: rename it")
        own = chain(*visuals_of(turn, reader.find, reader.find_video))  # as in GLM-4V's data
        parts = [*(piece for each in own for piece in (each, "\n")), *parts_of(_first(turn, _CONTENTS), reader)]
        thoughts = _first(turn, _THOUGHTS) if role == "assistant" and parts else None
        if isinstance(thoughts, str) and thoughts.strip():
            parts = [*parts_of(f"<think>\n{thoughts}\n</think>\n\n", reader), *parts]
        if role == "assistant" and (turn.get("loss") is False or turn.get("weight") == 0):  # ms-swift's, OpenAI's
            role = "untrained"
        turns.append((role, parts))
    if not turns:
        raise BadSample(Reason.EMPTY, "it has no turns")
    return turns


def is_turn(value: Any) -> bool:
    """Return whether a value names a known speaker or is an exchange, as JSON of answers and parts do not."""
    if not isinstance(value, Mapping):
        return False
    return str(_first(value, _SPEAKERS)).lower() in _ROLES or len(_EXCHANGE.keys() & value.keys()) > 1


def _first(turn: Mapping[str, Any], fields: Iterable[str]) -> Any:
    """Return the first of these fields that is not null: a row of a table has null in the columns that it lacks."""
    return next((turn[field] for field in fields if turn.get(field) is not None), None)


def objects(content: Any, what: str) -> list[Any]:
    """Return a list of objects, which a table may store as JSON text or as an object of lists. Raises BadSample.

    `what` names the list in messages.
    """
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BadSample(Reason.NOT_A_RECORD, f"its {what} are a text that is not JSON: {shown(content)}") from error
    content = unzipped(content)
    if not isinstance(content, list):
        raise BadSample(Reason.NOT_A_RECORD, f"its {what} are not a list but {shown(content)}")
    return content


def unzipped(value: Any) -> Any:
    """Return an object of lists, as `datasets` stores it, as a list of objects; any other value unchanged."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(each, list) for each in value.values()):
        return value
    if len({len(each) for each in value.values()}) > 1:
        return value
    return [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]


def from_cell(value: Any) -> Any:
    """Return the list in a table cell of JSON text; any other value unchanged."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def parts_of(content: Any, find: Reader) -> Parts:
    """Return the texts, images, videos and placeholders in the content of one turn, in order. Raises BadSample."""
    match content:
        case None:  # the content of an assistant's turn that only calls a tool
            return []
        case str():
            if re.search("<img>[^<>]+</img>", content):  # of Qwen-VL's first version
                raise BadSample(Reason.NOT_A_RECORD, "it has <img>PATH</img>: write <image>, and the path in `image`")
            return _split(content, find.tags)
        case Mapping():
            return _part(content, find)
        case list():
            if any(isinstance(one, str) and isinstance(two, str) for one, two in pairwise(content)):
                what = f"{shown(content)} is a list of texts: write a record for each, or one text"
                raise BadSample(Reason.NOT_A_RECORD, what)
            return [piece for part in content for piece in parts_of(part, find)]
    raise BadSample(Reason.NOT_A_RECORD, f"a turn holds {shown(content)}, neither a text nor a list of parts")


def _part(part: Mapping[str, Any], find: Reader) -> Parts:
    kind = part.get("type") or next((name for name in _UNTYPED if part.get(name)), None)
    if kind in _TEXT_PARTS or (kind is None and isinstance(part.get("text"), str)):
        text = part.get("text")
        if not isinstance(text, str):
            raise BadSample(Reason.NOT_A_RECORD, f"a part of type text holds {shown(text)}")
        return _split(text, find.tags)
    if kind in _IMAGE_PARTS:
        has_own = any(part.get(place) is not None for place in PLACES)
        return [image_of(part, find.find) if has_own else limited(SLOT, part)]
    if kind in _VIDEO_PARTS:
        has_own = any(part.get(place) is not None for place in VIDEO_PLACES)
        return [video_of(part, find.find_video) if has_own else limited(VIDEO_SLOT, part)]
    if kind in _AUDIO_PARTS:
        named = next((part[place] for place in (*_AUDIO_PARTS, *PLACES) if part.get(place) is not None), None)
        return [AUDIO_SLOT if named is None else sound_of(named, find.find)]
    raise BadSample(Reason.UNSUPPORTED, f"a part of type {shown(kind)}: only text, images, videos and audio are read")


def _split(text: str, tags: Sequence[str]) -> Parts:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may hold half of a surrogate pair, which no tokenizer accepts
        raise BadSample(Reason.NOT_A_RECORD, f"{shown(text)} is not valid Unicode: {error}") from error
    pieces = re.split(f"({'|'.join(tags)})", text)
    slots = {TAG: SLOT, VIDEO_TAG: VIDEO_SLOT, AUDIO_TAG: AUDIO_SLOT}
    return [slots[piece] if number % 2 else piece for number, piece in enumerate(pieces)]


def listed(record: Mapping[str, Any], *fields: str) -> list[Any]:
    """Return the values of the first of `fields` that is not empty: a list, a list as JSON, or a single value.

    A list of pictures in the field `video` is a single one. Nulls are left out, also where a table has them as
    {"bytes": null, "path": null}.
    """
    for field in fields:
        value = from_cell(record.get(field))
        values = value if isinstance(value, list) and not (field == "video" and are_frames(value)) else [value]
        if found := [each for each in values if each not in (None, [], {"bytes": None, "path": None})]:
            return found
    return []


def _placed(turns: Turns, images: Sequence[Visual], videos: Sequence[Visual], sounds: Sequence[Visual]) -> Conversation:
    """Return the conversation with placeholders replaced by images, videos and sounds; without placeholders these come
    first.

    Raises BadSample if there are not as many images, videos or sounds as placeholders.
    """
    pieces = [piece for _, parts in turns for piece in parts]
    slots = [piece for piece in pieces if isinstance(piece, _Slot)]
    own = sum(not isinstance(piece, str | _Slot) for piece in pieces)
    visuals = [*images, *videos, *sounds]
    if visuals and not slots and not own:
        role, speaker = next((turn for turn in turns if turn[0] in ("user", "text")), turns[0])
        slots = [SLOT] * len(images) + [VIDEO_SLOT] * len(videos) + [AUDIO_SLOT] * len(sounds)
        speaker[:0] = [piece for slot in slots for piece in (slot, "" if role == "text" else "\n")]
    if videos and not images and VIDEO_SLOT not in slots:
        rest = {SLOT: iter(videos), VIDEO_SLOT: iter(())}
        wanted = {TAG: len(videos)}
    else:
        rest = {SLOT: iter(images), VIDEO_SLOT: iter(videos)}
        wanted = {TAG: len(images), VIDEO_TAG: len(videos)}
    rest[AUDIO_SLOT], wanted[AUDIO_TAG] = iter(sounds), len(sounds)
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


def says_something(turn: Turn) -> bool:
    """Return whether a turn has text that is not blank."""
    return any(isinstance(part, str) and part.strip() for part in turn.parts)
