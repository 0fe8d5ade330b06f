"""Numbers of positions and features of a sound, and the layer kinds of the audio encoder. Without torch.

A sound of n mel frames, 100 a second, is cut into chunks. A convolution with a stride of two turns a chunk into
positions, which attend to one another within the chunk. The mean of every two positions is a feature: 25 a second.

Legend: M mel bins, Ha width of the audio encoder, Hl of the language model.
"""

from __future__ import annotations

BLANK = 4  # mel frames of the silence that a micro-batch without sounds sends through the encoder


def chunk_lengths(frames: int, chunk: int) -> list[int]:
    """Return the lengths of the chunks of a sound in mel frames, of which only the last may be shorter."""
    return [min(chunk, frames - start) for start in range(0, frames, chunk)]


def positions_of(frames: int) -> int:
    """Return the number of positions of a sound, or of a chunk, of so many mel frames."""
    return (frames + 1) // 2


def features_of(frames: int) -> int:
    """Return the number of features (= audio tokens) of a sound; a position without a partner at its end has none."""
    return positions_of(frames) // 2
