"""Decode the frames of untrusted video files, one at a time, and sound files, or raise BadSample with the reason.

`probe` reads a clip's packets without decoding them. So it finds the time of each frame, also for variable frame rates,
and that the clip has an end. `frames` decodes the requested frames: it decodes forward, seeks to a key frame if that
saves decoding, and skips other frames that no frame is predicted from. All bounds are counts, not seconds, so that the
same clips are read and skipped on a busy machine; `--data-worker-timeout` ends a read that hangs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megavlm.data.decode import content_of
from megavlm.errors import UserError
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.sounds import RATE
from megavlm.inputs.video import Clip, rate_of
from megavlm.paths import FileRange
from megavlm.storage.transfer import StoredFile

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

Pixels = NDArray[np.uint8]
Source = bytes | Path | StoredFile | FileRange

MAX_FRAMES = 2**18  # of a clip: two hours at 30 frames per second
_MAX_DECODED = 2**38  # pixels that are decoded for one clip: 18 minutes of 4K at 30 frames per second
# Codecs that mark the frames from which no other frame is predicted. (HEVC marks them within their layer only.)
_SAYS_WHAT_IS_UNUSED = ("h264", "mpeg4", "mpeg2video", "mpeg1video")
_VP8, _SHOWN = ("vp8", "libvpx"), 0x10  # a bit of the first byte; other frames only serve to predict (RFC 6386, 9.1)
# Playlists name other files and URLs: playlist formats are not read, and FFmpeg may not open anything by name.
_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,ogg,asf,ivf,h264,hevc,m4v,"
    "gif,nut,mxf",
    "protocol_whitelist": "none",
}
_SOUND_OPTIONS = {**_OPTIONS, "format_whitelist": f"{_OPTIONS['format_whitelist']},wav,flac,mp3,aiff,aac"}
_LOUDEST = 1e9  # far beyond 1, and small enough that powers of sounds are finite


@dataclass(frozen=True)
class _Index:
    """The time stamps of a clip's frames, in display order."""

    marks: tuple[int, ...]  # the time stamp of each frame, in units of the stream
    keys: tuple[int, ...]  # the time stamps of key frames, at which decoding can begin
    counted: bool  # whether decoded frames have stamps in another order, so that they are counted from the first on


def probe(source: Source, *, max_pixels: int) -> Clip:
    """Return the size, display times and frame rate of a clip's frames; one frame is decoded.

    Raises BadSample if the file is not a clip, or has no frames, no end or too many pixels; UserError without PyAV.
    """
    with _opened(source, max_pixels) as (container, stream):
        index = _index(container, stream)
        for start in (index.marks[0], min(0, index.marks[0])):  # some containers seek inexactly
            container.seek(start, stream=stream)
            if (first := next(container.decode(stream), None)) is not None:
                break
        else:
            raise BadSample(Reason.CORRUPT, "the first frame of the clip cannot be decoded")
        turned = first.rotation % 180 != 0
        height, width = (first.width, first.height) if turned else (first.height, first.width)
        base = stream.time_base or Fraction(1, 1)
        times = tuple(float((mark - index.marks[0]) * base) for mark in index.marks)
        return Clip(height, width, times, rate_of(times, float(stream.average_rate or 0) or None))


def frames(source: Source, numbers: Sequence[int], *, max_pixels: int) -> Iterator[Pixels]:
    """Yield the RGB pixels [height, width, 3], upright, of the frames with the given increasing numbers.

    Raises BadSample for a frame that cannot be decoded.
    """
    with _opened(source, max_pixels) as (container, stream):
        index = _index(container, stream)
        if numbers[-1] >= len(index.marks):
            raise BadSample(Reason.TRUNCATED, f"the clip has {len(index.marks)} frames, and had more when it was read")
        wanted = [index.marks[number] for number in numbers]
        convert = _pyav().video.reformatter.VideoReformatter()  # one for all frames: each sets up tables of its own
        for frame in _decoded(container, stream, index, wanted):
            yield _upright(convert.reformat(frame, format="rgb24", threads=1).to_ndarray(), frame.rotation)


