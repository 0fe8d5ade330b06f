"""Read a video from a field of a record: a file, a folder or a list of frames, or bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megavlm.config.messages import shown
from megavlm.data.decode import resolve_inside
from megavlm.data.records.pictures import FindFile, file_below, image_of
from megavlm.data.types import ImageRef, VideoRef
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.paths import FileRange

FindVideo = Callable[[str], VideoRef]
"""Returns the video that a record refers to by its name; raises BadSample if there is none."""

VIDEO_PLACES = ("bytes", "video", "video_url", "frames", "url", "path", "source")
_FRAMES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
_MOST_FRAMES = 2**16  # files of a folder
_FPS = (1e-3, 1e3)


def video_of(value: Any, find: FindVideo, fps: Any = None) -> VideoRef:
    """Return the video in the value of a record's field; `fps` is what the record says of its rate.

    Raises BadSample if the value holds none that can be read.
    """
    rate = _rate(fps)
    if isinstance(value, Mapping):
        named = next((value[place] for place in VIDEO_PLACES if value.get(place) is not None), None)
        found = video_of(named, find, value.get("fps", fps))
    elif isinstance(value, list | tuple) and value:
        found = VideoRef(tuple(image_of(frame, _image_by(find)) for frame in value))
    else:
        content = image_of(value, _image_by(find)) if not isinstance(value, str) else None
        found = VideoRef(content.source) if content is not None else _from_text(str(value), find)
    return found if rate is None or found.fps is not None else replace(found, fps=rate)


def _from_text(text: str, find: FindVideo) -> VideoRef:
    """Return the video of a path, a file: URL or base64; the network is refused as it is for images."""
    held: list[VideoRef] = []

    def remember(name: str) -> ImageRef:
        held.append(find(name))
        return ImageRef(b"")

    encoded = image_of(text, remember)
    return held[0] if held else VideoRef(encoded.source)


def _image_by(find: FindVideo) -> FindFile:
    """Return the function that finds one frame: a file, not a folder of them."""

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

    Frames are in the order of the numbers in their names. Raises BadSample if it is missing or lies outside.
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
        files = {entry.name: entry for entry in entries if Path(entry.name).suffix.lower() in _FRAMES}
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
    """Return the video file that `find` finds in a store, where folders of frames are not read."""
    return VideoRef(find(name).source)


def no_videos(name: str) -> VideoRef:
    """Refuse a video where records hold none."""
    raise BadSample(Reason.UNSUPPORTED, f"the video {shown(name)}: this data set's videos cannot be read")


def natural(name: str) -> list[Any]:
    """Return a sort key that puts 10.jpg after 2.jpg."""
    pieces = re.split(r"([0-9]+)", name)
    return [(1, len(digits := piece.lstrip("0")), digits) if piece.isdecimal() else (0, 0, piece) for piece in pieces]
