"""Convert a WebDataset sample, the files of a tar that share a name, to a conversation.

The file `json` holds a record of any kind (`shapes.py`). If the record has no turns, the text is in the file `txt` or
`caption`, or in the record's field `text` or `caption` (img2dataset writes such captions). The images are those that
the record names. If it names none, they are the files with an image extension, in order (`jpg`, or `0.jpg`, `1.jpg`,
…). If there are no such files, they are the arrays (`npy`, `npz`); arrays next to photos are mostly features of the
photos. The videos are the files with a video extension, and so are sounds, unless there are clips, whose sound they
mostly are, and no `<audio>` in a text. A file that the record's `video` or `videos` name, as a clip or as one of its
frames, belongs to that video.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megavlm.config.messages import shown
from megavlm.data.records.media import natural
from megavlm.data.records.shapes import UNASKED, record_of, shape_of
from megavlm.data.records.turns import AUDIO_TAG
from megavlm.data.types import Conversation, ImageRef, VideoRef
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import FileRange

_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "jp2", "avif")
ARRAYS = ("npy", "npz")
_VIDEOS = ("mp4", "m4v", "mov", "webm", "mkv", "avi", "mpg", "mpeg", "ts", "flv", "ogv", "3gp")
_SOUNDS = ("wav", "flac", "mp3", "ogg", "oga", "opus", "m4a", "aac", "aiff")
_CAPTIONS = ("txt", "caption")


Part = bytes | FileRange
"""The content of a file of a sample, or for a clip its byte range in the tar."""


def is_clip(name: str) -> bool:
    """Return whether a file of a sample is a video, by its extension."""
    return name.lower().rpartition(".")[2] in _VIDEOS


def conversation_of_parts(parts: Mapping[str, Part], kinds: Sequence[str] = UNASKED) -> Conversation:
    """Return the conversation of a sample, given its files keyed by extension (all that follows the first dot).

    The record is one of `kinds`. Raises BadSample if the files hold no conversation.
    """
    record = _record(parts, kinds)
    named = set(_texts([record.get("video"), record.get("videos")]))
    images = _with_extension(parts, _IMAGES) or _with_extension(parts, ARRAYS)
    names = [name for name in images if name not in named]
    clips, sounds = _with_extension(parts, _VIDEOS), _with_extension(parts, _SOUNDS)
    rest, rest_of_clips, rest_of_sounds = iter(names), iter(clips), iter(sounds)

    def part_of(name: str, others: Iterator[str]) -> Part:
        """Return the file `name` of the sample or, if the sample has no such file, the next of `others`."""
        part = name if name in parts else next(others, None)
        if part is None:
            raise BadSample(Reason.MISSING, f"the sample has no file {shown(name)}: it has {shown(sorted(parts))}")
        return parts[part]

    def file_of_part(name: str) -> ImageRef:  # of a sound, too
        content = part_of(name, rest_of_sounds if _with_extension([name], _SOUNDS) else rest)
        if isinstance(content, FileRange):
            raise BadSample(Reason.NOT_AN_IMAGE, f"{shown(name)} is a video")
        return ImageRef(content)

    shape = shape_of(record, kinds)
    if shape != "pairs" and not any(record.get(field) for field in ("image", "images")):
        record = {**record, "images": [parts[name] for name in names]}
    if shape != "pairs" and not any(record.get(field) for field in ("video", "videos")):
        record = {**record, "videos": clips}
    are_marked = not clips or any(AUDIO_TAG in text for text in _texts(record))
    if shape != "pairs" and are_marked and not any(record.get(field) for field in ("audio", "audios")):
        record = {**record, "audios": sounds}
    if shape is None:
        raise BadSample(Reason.NOT_A_RECORD, f"none of its files {shown(sorted(parts))} holds a conversation or a text")
    return record_of(
        record,
        shape,
        find=file_of_part,
        find_video=lambda name: VideoRef(part_of(name, rest_of_clips)),
    )


def _with_extension(parts: Iterable[str], extensions: Collection[str]) -> list[str]:
    return sorted((name for name in parts if name.lower().rpartition(".")[2] in extensions), key=natural)


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in the value of a record's field, which may be nested lists and objects."""
    waiting = [value]  # not recursion: a record may be nested as deep as its author likes
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | Mapping):
            waiting += value.values() if isinstance(value, Mapping) else value


def _record(parts: Mapping[str, Part], kinds: Sequence[str]) -> dict[str, Any]:
    record: Any = {}
    if "json" in parts:
        try:
            record = json.loads(_bytes(parts["json"]))
        except (ValueError, RecursionError) as error:
            raise BadSample(Reason.NOT_A_RECORD, f"its json file is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadSample(Reason.NOT_A_RECORD, f"its json file holds {shown(record)}, which is not an object")
    if shape_of(record, kinds) not in (None, "text"):
        return record
    for name in _CAPTIONS:
        if name in parts:
            try:
                return {"text": _bytes(parts[name]).decode()}
            except UnicodeDecodeError as error:
                raise BadSample(Reason.NOT_A_RECORD, f"its {name} file is not UTF-8: {error}") from error
    return record


def _bytes(part: Part) -> bytes:
    assert isinstance(part, bytes), "only clips stay in their tar"
    return part
