"""Write records as WebDataset tars, one shard after another; the same records give the same bytes.

Samples are LLaVA records (`json`) with their images and videos beside them, unchanged; clips are copied from file to
file.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megavlm.config.messages import several
from megavlm.config.schema import DatasetConfig
from megavlm.data import clips
from megavlm.data.arrays import array_size
from megavlm.data.decode import MAX_PIXELS, content_of, size_of
from megavlm.data.records.containers import Records
from megavlm.data.records.opening import is_tars, open_records
from megavlm.data.records.tar_sample import ARRAYS
from megavlm.data.records.tars import indexed
from megavlm.data.records.turns import TAG, VIDEO_TAG
from megavlm.data.types import Conversation, ImageRef, Turn, VideoRef
from megavlm.errors import UserError
from megavlm.files import check_folder, open_new
from megavlm.inputs.bad_sample import BadSample, Reason, Skipped, SkipSummary
from megavlm.inputs.vision_inputs import vision_input_of
from megavlm.paths import FileRange, open_regular
from megavlm.storage.transfer import StoredFile

SKIPPED = "skipped.jsonl"
_MIB = 2**20
_READERS = 8  # threads that read images; what they read is written in order
_HEAD = 16  # bytes that tell what a file is
_AT_ONCE = 256  # records that are read before they are written
_SPEAKERS = {"user": "human", "assistant": "gpt", "system": "system"}
# First bytes of image files. Any other file is named .jpg, since readers look at the content.
_SIGNATURES = {
    **{b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp", b"\x93NUMPY": "npy", b"PK\x03\x04": "npz"},
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "tif"),  # the last two: BigTIFF
}
_CLIP_SIGNATURES = {b"\x1aE\xdf\xa3": "mkv", b"RIFF": "avi", b"OggS": "ogv", b"FLV": "flv"}  # any other: .mp4

Content = bytes | Path | StoredFile
Parts = dict[str, Content]
Look = Callable[[bytes], object]  # raises BadSample for an image that training could not read


def prepare(
    source: DatasetConfig,
    out: Path,
    *,
    shard_mib: int,
    shuffle: int | None,
    vision_input: str,
    channels: int | None,
    say: Callable[[str], None],
) -> list[str]:
    """Write a data set as tars of about `shard_mib` MiB, with their index, in the folder `out`, in its order or
    shuffled with a seed, and return lines on what was written. Images are those of a vision input with so many
    channels.

    Bad records are left out, and listed in `skipped.jsonl`. `say` is called with a line on how far it is. Raises
    UserError if `out` holds files, or if no record can be used.
    """
    if is_tars(source):
        raise UserError(f"{source.path} contains tars, which training reads directly: use --datasets {source.path}")
    check_folder("OUT_DIR", out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} holds something already: name another folder, or empty it")
    records = open_records(source, pairs=False)
    count = len(records)
    order = np.arange(count) if shuffle is None else np.random.default_rng(shuffle).permutation(count)
    look: Look = size_of
    if vision_input_of(vision_input, channels or 0).array_channels is not None:
        look = partial(array_size, channels=channels, max_pixels=MAX_PIXELS)
    out.mkdir(parents=True, exist_ok=True)
    skipped, samples, shards = SkipSummary(), 0, _Shards(out, shard_mib * _MIB)
    with open_new(out / SKIPPED) as listed, closing(shards), ThreadPoolExecutor(_READERS) as pool:
        for done, (index, parts) in enumerate(_samples(records, order, pool, look), start=1):
            bad = parts if isinstance(parts, BadSample) else shards.add(f"{index:09}", parts)
            samples += bad is None
            if bad is not None:
                label = records.label(index)
                listed.write(_line(label, bad))
                skipped.add([Skipped(label, records.name, bad.reason, bad.detail)])
            say(f"{done} of {count} records, {len(shards.paths)} tars")
    if not samples:
        raise UserError(f"none of {count:,} records can be used: {skipped.message()}")
    lost = several(skipped.counts.total(), "record")
    lines = [f"{out}: {several(samples, 'sample')} in {several(len(shards.paths), 'tar')}, {lost} skipped"]
    lines += [f"  {number} {reason}" for reason, number in skipped.counts.most_common()]
    return [*lines, f"  {out / SKIPPED} lists them"] if skipped.counts else lines


def parts_of(conversation: Conversation, label: str, *, look: Look = size_of) -> Parts:
    """Return the files of a sample by extension. Raises BadSample if the header of an image or clip cannot be read."""
    parts: Parts = {}
    images: list[str] = []
    videos: list[dict[str, Any]] = []
    names = [""] if len(conversation.images) == 1 else [f"{number}." for number in range(len(conversation.images))]
    for name, visual in zip(names, conversation.images, strict=True):
        if isinstance(visual, VideoRef):
            files, video = _video(visual, name)
            videos.append(video)
        else:
            data = _bytes(visual)
            look(data)
            files = {name + _extension(data): data}
            images += files
        parts |= files
    record: dict[str, Any] = {"id": label, **({"videos": videos} if videos else {})}
    if any(name.endswith(ARRAYS) for name in images):  # a reader takes no array beside photos for an image
        record["images"] = images
    if conversation.turns[0].role == "text":
        record["text"] = _text(conversation.turns[0], videos=bool(videos))
    else:
        said = [(turn.role, _text(turn, videos=bool(videos))) for turn in conversation.turns]
        record["conversations"] = [{"from": _SPEAKERS[role], "value": text} for role, text in said]
    return {"json": json.dumps(record, ensure_ascii=False).encode(), **parts}


def _video(video: VideoRef, name: str) -> tuple[Parts, dict[str, Any]]:
    """Return the files of a video, and what the record says of it."""
    rate = {} if video.fps is None else {"fps": video.fps}
    if isinstance(video.source, tuple):
        frames: Parts = {}
        for number, frame in enumerate(video.source):
            size_of(frame.source)
            frames[f"{name}{number}.{_extension(_head(frame.source))}"] = frame.source
        return frames, {"frames": list(frames), **rate}
    assert not isinstance(video.source, FileRange), "tars are not written again"
    clips.probe(video.source, max_pixels=MAX_PIXELS)
    head = _head(video.source)
    kind = next((kind for signature, kind in _CLIP_SIGNATURES.items() if head.startswith(signature)), "mp4")
    return {name + kind: video.source}, {"video": name + kind, **rate}


def _samples(
    records: Records, order: NDArray[np.int64], pool: ThreadPoolExecutor, look: Look
) -> Iterator[tuple[int, Parts | BadSample]]:
    def sample(index: int) -> Parts | BadSample:
        try:
            return parts_of(records.read(index), records.label(index), look=look)
        except BadSample as error:
            return error

    for at in range(0, len(order), _AT_ONCE):
        indices = [int(index) for index in order[at : at + _AT_ONCE]]
        yield from zip(indices, pool.map(sample, indices), strict=True)


class _Shards:
    """Writes samples to tars of about `size` bytes, one after another; each that is closed gets its index."""

    def __init__(self, folder: Path, size: int) -> None:
        self.paths: list[Path] = []
        self._folder, self._size = folder, size
        self._open: tuple[tarfile.TarFile, BinaryIO] | None = None

    def add(self, key: str, parts: Parts) -> BadSample | None:
        """Add a sample, or return what has become of it since its headers were read."""
        try:
            contents = {name: content_of(source) for name, source in parts.items()}
        except BadSample as error:  # of a store
            return error
        if self._open is None or self._open[0].offset >= self._size:
            self.close()
            self.paths.append(self._folder / f"{len(self.paths):06}.tar")
            file = open_new(self.paths[-1])
            self._open = tarfile.TarFile(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT), file
        for name, content in contents.items():
            entry = tarfile.TarInfo(f"{key}.{name}")  # without user and time, so that the bytes are reproducible
            with io.BytesIO(content) if isinstance(content, bytes) else open_regular(content) as file:
                entry.size = file.seek(0, io.SEEK_END)
                file.seek(0)
                self._open[0].addfile(entry, file)
        return None

    def close(self) -> None:
        if self._open is not None:
            for each in self._open:
                each.close()
            indexed(self.paths[-1])


def _text(turn: Turn, *, videos: bool) -> str:
    if videos and any(isinstance(part, str) and VIDEO_TAG in part for part in turn.parts):
        raise BadSample(Reason.IMAGE_COUNT, f"a text has {VIDEO_TAG} beside its videos")
    tags = [part if isinstance(part, str) else VIDEO_TAG if isinstance(part, VideoRef) else TAG for part in turn.parts]
    return "".join(tags)


def _bytes(image: ImageRef) -> bytes:
    content = content_of(image.source)
    if isinstance(content, bytes):
        return content
    try:
        return content.read_bytes()
    except OSError as error:
        raise BadSample(Reason.MISSING, str(error)) from error


def _head(source: Content) -> bytes:
    """Return the first bytes of a file."""
    if isinstance(source, StoredFile):
        return source.head(at_most=_HEAD)[0]
    if isinstance(source, bytes):
        return source[:_HEAD]
    with open_regular(source) as file:
        return file.read(_HEAD)


def _extension(data: bytes) -> str:
    return next((name for signature, name in _SIGNATURES.items() if data.startswith(signature)), "jpg")


def _line(label: str, bad: BadSample) -> bytes:
    line = {"record": label, "reason": str(bad.reason), "detail": str(bad)}
    return json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n"
