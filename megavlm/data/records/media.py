"""Read an image or a video from a field of a record: a path, bytes, base64, a data URL, or a struct of these.

A video may also be a folder or a list of frames.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from megavlm.config.messages import shown
from megavlm.data.decode import resolve_inside
from megavlm.data.types import ImageRef, SoundRef, VideoRef
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import Escapes, FileRange, plain
from megavlm.storage.transfer import StoredFile

FindFile = Callable[[str], ImageRef]
"""Looks up an image by the name in a record; raises BadSample if there is none."""
FindVideo = Callable[[str], VideoRef]
"""Looks up a video by the name in a record; raises BadSample if there is none."""

# Fields in which a struct may hold the image, in the order in which they are tried: Hugging Face data sets use bytes
# and path, parts of OpenAI messages use image_url, others use the rest.
PLACES = ("bytes", "image", "image_url", "url", "path", "base64", "data", "source")
_ENCODED = ("base64", "data")
# How JPEG, PNG, WebP and GIF files begin in base64. No such prefix is a likely path, and "/9j/" is an absolute one.
_BASE64_STARTS = ("/9j/", "iVBORw0KGgo", "UklGR", "R0lGOD")
_LEAST_BASE64 = 64  # characters; the smallest image files are longer
VIDEO_PLACES = ("bytes", "video", "video_url", "frames", "url", "path", "source")
_FRAMES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
_MOST_FRAMES = 2**16  # files of a folder
_FPS = (1e-3, 1e3)
# Limits that Qwen's format has beside an image or a video: those that are read, and others.
_LIMITS = {ImageRef: ("min_pixels", "max_pixels"), VideoRef: ("max_pixels", "video_start", "video_end")}
_UNREAD = ("resized_height", "resized_width", "total_pixels", "nframes", "min_frames", "max_frames")
_KNOWN = tuple(dict.fromkeys([*_LIMITS[ImageRef], *_LIMITS[VideoRef], *_UNREAD]))
_LARGEST = 2**26  # pixels or seconds


def file_below(root: Path, name: str) -> ImageRef:
    """Return the image file `name` in the folder `root`. Raises BadSample if it is missing or lies outside."""
    return ImageRef(resolve_inside(root, name))


def stored_below(root: str, name: str) -> ImageRef:
    """Return the image file `name` in the folder at the URL `root`. Raises BadSample if it lies outside."""
    try:
        return ImageRef(
            StoredFile(root, "/".join(plain(part) for part in name.replace("\\", "/").split("/") if part != "."))
        )
    except Escapes as error:
        raise BadSample(Reason.OUTSIDE, f"the path {name[:200]!r} leaves {root}: {error}") from error


def image_of(value: Any, find: FindFile) -> ImageRef:
    """Return the image in the value of a record's field. Raises BadSample if the value holds no readable image."""
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
                    return limited(_from_base64(content) if is_encoded else image_of(content, find), value)
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
    """Return the path of a file: URL, given the `rest` after its scheme: //HOST/PATH or /PATH, percent-encoded.

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


def sound_of(value: Any, find: FindFile) -> SoundRef:
    """Return the sound in the value of a record's field. Raises BadSample if the value holds no readable sound."""
    return SoundRef(image_of(value, find).source)


def video_of(value: Any, find: FindVideo, fps: Any = None) -> VideoRef:
    """Return the video in the value of a record's field; `fps` is the record's frame rate, if it has one.

    Raises BadSample if the value holds no readable video.
    """
    rate = _rate(fps)
    if isinstance(value, Mapping):
        named = next((value[place] for place in VIDEO_PLACES if value.get(place) is not None), None)
        own = value.get("fps") if value.get("fps") is not None else value.get("sample_fps", fps)  # Qwen's, of frames
        found = limited(video_of(named, find, own), value)
    elif isinstance(value, list | tuple) and value:
        found = VideoRef(tuple(image_of(frame, _image_by(find)) for frame in value))
    else:
        finder: Any = find if isinstance(value, str) else _image_by(find)
        content: Any = image_of(value, finder)  # of a path, what `find` returns
        found = content if isinstance(content, VideoRef) else VideoRef(content.source)
    return found if rate is None or found.fps is not None else replace(found, fps=rate)


