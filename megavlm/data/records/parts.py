"""A sample of a WebDataset: what its files, which share a name, say together.

`json` is a LLaVA record, messages or a text; otherwise `txt` (or a `caption` in the json, as img2dataset writes) is the
text of the images. The images are the files with an image's extension, in order (`jpg`, or `0.jpg`, `1.jpg`, …).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megavlm.config.messages import shown
from megavlm.data.records.turns import conversation_of, shape_of
from megavlm.data.types import BadSample, Conversation, ImageRef, Reason

_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "jp2", "avif")
_CAPTIONS = ("txt", "caption")


def conversation_of_parts(parts: Mapping[str, bytes]) -> Conversation:
    """The conversation of a sample's files, by extension (all that follows the name's first dot). Raises BadSample."""
    names = sorted((name for name in parts if name.lower().rpartition(".")[2] in _IMAGES), key=_natural)
    rest = iter(names)

    def find(name: str) -> ImageRef:
        """An image that the record calls by its path elsewhere is the next one here."""
        part = name if name in parts else next(rest, None)
        if part is None:
            raise BadSample(Reason.MISSING, f"no file of the sample is {shown(name)}: it has {_listed(parts)}")
        return ImageRef(parts[part])

    record = _record(parts)
    if not any(record.get(field) for field in ("image", "images")):
        record = {**record, "images": [parts[name] for name in names]}
    shape = shape_of(record)
    if shape is None:
        raise BadSample(Reason.NOT_A_RECORD, f"nothing to read among its files {_listed(parts)}")
    return conversation_of(record, shape, find)


def _record(parts: Mapping[str, bytes]) -> dict[str, Any]:
    record: Any = {}
    if "json" in parts:
        try:
            record = json.loads(parts["json"])
        except (ValueError, RecursionError) as error:
            raise BadSample(Reason.NOT_A_RECORD, f"its json is none: {error}") from error
    if not isinstance(record, dict):
        raise BadSample(Reason.NOT_A_RECORD, f"its json is {shown(record)}, and no object")
    if shape_of(record) in ("llava", "messages"):
        return record
    for name in _CAPTIONS:
        if name in parts:
            try:
                return {"text": parts[name].decode()}
            except UnicodeDecodeError as error:
                raise BadSample(Reason.NOT_A_RECORD, f"its {name} is not UTF-8: {error}") from error
    return {**record, "text": record.get("text", record.get("caption"))}


def _natural(name: str) -> list[Any]:
    """Sorts 10.jpg after 2.jpg."""
    return [(1, int(piece), "") if piece.isdecimal() else (0, 0, piece) for piece in re.split(r"(\d+)", name)]


def _listed(parts: Mapping[str, bytes]) -> str:
    return shown(sorted(parts))
