"""Options of the shape of the audio encoder. Part of the schema (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from megavlm.config.option import AT_LEAST_1, Needs, Valid, option

AUDIO = Needs(
    lambda config: config.model.audio.num_layers > 0,
    "without an audio encoder",
    "add --set model.audio.num_layers=32",
)


@dataclass(frozen=True)
class AudioConfig:
    """A Whisper encoder with attention in chunks (Qwen2.5-Omni): two convolutions, layers, a mean over pairs."""

    num_layers: int = option(
        0,
        "Number of transformer layers of the audio encoder; 0: the model hears nothing.",
        valid=Valid("from 0 to 10,000", lambda value: 0 <= value <= 10_000),
    )
    hidden_size: int = option(128, "Hidden size of the audio encoder, an even number.", valid=AT_LEAST_1, needs=AUDIO)
    ffn_hidden_size: int = option(256, "Inner width of the audio MLP.", valid=AT_LEAST_1, needs=AUDIO)
    num_attention_heads: int = option(
        8,
        "Number of attention heads of the audio encoder; zero heads pad it to a multiple of TP.",
        valid=AT_LEAST_1,
        needs=AUDIO,
    )
    mel_bins: int = option(
        128, "Number of mel frequencies of a frame, of which there are 100 a second.", valid=AT_LEAST_1, needs=AUDIO
    )
    chunk_frames: int = option(
        200,
        "Number of mel frames of a chunk, an even number: convolutions, positions and attention end with each chunk.",
        valid=AT_LEAST_1,
        needs=AUDIO,
    )