def limited(found: Any, part: Mapping[str, Any]) -> Any:
    """Return an image or a video with the limits that its part of a record gives. Raises BadSample for others."""
    given = {name: part[name] for name in _KNOWN if part.get(name) is not None}
    for name, value in list(given.items()):
        if name not in _LIMITS.get(type(found), ()):
            raise BadSample(Reason.UNSUPPORTED, f"{name} beside its image or video is not read: leave it out")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST:
            raise BadSample(Reason.NOT_A_RECORD, f"{name} {shown(value)} is not a number from 0")
        given[name] = int(value) if name.endswith("pixels") else float(value)
    return replace(found, **given) if given else found


def are_frames(values: Sequence[Any]) -> bool:
    """Return whether values are names of pictures, as those of the frames of a video; a .gif may be a clip."""
    return all(isinstance(each, str) and Path(each.lower()).suffix in {*_FRAMES} - {".gif"} for each in values)


def _image_by(find: FindVideo) -> FindFile:
    """Return a function that looks up one frame as an image file; it raises BadSample for a folder or a video."""

    def found(name: str) -> ImageRef:
        source = find(name).source
        if isinstance(source, tuple | FileRange):
            what = "a folder" if isinstance(source, tuple) else "a video"
            raise BadSample(Reason.NOT_AN_IMAGE, f"{shown(name)} is {what}, and not one frame of a video")
        return ImageRef(source)

    return found


def _rate(fps: Any) -> float | None:
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not _FPS[0] <= fps <= _FPS[1]:
        raise BadSample(Reason.NOT_A_RECORD, f"fps {shown(fps)} is not a number of frames per second")
    return float(fps)


def video_below(root: Path, name: str) -> VideoRef:
    """Return the video file, or the folder of frames, `name` in the folder `root`.

    Frames are in the order of the numbers in their names. Raises BadSample if the file or folder is missing or lies
    outside.
    """
    folder = root / name
    try:
        if "\\" in name and "\0" not in name and not folder.exists():  # written on Windows
            return video_below(root, name.replace("\\", "/"))
        is_folder = "\0" not in name and folder.is_dir()
    except OSError:  # a name that is too long: `resolve_inside` says so
        is_folder = False
    if not is_folder:
        return VideoRef(file_below(root, name).source)
    with os.scandir(folder) as entries:
        names = {entry.name: entry for entry in entries if entry.name[0] != "."}  # of macOS
    files = {name: entry for name, entry in names.items() if Path(name).suffix.lower() in _FRAMES}
    if not 0 < len(files) <= _MOST_FRAMES:
        raise BadSample(
            Reason.NO_FRAMES, f"the folder {shown(name)} holds {len(files)} images, 1 to {_MOST_FRAMES} are read"
        )
    home = folder.resolve()
    inside = home.is_relative_to(root.resolve())

    def frame(each: str) -> ImageRef:  # to resolve a path costs as much as to read a small picture
        own = inside and files[each].is_file(follow_symlinks=False)
        return ImageRef(home / each if own else resolve_inside(root, f"{name}/{each}"))

    return VideoRef(tuple(frame(each) for each in sorted(files, key=natural)))


def stored_video(find: FindFile, name: str) -> VideoRef:
    """Return the video file `name` in a store, looked up with `find`; folders of frames are not read from stores."""
    return VideoRef(find(name).source)


def natural(name: str) -> list[Any]:
    """Return a sort key that puts 10.jpg after 2.jpg."""
    pieces = re.split(r"([0-9]+)", name)
    return [(1, len(digits := piece.lstrip("0")), digits) if piece.isdecimal() else (0, 0, piece) for piece in pieces]
