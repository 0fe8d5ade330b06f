"""Decode untrusted sound files (wav, flac, mp3, …) to samples of one channel, or raise BadSample with the reason."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megavlm.data.clips import opened_file, pyav
from megavlm.data.decode import Source
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.sounds import RATE

# As of clips: no format that names other files, and nothing that FFmpeg opens by name.
_OPTIONS = {"format_whitelist": "wav,flac,mp3,ogg,mov,mp4,m4a,matroska,webm,aiff,aac", "protocol_whitelist": "none"}


def decode_sound(source: Source, *, longest: int) -> NDArray[np.float32]:
    """Return the first `longest` samples [n] of a sound, at 16 kHz, between −1 and 1; channels are averaged.

    Raises BadSample if the file is missing, damaged or no sound; UserError without PyAV.
    """
    av, found, count = pyav(), list[NDArray[np.float32]](), 0
    try:
        file = opened_file(source)
    except OSError as error:
        raise BadSample(Reason.MISSING, f"the sound cannot be opened: {error}") from error
    with file:
        try:
            with av.open(file, options=_OPTIONS) as container:
                if not container.streams.audio:
                    raise BadSample(Reason.NO_FRAMES, "the file has no sound")
                resampler = av.AudioResampler(format="fltp", rate=RATE)  # channels apart
                for frame in container.decode(container.streams.audio[0]):
                    found += [part.to_ndarray().mean(0) for part in resampler.resample(frame)]
                    count = sum(map(len, found))
                    if count >= longest:
                        break
                else:
                    found += [part.to_ndarray().mean(0) for part in resampler.resample(None)]
        except BadSample:
            raise
        except (av.error.FFmpegError, OSError, ValueError, OverflowError, RuntimeError, MemoryError) as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise BadSample(Reason.CORRUPT, f"the sound cannot be decoded ({why})") from error
    return np.concatenate([np.empty(0, np.float32), *found])[:longest]
