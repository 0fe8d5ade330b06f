"""Sounds as Transformers hears them: mel features, positions beside images, and files on their way to the model."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from megavlm.data.collate import mrope_positions
from megavlm.data.sounds import decode_sound
from megavlm.inputs.sounds import RATE, SoundProcessor
from tests.support.tiny_models import tiny

SECONDS = 2
PROCESSOR = SoundProcessor(bins=128, longest=SECONDS * RATE, text="", number=0, start="", end="")


def tone(samples: int, *, seed: int = 0) -> np.ndarray:
    """Noise under a tone that ends abruptly."""
    rng = np.random.default_rng(seed)
    return (0.4 * np.sin(np.arange(samples) / 7) + 0.01 * rng.standard_normal(samples)).astype(np.float32)


@pytest.mark.parametrize("samples", [1, 399, 1600, 20_003, SECONDS * RATE - 100, SECONDS * RATE, SECONDS * RATE + 999])
def test_features_are_those_of_whisper(samples: int) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=SECONDS)
    given = tone(samples)
    theirs = extractor(
        [given], sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    expected = theirs["input_features"][0].T[theirs["attention_mask"][0].bool()]
    ours = PROCESSOR.mels(given)
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() < 1e-5


def test_silence_has_features() -> None:
    assert PROCESSOR.mels(np.zeros(3200, np.float32)).unique().tolist() == [-1.5]


def test_positions_of_sounds_count_as_those_of_text() -> None:
    """Two words, a sound of three features, an image of 2 × 3, a sound of two, a word; each between its marks."""
    model = tiny("omni").model
    config = model.config
    sound, image = config.audio_token_id, config.image_token_id
    marks = config.vision_start_token_id, config.audio_start_token_id
    tokens = [1, 2, marks[1], *[sound] * 3, 3, marks[0], *[image] * 6, 4, marks[1], *[sound] * 2, 5, 6]
    given = torch.tensor([tokens])
    theirs, _ = model.get_rope_index(
        given,
        image_grid_thw=torch.tensor([[1, 4, 6]]),
        attention_mask=torch.ones_like(given),
        audio_seqlens=torch.tensor([11, 8]),
    )
    ours = mrope_positions(np.array(tokens) == image, [((4, 6), (0,))], merge=2)
    assert ours.tolist() == theirs[:, 0].tolist()


def test_files_are_read_at_16_khz(tmp_path: Path) -> None:
    """Two channels at 48 kHz, of which one is silent; the samples of a file at 16 kHz come back as they are."""
    given = (tone(4800) * 32767).astype(np.int16)
    for name, rate, channels in (("same.wav", RATE, 1), ("other.wav", 3 * RATE, 2)):
        with wave.open(str(tmp_path / name), "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(np.stack([given, 0 * given][:channels], axis=1).tobytes())
    assert np.array_equal(decode_sound(tmp_path / "same.wav", longest=RATE), given / np.float32(32768))
    other = decode_sound(tmp_path / "other.wav", longest=RATE)
    assert len(other) == pytest.approx(1600, abs=20)
    assert np.abs(other).max() == pytest.approx(0.2, rel=0.2)
    assert len(decode_sound(tmp_path / "same.wav", longest=1000)) == 1000
