"""Measure whether a model learns to hear: a small Qwen2.5-Omni is asked which digit a voice says.

    pip install espeakng-loader
    python benchmarks/spoken_digits.py

eSpeak NG says digits in its voices, at random pitch and speed; the files are wav, and the records name them as `audio`.
The model begins with random weights. Transformers alone, from the export, then computes how likely each of the ten
answers is for voices that the model has never heard. Appended to `records/spoken_digits.jsonl`: the share of sounds
whose digit is the likeliest answer, the same with each sound exchanged for another (chance is 0.1), and the processor
time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import tempfile
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import record
from numpy.typing import NDArray
from preferences import trained
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megavlm.demo.canvases import WORDS

QUESTION = "Digit?"
BINS, CHUNK = 64, 50  # mel bins, and positions of a chunk of the encoder
TRAINING, HELD_OUT = 3000, 300  # sounds
MARKS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>"),
    *("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"),
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'audio' %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAIN = "--lr 2e-3 --seq-length 128 --global-batch-size 32 --micro-batch-size 16 --lr-warmup-iters 20".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    circumstances = record.circumstances()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = write_sounds(folder)
        write_model(folder / "model")
        trained(folder, "model", "questions", [*TRAIN, "--train-iters", str(arguments.steps)])
        figures = shares(folder / "questions", held_out)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    figures["processor_seconds"] = sum(each.ru_utime + each.ru_stime for each in used)
    print(figures)
    record.append("spoken_digits", {**circumstances, "arguments": vars(arguments), **figures})


class Speaker:
    """eSpeak NG, through the C interface of its library (`speak_lib.h`)."""

    def __init__(self) -> None:
        import espeakng_loader

        data = Path(espeakng_loader.get_data_path())
        self.voices = sorted(path.name for path in (data / "voices/!v").iterdir())
        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        synchronous, buffer = 2, 0
        self.rate = self.library.espeak_Initialize(synchronous, buffer, str(data.parent).encode(), 0)
        self.heard: list[NDArray[np.int16]] = []

        def hear(samples: Any, count: int, _events: Any) -> int:
            if samples:
                self.heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
            return 0

        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self.callback = kind(hear)  # the library keeps no reference
        self.library.espeak_SetSynthCallback(self.callback)

    def say(self, word: str, voice: str, *, pitch: int, speed: int) -> NDArray[np.int16]:
        """Return the samples [n] of a word; `pitch` is from 0 to 100, `speed` in words a minute."""
        self.heard.clear()
        assert not self.library.espeak_SetVoiceByName(f"en-us+{voice}".encode()), voice
        for parameter, value in ((1, speed), (3, pitch)):
            self.library.espeak_SetParameter(parameter, value, 0)
        text, utf8 = word.encode(), 1
        self.library.espeak_Synth(text, len(text) + 1, 0, 1, 0, utf8, None, None)
        self.library.espeak_Synchronize()
        return np.concatenate(self.heard)


def write_sounds(folder: Path) -> list[tuple[Path, int]]:
    """Write the sounds, and records of those of most voices; return the sounds of the other voices with their digit."""
    speaker, chance = Speaker(), np.random.default_rng(1)
    voices = chance.permutation(speaker.voices).tolist()
    known, unknown = voices[len(voices) // 5 :], voices[: len(voices) // 5]
    records, held_out = [], list[tuple[Path, int]]()
    for number in range(TRAINING + HELD_OUT):
        digit, trains = int(chance.integers(10)), number < TRAINING
        pitch, speed = int(chance.integers(20, 80)), int(chance.integers(120, 220))
        samples = speaker.say(WORDS[digit], str(chance.choice(known if trains else unknown)), pitch=pitch, speed=speed)
        path = folder / f"{number}.wav"
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, speaker.rate, len(samples), "NONE", ""))
            file.writeframes(samples.tobytes())
        if trains:
            records.append({"audio": str(path), "question": f"<audio>{QUESTION}", "answer": WORDS[digit]})
        else:
            held_out.append((path, digit))
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    return held_out


def write_model(folder: Path) -> None:
    """Write a thinker of a million random parameters and a tokenizer of single bytes."""
    import torch
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5OmniThinkerForConditionalGeneration,
        WhisperFeatureExtractor,
    )
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate([*MARKS, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    words = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    config = Qwen2_5OmniThinkerConfig(
        audio_config={
            **{"num_mel_bins": BINS, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 192},
            **{"d_model": 96, "n_window": CHUNK, "output_dim": 128},
        },
        vision_config={
            **{"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "patch_size": 14},
            **{"out_hidden_size": 128, "fullatt_block_indexes": [0]},
        },
        text_config={
            **{"vocab_size": len(words), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        },
        **{f"{kind}_token_index": MARKS.index(f"<|{kind.upper()}|>") for kind in ("image", "video", "audio")},
        **{"vision_start_token_id": MARKS.index("<|vision_bos|>"), "tie_word_embeddings": False},
        audio_start_token_id=MARKS.index("<|audio_bos|>"),
    )
    torch.manual_seed(1)
    Qwen2_5OmniThinkerForConditionalGeneration(config).save_pretrained(folder)
    words.save_pretrained(folder)
    sizes = {"min_pixels": 3136, "max_pixels": 3136, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    options = {"image_processor_type": "Qwen2VLImageProcessor", **sizes, **extractor(WhisperFeatureExtractor).to_dict()}
    (folder / "preprocessor_config.json").write_text(json.dumps(options))


def extractor(kind: Any) -> Any:
    """Return the extractor of mel features, of sounds of at most two seconds."""
    return kind(feature_size=BINS, chunk_length=2)


def shares(folder: Path, held_out: Sequence[tuple[Path, int]]) -> dict[str, float]:
    """Return the shares of sounds, and of exchanged sounds, whose digit is the likeliest answer, by Transformers."""
    import torch
    from transformers import AutoTokenizer, Qwen2_5OmniThinkerForConditionalGeneration, WhisperFeatureExtractor

    torch.set_num_threads(1)
    words = AutoTokenizer.from_pretrained(folder)
    model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder).eval()
    mels = extractor(WhisperFeatureExtractor)
    answers = []
    for path, _ in held_out:
        heard = mels(
            sampled(path, mels.sampling_rate),
            **{"sampling_rate": mels.sampling_rate, "padding": "max_length"},
            **{"return_attention_mask": True, "return_tensors": "pt"},
        )
        frames = int(heard["attention_mask"].sum())
        features = "<|AUDIO|>" * ((frames + 1) // 2 // 2)
        begin = f"<|im_start|>user\n<|audio_bos|>{features}<|audio_eos|>{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        given = words([f"{begin}{word}<|im_end|>" for word in WORDS], padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(
                **{name: given[name] for name in ("input_ids", "attention_mask")},
                input_features=heard["input_features"].expand(len(WORDS), -1, -1),
                feature_attention_mask=heard["attention_mask"].expand(len(WORDS), -1),
            ).logits
        each = logits.log_softmax(-1)[:, :-1].gather(2, given["input_ids"][:, 1:, None])[..., 0]
        first = len(words(begin)["input_ids"]) - 1
        found = [float(each[row, first : first + len(word) + 1].sum()) for row, word in enumerate(WORDS)]
        answers.append(int(np.argmax(found)))
    digits = [digit for _, digit in held_out]
    right = np.mean(np.array(answers) == digits)
    return {"right": float(right), "right_exchanged": float(np.mean(np.roll(answers, 1) == digits))}


def sampled(path: Path, rate: int) -> NDArray[np.float32]:
    """Return the samples [n] of a wav file at another rate, by linear interpolation (our decoder has no part in it)."""
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16) / np.float32(2**15)
        places = np.arange(int(len(samples) * rate / file.getframerate())) * (file.getframerate() / rate)
    return np.interp(places, np.arange(len(samples)), samples).astype(np.float32)


if __name__ == "__main__":
    main()
