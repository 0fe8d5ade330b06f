"""Write the records of a data set as WebDataset tar shards (`megavlm prepare`); equal records give equal bytes.

A shard is written under a temporary name, renamed when it is complete, and recorded in `prepare_data.json`; an
interrupted conversion continues after the last recorded shard. Each sample is a LLaVA record (`json`) and its images,
videos and sounds, unchanged; clips and sounds are copied from file to file.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

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
from megavlm.data.records.turns import AUDIO_TAG, TAG, VIDEO_TAG
from megavlm.data.types import Conversation, ImageRef, SoundRef, Turn, VideoRef
from megavlm.errors import UserError
from megavlm.files import check_folder, open_new, open_to_append, replace_file
from megavlm.inputs.bad_sample import BadSample, Reason, Skipped, SkipSummary
from megavlm.inputs.vision_inputs import vision_input_of
from megavlm.json_files import read_json
from megavlm.paths import FileRange, open_regular
from megavlm.storage.transfer import StoredFile

NOTES = "prepare_data.json"
SKIPPED = "skipped.jsonl"
_BEFORE_SHARDS = {NOTES, SKIPPED, f"{NOTES}.tmp", "000000.tmp"}  # files of a run until its first shard is complete
_READERS = 8  # threads that read images; samples are written in order
_HEAD = 16  # first bytes of a file, which identify its format
_AT_ONCE = 256  # records that are read ahead of the writer
_SPEAKERS = {"user": "human", "assistant": "gpt", "system": "system"}
# First bytes of image files. Any other file is named .jpg, since readers look at the content.
_SIGNATURES = {
    **{b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp", b"\x93NUMPY": "npy", b"PK\x03\x04": "npz"},
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "tif"),  # the last two: BigTIFF
}
_CLIP_SIGNATURES = {b"\x1aE\xdf\xa3": "mkv", b"RIFF": "avi", b"OggS": "ogv", b"FLV": "flv"}  # any other: .mp4
_SOUND_SIGNATURES = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg"}  # any other: .mp3

_TAGS: dict[type, str] = {VideoRef: VIDEO_TAG, SoundRef: AUDIO_TAG}  # of an image: <image>

Content = bytes | Path | StoredFile
Parts = dict[str, Content]
Look = Callable[[bytes], object]  # raises BadSample for an image that training could not read


@dataclass(frozen=True)
class Notes:
    """Progress and settings (`recipe`) of a conversion, as stored in its folder. Other settings cannot continue it."""

    recipe: dict[str, Any]
    records: int = 0  # number of records read
    samples: int = 0
    shards: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_bytes: int = 0  # length of `skipped.jsonl`

    def report(self, out: Path) -> Iterator[str]:
        """Yield the lines of the final report: samples and tars in the folder `out`, and skipped records by reason."""
        skipped = several(sum(self.skipped.values()), "record")
        yield f"{out}: {several(self.samples, 'sample')} in {several(self.shards, 'tar')}, {skipped} skipped"
        for reason, number in sorted(self.skipped.items(), key=lambda item: -item[1]):
            yield f"  {number} {reason}"
        if self.skipped:
            yield f"  {out / SKIPPED} lists them"


def prepare(
    source: DatasetConfig,
    out: Path,
    *,
    shard_mib: int,
    shuffle: int | None,
    vision_input: str,
    channels: int | None,
    say: Callable[[str], None],
) -> Notes:
    """Write a data set as tars of about `shard_mib` MiB to the folder `out` and return the final progress.

    Records keep their order, or are shuffled with the seed `shuffle`. Images are checked as inputs of `vision_input`
    with `channels` channels. Raises UserError.
    """
    if is_tars(source):
        raise UserError(f"{source.path} contains tars, which training reads directly: use --datasets {source.path}")
    check_folder("OUT_DIR", out)
    records = open_records(source, pairs=False)
    count = len(records)
    order = np.arange(count) if shuffle is None else np.random.default_rng(shuffle).permutation(count)
    recipe: dict[str, Any] = {
        "source": str(Path(source.path).resolve()),
        "kind": source.kind,
        "image_root": source.image_root,
        "records": count,
        "shard_mib": shard_mib,
        "shuffle": shuffle,
    }
    if source.columns:
        recipe["columns"] = dict(source.columns)
    look: Look = size_of
    if vision_input_of(vision_input, channels or 0).array_channels is not None:
        recipe |= {"vision_input": vision_input, "vision_in_channels": channels}
        look = partial(array_size, channels=channels, max_pixels=MAX_PIXELS)
    return write_shards(records, out, recipe=recipe, order=order, shard_bytes=shard_mib * 2**20, look=look, say=say)


def write_shards(
    records: Records,
    out: Path,
    *,
    recipe: dict[str, Any],
    order: NDArray[np.int64],
    shard_bytes: int,
    look: Look = size_of,
    say: Callable[[str], None] = lambda _: None,
) -> Notes:
    """Write `records`, in `order`, as tars of about `shard_bytes` in the folder `out`, with their index.

    Returns the final progress. Bad records are counted, and listed in `skipped.jsonl` with their labels. `look` checks
    the header of each image; `say` is called with a progress line after each record. Raises UserError if `out` holds
    other files, or if no record can be used.
    """
    notes = _notes(out, recipe)
    out.mkdir(parents=True, exist_ok=True)
    _note(out, notes)
    bad_ones = SkipSummary()
    with open_to_append(out / SKIPPED, buffering=-1) as skipped, ThreadPoolExecutor(_READERS) as pool:
        skipped.truncate(notes.skipped_bytes)
        while notes.records < len(order):
            shard = _Shard(out / f"{notes.shards:06}.tar")
            samples = _samples(records, order[notes.records :], pool, look)
            read, counts = 0, Counter(notes.skipped)
            while shard.size < shard_bytes and (made := next(samples, None)) is not None:
                index, parts = made
                read += 1
                bad = parts if isinstance(parts, BadSample) else shard.add(f"{index:09}", parts)
                if bad is not None:
                    counts[bad.reason] += 1
                    skipped.write(_line(records.label(index), bad))
                    bad_ones.add([Skipped(records.label(index), records.name, bad.reason, bad.detail)])
                say(f"{notes.records + read} of {len(order)} records, {notes.shards} tars")
            samples.close()
            shard.close()
            skipped.flush()
            notes = replace(
                notes,
                records=notes.records + read,
                samples=notes.samples + shard.count,
                shards=notes.shards + bool(shard.count),
                skipped=dict(counts),
                skipped_bytes=skipped.tell(),
            )
            _note(out, notes)
    if not notes.samples:
        raise UserError(f"none of {notes.records:,} records can be used: {bad_ones.message()}")
    for number in range(notes.shards):
        indexed(out / f"{number:06}.tar")
    return notes


def parts_of(conversation: Conversation, label: str, *, look: Look = size_of) -> Parts:
    """Return the files of a conversation's WebDataset sample, keyed by extension. `label` becomes its id.

    Raises BadSample if the header of an image or clip cannot be read.
    """
    parts: Parts = {}
    images: list[str] = []
    limits: dict[str, dict[str, Any]] = {}
    sounds: list[str] = []
    videos: list[dict[str, Any]] = []
    names = [""] if len(conversation.images) == 1 else [f"{number}." for number in range(len(conversation.images))]
    for name, visual in zip(names, conversation.images, strict=True):
        if isinstance(visual, VideoRef):
            files, video = _video(visual, name)
            videos.append(video)
        elif isinstance(visual, SoundRef):
            clips.sound(visual.source, longest=1)
            files = {name + _kind_of(visual.source, _SOUND_SIGNATURES, "mp3"): visual.source}
            sounds += files
        else:
            data = _bytes(visual)
            look(data)
            files = {name + _kind_of(data, _SIGNATURES, "jpg"): data}
            images += files
            limits |= {each: _limits(visual, "min_pixels", "max_pixels") for each in files}
        parts |= files
    record: dict[str, Any] = {"id": label, **({"videos": videos} if videos else {})}
    if sounds:  # unnamed sounds next to clips are not read
        record["audios"] = sounds
    # Unnamed arrays next to photos are not read as images.
    if any(name.endswith(ARRAYS) or limits[name] for name in images):
        record["images"] = [{"path": name, **limits[name]} if limits[name] else name for name in images]
    kinds = {type(visual) for visual in conversation.images}
    if conversation.turns[0].role == "text":
        record["text"] = _text(conversation.turns[0], kinds)
    else:
        record["conversations"] = [_said(turn, kinds) for turn in conversation.turns]
    return {"json": json.dumps(record, ensure_ascii=False).encode(), **parts}


def _video(video: VideoRef, name: str) -> tuple[Parts, dict[str, Any]]:
    """Return the files of a video, and its entry in the `videos` field of the record."""
    limits = _limits(video, "fps", "video_start", "video_end", "max_pixels")
    if isinstance(video.source, tuple):
        frames: Parts = {}
        for number, frame in enumerate(video.source):
            size_of(frame.source)
            frames[f"{name}{number}.{_kind_of(frame.source, _SIGNATURES, 'jpg')}"] = frame.source
        return frames, {"frames": list(frames), **limits}
    assert not isinstance(video.source, FileRange), "tars are not written again"
    clips.probe(video.source, max_pixels=MAX_PIXELS)
    kind = _kind_of(video.source, _CLIP_SIGNATURES, "mp4")
    return {name + kind: video.source}, {"video": name + kind, **limits}


def _limits(visual: ImageRef | VideoRef, *names: str) -> dict[str, Any]:
    """Return those of the named fields that the record gives."""
    return {name: value for name in names if (value := getattr(visual, name)) is not None}


def _samples(
    records: Records, order: NDArray[np.int64], pool: ThreadPoolExecutor, look: Look
) -> Generator[tuple[int, Parts | BadSample], None, None]:
    def sample(index: int) -> Parts | BadSample:
        try:
            return parts_of(records.read(index), records.label(index), look=look)
        except BadSample as error:
            return error

    for at in range(0, len(order), _AT_ONCE):
        indices = [int(index) for index in order[at : at + _AT_ONCE]]
        yield from zip(indices, pool.map(sample, indices), strict=True)


class _Shard:
    """Writes a tar under a temporary name; `close` renames the tar, or removes it if it is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_suffix(".tmp")
        self._file = open_new(self._temporary)
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        self.size = 0
        self.count = 0

    def add(self, key: str, parts: Parts) -> BadSample | None:
        """Add a sample. Return the error of a file that can no longer be read from its store, else None."""
        try:
            contents = {name: content_of(source) for name, source in parts.items()}
        except BadSample as error:  # a store no longer has the file
            return error
        for name, content in contents.items():
            entry = tarfile.TarInfo(f"{key}.{name}")  # without user and time, so that the bytes are reproducible
            with io.BytesIO(content) if isinstance(content, bytes) else open_regular(content) as file:
                entry.size = file.seek(0, io.SEEK_END)
                file.seek(0)
                self._tar.addfile(entry, file)
        self.size, self.count = self._tar.offset, self.count + 1
        return None

    def close(self) -> None:
        self._tar.close()
        self._file.close()
        if self.count:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink()