def sound(source: Source, *, longest: int) -> NDArray[np.float32]:
    """Return the first `longest` samples [n] of a sound, at 16 kHz, between −1 and 1; channels are averaged.

    Raises BadSample if the file is missing, damaged, empty or no sound; UserError without PyAV.
    """
    av, found, count = _pyav(), list[NDArray[np.float32]](), 0
    with _file(source) as file:
        try:
            with av.open(file, options=_SOUND_OPTIONS) as container:
                if not container.streams.audio:
                    raise BadSample(Reason.NO_FRAMES, "the file has no sound")
                resampler = av.AudioResampler(format="fltp", rate=RATE)  # channels apart
                for frame in container.decode(container.streams.audio[0]):
                    found += [part.to_ndarray().mean(0) for part in resampler.resample(frame)]
                    count += frame.samples * RATE / frame.sample_rate
                    if count > longest + RATE:  # the resampler holds back less than a second
                        break
                else:
                    found += [part.to_ndarray().mean(0) for part in resampler.resample(None)]
        except BadSample:
            raise
        except (av.error.FFmpegError, OSError, ValueError, OverflowError, RuntimeError, MemoryError) as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise BadSample(Reason.CORRUPT, f"the sound cannot be decoded ({why})") from error
    samples = np.concatenate([np.empty(0, np.float32), *found])[:longest]
    if not len(samples):
        raise BadSample(Reason.NO_FRAMES, "the sound is empty")
    if not np.abs(samples).max() < _LOUDEST:  # files of floats may also have NaN
        raise BadSample(Reason.CORRUPT, "the sound has samples that are not finite, or far beyond 1: save it again")
    return samples


def _decoded(
    container: InputContainer, stream: VideoStream, index: _Index, wanted: Sequence[int]
) -> Iterator[VideoFrame]:
    """Yield the decoded frames with the time stamps `wanted`, in order. Raises BadSample."""
    pixels, at, jumps = 0, None, True
    decoding: Iterator[VideoFrame] = iter(())
    needed, counted = frozenset(index.marks if index.counted else wanted), iter(index.marks)
    for mark in wanted:
        key = index.keys[max(bisect_right(index.keys, mark) - 1, 0)] if index.keys else index.marks[0]
        if at is None or (jumps and key > at):  # a key frame lies between the current and the wanted frame
            decoding, at_key = _from(container, stream, key, mark, needed)
            if not at_key:  # as in transport streams: from now on only decode forward
                jumps = False
                decoding, _ = _from(container, stream, min(0, index.marks[0]), mark, needed)
        for frame in decoding:
            pixels += frame.width * frame.height
            if pixels > _MAX_DECODED:
                raise BadSample(Reason.ENDLESS, f"more than {_MAX_DECODED} pixels must be decoded for its frames")
            at = next(counted, mark) if index.counted else mark if frame.pts is None else frame.pts
            if at >= mark:
                break
        else:
            raise BadSample(Reason.TRUNCATED, f"the clip ends before its frame at time stamp {mark}")
        if at != mark or frame.is_corrupt:
            raise BadSample(Reason.CORRUPT, f"the frame at time stamp {mark} cannot be decoded")
        yield frame


def _from(
    container: InputContainer, stream: VideoStream, start: int, mark: int, needed: frozenset[int]
) -> tuple[Iterator[VideoFrame], bool]:
    """Seek to `start`; return the frames from there on, and whether the first is not after `mark`.

    Some containers seek inexactly.
    """
    container.seek(start, stream=stream)
    decoding = _forward(container, stream, needed)
    first = next(decoding, None)
    if first is None:
        return iter(()), False
    return chain([first], decoding), first.pts is None or first.pts <= mark


def _forward(container: InputContainer, stream: VideoStream, needed: frozenset[int]) -> Iterator[VideoFrame]:
    """Decode frames from the current position on, without unneeded frames from which no other frame is predicted."""
    codec = stream.codec_context
    leaves_out = codec.name in _SAYS_WHAT_IS_UNUSED
    for packet in container.demux(stream):
        if leaves_out:
            codec.skip_frame = "NONREF" if packet.pts is not None and packet.pts not in needed else "DEFAULT"
        yield from packet.decode()


