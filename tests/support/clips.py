"""Small clips whose frames can be told apart: frame n is grey of level 10 + 4·n, with a white upper left corner."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

HEIGHT, WIDTH = 48, 80
CORNER = 16  # rows and columns


def pixels(number: int, height: int = HEIGHT, width: int = WIDTH) -> NDArray[np.uint8]:
    frame = np.full((height, width, 3), 10 + 4 * number, dtype=np.uint8)
    frame[:CORNER, :CORNER] = 255
    return frame


def number_of(frame: NDArray[np.uint8]) -> int:
    """Which frame of a clip these pixels are, however it was compressed."""
    height, width = frame.shape[:2]
    centre = frame[height // 2 - 4 : height // 2 + 4, width // 2 - 4 : width // 2 + 4]
    return round((float(centre.mean()) - 10) / 4)


def clip(
    count: int = 20,
    *,
    rate: int = 10,
    times: Sequence[float] | None = None,
    kind: str = "mp4",
    codec: str | None = None,
    rotation: int = 0,
    sound: bool = False,
    size: tuple[int, int] = (HEIGHT, WIDTH),
    frames: Sequence[NDArray[np.uint8]] = (),
    group: int = 6,
) -> bytes:
    """A file of `count` frames, at `times` (seconds) or `rate`; a key frame comes every `group` frames.

    The codec is MPEG-4 in AVI, else H.264, if none is given. `frames` are their pixels, if not those of `pixels`. With
    `sound` a quarter of a second of silence is beside them.
    """
    import av

    if frames:
        size = frames[0].shape[:2]
    memory = io.BytesIO()
    with av.open(memory, "w", format={"mkv": "matroska"}.get(kind, kind)) as file:
        voice = file.add_stream("libmp3lame", rate=16000, layout="mono") if sound else None
        if count:
            codec = codec or ("mpeg4" if kind == "avi" else "libx264")
            stream = file.add_stream(codec, rate=rate)
            stream.options = {"sc_threshold": "1000000000"} if codec == "mpeg4" else {"sc_threshold": "0", "bf": "2"}
            stream.height, stream.width = size
            stream.pix_fmt = "yuv420p"
            stream.codec_context.gop_size = group
            stream.bit_rate = 4_000_000
            base = Fraction(1, rate) if times is None else Fraction(1, 1000)
            stream.time_base = stream.codec_context.time_base = base
            if rotation:
                stream.set_display_rotation(rotation)
            for number in range(count):
                frame = av.VideoFrame.from_ndarray(frames[number] if frames else pixels(number, *size), format="rgb24")
                moment = number / rate if times is None else times[number]
                frame.pts, frame.time_base = round(moment / base), base
                file.mux(stream.encode(frame))
            file.mux(stream.encode(None))
        if voice is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 4096), dtype=np.float32), format="fltp", layout="mono")
            silence.sample_rate = 16000
            file.mux([*voice.encode(silence), *voice.encode(None)])
    return memory.getvalue()
