"""Read an image from a field of a record: a path, bytes, base64, a data URL, or a struct of these."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from megavlm.config.messages import shown
from megavlm.data.decode import resolve_inside
from megavlm.data.types import ImageRef
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import Escapes, plain
from megavlm.storage.transfer import StoredFile

FindFile = Callable[[str], ImageRef]
"""Returns the image that a record refers to by its name; raises BadSample if there is none."""

# Fields in which a struct may hold the image, in the order in which they are tried: Hugging Face data sets use bytes
# and path, parts of OpenAI messages use image_url, others use the rest.
PLACES = ("bytes", "image", "image_url", "url", "path", "base64", "data", "source")
_ENCODED = ("base64", "data")
# How JPEG, PNG, WebP and GIF files begin in base64. No such prefix is a likely path, and "/9j/" is an absolute one.
_BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD")
_LEAST_BASE64 = 64  # characters; the smallest image files are longer


def file_below(root: Path, name: str) -> ImageRef:
    """Return the image file `name` in the folder `root`. Raises BadSample if it is missing or lies outside."""
    return ImageRef(resolve_inside(root, name))


def stored_below(root: str, name: str) -> ImageRef:
    """Return the image file `name` in the folder at the URL `root`. Raises BadSample if its name leads out of it."""
    try:
        return ImageRef(
            StoredFile(root, "/".join(plain(part) for part in name.replace("\\", "/").split("/") if part != "."))
        )
    except Escapes as error:
        raise BadSample(Reason.OUTSIDE, f"the path {name[:200]!r} leaves {root}: {error}") from error


def image_of(value: Any, find: FindFile) -> ImageRef:
    """Return the image in the value of a record's field. Raises BadSample if the value holds none that can be read."""
    match value:
        case bytes() | bytearray() | memoryview():
            return ImageRef(bytes(value))
        case str():
            return _from_text(value, find)
        case Mapping():
            for place in PLACES:
                content = value.get(place)
                if content is not None:
                    is_encoded = place in _ENCODED and isinstance(content, str) and not content.startswith("data:")
                    return _from_base64(content) if is_encoded else image_of(content, find)
    raise BadSample(Reason.NOT_A_RECORD, f"{shown(value)} is not an image, nor the path or URL of one")


def _from_text(text: str, find: FindFile) -> ImageRef:
    scheme, colon, rest = text.partition(":")
    if colon and scheme.lower() == "data":
        header, comma, content = rest.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise BadSample(Reason.CORRUPT, f"{shown(text)} is a data URL without base64")
        return _from_base64(content)
    if colon and scheme.lower() == "file":
        return find(_path_of(rest, text))
    if colon and rest.startswith("//"):
        raise BadSample(
            Reason.UNSUPPORTED, f"{shown(text)} is on the network: store the image beside the data and give its path"
        )
    if len(text) >= _LEAST_BASE64 and text.startswith(_BASE64_STARTS):
        return _from_base64(text)
    if not text:
        raise BadSample(Reason.NOT_A_RECORD, "an image or a video has an empty path: write null where there is none")
    return find(text)


def _path_of(rest: str, url: str) -> str:
    """Return the path of a file: URL, given what follows its scheme: //HOST/PATH or /PATH, with % for odd characters.

    Raises BadSample for a file of another machine.
    """
    host, slash, path = rest[2:].partition("/") if rest.startswith("//") else ("", *rest.partition("/")[1:])
    if host.lower() not in ("", "localhost"):
        raise BadSample(Reason.UNSUPPORTED, f"{shown(url)} is on another machine: give its path on this one")
    return unquote(f"{slash}{path}")


def _from_base64(text: str) -> ImageRef:
    try:
        return ImageRef(base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError) as error:
        raise BadSample(Reason.CORRUPT, f"{shown(text)} is not base64: {error}") from error