def _index(container: InputContainer, stream: VideoStream) -> _Index:
    """Return the time stamps of a clip's frames, from its packets. Raises BadSample if it has no frames or no end."""
    marks: list[int] = []
    keys: list[int] = []
    packets = shown = 0
    for packet in container.demux(stream):
        if not packet.size:
            continue  # the mark of the end
        packets += 1
        if packets > MAX_FRAMES:
            raise BadSample(Reason.ENDLESS, f"the clip has more than {MAX_FRAMES} frames")
        stamp = packet.pts if packet.pts is not None else packet.dts
        is_hidden = stream.codec_context.name in _VP8 and not memoryview(packet)[0] & _SHOWN
        if packet.is_discard or is_hidden:
            continue
        shown += 1
        if stamp is None:
            continue
        marks.append(stamp)
        if packet.is_keyframe:
            keys.append(stamp)
    if not marks:
        raise BadSample(Reason.NO_FRAMES, "the clip has no frames")
    listed = len(stream.index_entries)  # without those that an edit of the clip leaves out
    if container.format.name.startswith("mov") and packets < listed:  # other formats may count too many
        raise BadSample(Reason.TRUNCATED, f"the clip has {packets} frames of the {listed} that its header counts")
    # AVI and ASF store no presentation times, and FFmpeg's estimates of them are wrong for streams with B-frames.
    counted = container.format.name in ("avi", "asf") and stream.codec_context.name in ("h264", "hevc")
    if 2 * len(marks) < shown:  # as of H.264 in a program stream, whose frames have no times but a few
        rate, counted = (stream.average_rate or 25) * (stream.time_base or 1), True
        marks = [round(number / rate) for number in range(shown)]
    return _Index(tuple(sorted(set(marks))), () if counted else tuple(sorted(keys)), counted)


@contextmanager
def _opened(source: Source, max_pixels: int) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a clip within this context, and raise BadSample in place of PyAV's errors."""
    av, is_clip = _pyav(), False
    with _file(source) as file:
        try:
            with av.open(file, options=_OPTIONS) as container:
                is_clip = True
                if not len(container.streams):
                    raise BadSample(Reason.TRUNCATED, "the part of the clip that says what is in it is missing")
                if not container.streams.video:
                    raise BadSample(Reason.NO_FRAMES, "the file has no pictures, only sound or text")
                stream = container.streams.video[0]
                if stream.codec_context is None:
                    raise BadSample(Reason.CORRUPT, "no decoder is known for the clip's pictures")
                stream.thread_type = "NONE"  # workers share the cores
                codec = stream.codec_context
                codec.thread_count = 1
                codec.options = {"max_pixels": str(max_pixels)}  # of later frames, too, which may be larger
                if codec.width * codec.height > max_pixels:
                    raise BadSample(
                        Reason.TOO_LARGE,
                        f"the clip has frames of {codec.height}×{codec.width} pixels, more than --max-image-pixels "
                        f"{max_pixels}",
                    )
                yield container, stream
        except BadSample:
            raise
        except av.error.MemoryError as error:
            raise BadSample(Reason.CORRUPT, f"the clip asks for more memory than there is: {error}") from error
        except (av.error.FFmpegError, OSError, ValueError, OverflowError, RuntimeError) as error:
            what = "the clip cannot be decoded" if is_clip else "it is not of a known video format"
            reason = Reason.CORRUPT if is_clip else Reason.NOT_A_VIDEO
            raise BadSample(reason, f"{what} ({type(error).__name__}: {str(error)[:200]})") from error


def _file(source: Source) -> IO[bytes]:
    """Return a clip or a sound as an open file; given a name, PyAV would read URLs and playlists. Raises BadSample."""
    try:
        if isinstance(source, FileRange):
            return source.open()
        content = content_of(source)
        return BytesIO(content) if isinstance(content, bytes) else content.open("rb")
    except OSError as error:
        raise BadSample(Reason.MISSING, f"it cannot be opened: {error}") from error


def _upright(pixels: Pixels, rotation: float) -> Pixels:
    """Return the pixels of a frame, rotated by its display matrix (phones store portrait videos sideways)."""
    quarters = round(rotation / 90) % 4  # counterclockwise
    return np.ascontiguousarray(np.rot90(pixels, quarters)) if quarters else pixels


def _pyav() -> Any:
    """Return PyAV. Raises UserError if it is not installed."""
    try:
        import av
    except ImportError as error:
        raise UserError("videos and sounds need PyAV: pip install av (the extra `video`)") from error
    av.logging.set_level(None)  # a damaged clip is reported with its record, not by lines of a library
    return av