def _notes(out: Path, recipe: dict[str, Any]) -> Notes:
    if not out.exists() or {path.name for path in out.iterdir()} <= _BEFORE_SHARDS:
        return Notes(recipe)  # an earlier attempt that completed no shard is replaced, whatever its recipe
    try:
        notes = Notes(**read_json(out / NOTES))
        if notes.recipe == recipe:
            return notes
    except (UserError, TypeError):
        pass
    raise UserError(f"{out} holds something else already: name another folder, or empty it")


def _note(out: Path, notes: Notes) -> None:
    replace_file(out / NOTES, json.dumps(asdict(notes), indent=1))


def _said(turn: Turn, kinds: Collection[type]) -> dict[str, Any]:
    """Return a turn of a conversation as a LLaVA record has it."""
    loss = {"loss": False} if turn.role == "untrained" else {}
    return {"from": _SPEAKERS[turn.speaker], "value": _text(turn, kinds), **loss}


def _text(turn: Turn, kinds: Collection[type]) -> str:
    """Return the text of a turn with tags. Raises BadSample for a tag in a text, if the sample has one of its kind."""
    for kind, tag in _TAGS.items():
        if kind in kinds and any(isinstance(part, str) and tag in part for part in turn.parts):
            raise BadSample(Reason.IMAGE_COUNT, f"a text has {tag}, which stands for no file")
    return "".join(part if isinstance(part, str) else _TAGS.get(type(part), TAG) for part in turn.parts)


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


def _kind_of(source: Content, signatures: Mapping[bytes, str], other: str) -> str:
    """Return the extension of a file by its first bytes; `other` if they are not known."""
    head = _head(source)
    return next((kind for signature, kind in signatures.items() if head.startswith(signature)), other)


def _line(label: str, bad: BadSample) -> bytes:
    line = {"record": label, "reason": str(bad.reason), "detail": str(bad)}
    return json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n"
