"""Convert a sample of a WebDataset, which is the files of a tar that share a name, to a conversation.

The file `json` holds a LLaVA record or messages. Otherwise the text is in the file `txt` or `caption`, or in a field
`text` or `caption` of the json (img2dataset writes such captions). The images are the files with an image's extension,
in order (`jpg`, or `0.jpg`, `1.jpg`, …); the videos are those with a video's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megavlm.config.messages import shown
from megavlm.data.records.turns import conversation_of, shape_of
from megavlm.data.records.videos import natural
from megavlm.data.types import BadSample, Conversation, ImageRef, Reason, VideoRef

_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "jp2", "avif")
_VIDEOS = ("mp4", "m4v", "mov", "webm", "mkv", "avi", "mpg", "mpeg", "ts", "flv", "ogv", "3gp")
_CAPTIONS = ("txt", "caption")


def conversation_of_parts(parts: Mapping[str, bytes]) -> Conversation:
    """Return the conversation of a sample, given its files by extension (all that follows the name's first dot).

    Raises BadSample if they hold none.
    """
    names, clips = _with_extension(parts, _IMAGES), _with_extension(parts, _VIDEOS)
    rest, rest_of_clips = iter(names), iter(clips)

    def part_of(name: str, others: Iterator[str]) -> bytes:
        """Return the file `name` of the sample or, if that is a path elsewhere, the next file of its kind."""
        part = name if name in parts else next(others, None)
        if part is None:
            raise BadSample(Reason.MISSING, f"the sample has no file {shown(name)}: it has {_listed(parts)}")
        return parts[part]

    record = _record(parts)
    if not any(record.get(field) for field in ("image", "images")):
        record = {**record, "images": [parts[name] for name in names]}
    if not any(record.get(field) for field in ("video", "videos")):
        record = {**record, "videos": [parts[name] for name in clips]}
    shape = shape_of(record)
    if shape is None:
        raise BadSample(Reason.NOT_A_RECORD, f"none of its files {_listed(parts)} holds a conversation or a text")
    return conversation_of(
        record,
        shape,
        find=lambda name: ImageRef(part_of(name, rest)),
        find_video=lambda name: VideoRef(part_of(name, rest_of_clips)),
    )


def _with_extension(parts: Mapping[str, bytes], extensions: Collection[str]) -> list[str]:
    return sorted((name for name in parts if name.lower().rpartition(".")[2] in extensions), key=natural)


def _record(parts: Mapping[str, bytes]) -> dict[str, Any]:
    record: Any = {}
    if "json" in parts:
        try:
            record = json.loads(parts["json"])
        except (ValueError, RecursionError) as error:
            raise BadSample(Reason.NOT_A_RECORD, f"its json file is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadSample(Reason.NOT_A_RECORD, f"its json file holds {shown(record)}, which is not an object")
    if shape_of(record) in ("llava", "messages"):
        return record
    for name in _CAPTIONS:
        if name in parts:
            try:
                return {"text": parts[name].decode()}
            except UnicodeDecodeError as error:
                raise BadSample(Reason.NOT_A_RECORD, f"its {name} file is not UTF-8: {error}") from error
    return {**record, "text": record.get("text", record.get("caption"))}


def _listed(parts: Mapping[str, bytes]) -> str:
    return shown(sorted(parts))
