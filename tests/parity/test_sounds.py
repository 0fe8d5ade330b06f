"""Sounds as Transformers hears them: mel features, positions beside images, and files on their way to the model."""

from __future__ import annotations

import io
import json
import wave
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from megavlm.arch.image_tokens import features_of
from megavlm.checkpoint.hf.hf_files import HfFolder
from megavlm.config.schema import AudioConfig, DataConfig, DatasetConfig
from megavlm.data import clips
from megavlm.data.collate import CollateSpec, collate, mrope_positions
from megavlm.data.file_source import FilesSource
from megavlm.data.types import Segment
from megavlm.families import family_of, processor_from, published_model
from megavlm.families.shared.videos import moments_of
from megavlm.inference.assistant import Assistant
from megavlm.inputs.bad_sample import BadSample
from megavlm.inputs.layout import Film, Layout, Prompt, Tile
from megavlm.inputs.sounds import RATE, SoundProcessor, with_sound
from megavlm.inputs.video import Budget, Clip
from megavlm.programs import chat
from megavlm.programs.evaluation import evaluate
from tests.support import hf
from tests.support.gates import hold
from tests.support.harness import Single, difference
from tests.support.processors import PIXELS, bare, picture
from tests.support.tiny_models import tiny
from tests.support.tokenizers import byte_level

SECONDS = 2
PROCESSOR = SoundProcessor(AudioConfig(), longest=SECONDS * RATE, text="", number=0, start="", end="")


def tone(samples: int, *, seed: int = 0) -> np.ndarray:
    """Return a tone and noise [samples] that end abruptly."""
    rng = np.random.default_rng(seed)
    return (0.4 * np.sin(np.arange(samples) / 7) + 0.01 * rng.standard_normal(samples)).astype(np.float32)


def write_wav(path: Path, samples: np.ndarray, rate: int) -> None:
    """Write samples [n, channels] of 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())


def whisper(samples: np.ndarray, *, padded: bool, bins: int = 128) -> torch.Tensor:
    """Return the features [T, M] that Transformers computes, padded as Qwen2.5-Omni's or alone as Qwen3-Omni's."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=SECONDS)
    options = {"padding": "max_length"} if padded else {"padding": True, "truncation": False}
    found = extractor([samples], sampling_rate=RATE, return_attention_mask=True, return_tensors="pt", **options)
    return found["input_features"][0].T[found["attention_mask"][0].bool()]


LENGTHS = (1, 399, 1600, 20_003, SECONDS * RATE - 100, SECONDS * RATE, SECONDS * RATE + 999)


@pytest.mark.parametrize(
    ("samples", "padded"), [*((n, True) for n in LENGTHS), *((n, False) for n in (201, *LENGTHS[1:-1]))]
)
def test_features_are_those_of_whisper(samples: int, padded: bool) -> None:
    given = tone(samples)
    ours, expected = replace(PROCESSOR, padded=padded).mels(given), whisper(given, padded=padded)
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() < 1e-5


def test_a_click_without_a_whole_window_is_refused() -> None:
    alone = replace(PROCESSOR, audio=AudioConfig(conv_channels=6, chunk_frames=100), padded=False)
    assert alone.layout(201, "").prompt.runs == (1,)
    with pytest.raises(BadSample, match="200 samples, too few"):
        alone.layout(200, "")


def test_silence_has_features() -> None:
    assert PROCESSOR.mels(np.zeros(3200, np.float32)).unique().tolist() == [-1.5]


@pytest.mark.parametrize(("name", "frames"), [("omni", (11, 8)), ("omni3-moe", (24, 9))])
def test_positions_of_sounds_count_as_those_of_text(name: str, frames: tuple[int, int]) -> None:
    """Two words, a sound of three features, an image of 2 × 3, a sound of two, a word; each between its marks."""
    model = tiny(name).model
    config = model.config
    sound, image = config.audio_token_id, config.image_token_id
    marks = config.vision_start_token_id, config.audio_start_token_id
    tokens = [1, 2, marks[1], *[sound] * 3, 3, marks[0], *[image] * 6, 4, marks[1], *[sound] * 2, 5, 6]
    given = torch.tensor([tokens])
    theirs, _ = model.get_rope_index(
        given,
        image_grid_thw=torch.tensor([[1, 4, 6]]),
        attention_mask=torch.ones_like(given),
        audio_seqlens=torch.tensor(frames),
    )
    ours = mrope_positions(np.array(tokens) == image, [((4, 6), (0,), (), False)], merge=2)
    assert ours.tolist() == theirs[:, 0].tolist()


@pytest.mark.parametrize("name", ["omni", "omni3-moe"])
@pytest.mark.parametrize(
    ("groups", "seconds", "frames"),
    # Sounds that end after the video, before it, and with it; groups further apart than a turn, and one group.
    [(3, 1.0, 900), (7, 1.0, 150), (6, 0.5, 300), (4, 5.0, 1900), (1, 1.0, 9), (5, 2.0, 421)],
)
def test_a_video_and_its_sound_take_turns(name: str, groups: int, seconds: float, frames: int) -> None:
    """Between an image and another sound; the tokens of Transformers' processor, and the positions of its model."""
    model = tiny(name).model
    config = model.config
    kind, audio, other, turn = Qwen2_5OmniProcessor, AudioConfig(), 11, 50
    if name == "omni3-moe":  # at whole steps
        kind, audio, other, turn = Qwen3OmniMoeProcessor, AudioConfig(conv_channels=6, chunk_frames=100), 24, None
        seconds *= 2
    image, video, sound = config.image_token_id, config.video_token_id, config.audio_token_id
    marks = config.vision_start_token_id, config.audio_start_token_id
    reader = bare(
        kind,
        **{"video_token": "V", "audio_token": "A", "audio_bos_token": "[", "audio_eos_token": "]"},
        video_processor=SimpleNamespace(merge_size=2),
    )
    grids = {"video_grid_thw": torch.tensor([[groups, 4, 6]]), "video_second_per_grid": [seconds]}
    text = reader.replace_video_with_audio_token(
        grids,
        0,
        {"num_audio_tokens": [features_of(frames, audio)]},
        0,
        position_id_per_seconds=config.position_id_per_seconds,
        seconds_per_chunk=2.0,
    )
    film = Film(tuple(range(groups)), (0.0,) * groups, moments_of(groups, seconds, config.position_id_per_seconds))
    prompt = Prompt("V", ("<", ">"), (groups * 6,), video)
    layout = Layout((0, 0), (Tile(0, 0, (4, 6)),) * groups, (0, 0), prompt, film)
    prompt = Prompt("V", ("[", "]"), (features_of(frames, audio),), sound)
    ours = with_sound(layout, Layout((frames, 12), (), (0, 0), prompt, frames=frames), turn=turn)
    pieces = zip(ours.prompt.numbers, ours.prompt.runs, strict=True)
    written = "".join("VA"[number == sound] * run for number, run in pieces)
    assert f"<[{written}]>" == f"<{text}>"
    assert str(ours.prompt) == f"<[{'V' * len(written)}]>"

    turns = [video if letter == "V" else sound for letter in written]
    tokens = [1, marks[0], *[image] * 6, 3, 4, 5, *marks, *turns, 7, 8, 1, marks[1], *[sound] * 3, 7, 1]
    given, film = torch.tensor([tokens]), ours.film
    theirs, _ = model.get_rope_index(
        given,
        image_grid_thw=torch.tensor([[1, 4, 6]]),
        video_grid_thw=grids["video_grid_thw"],
        attention_mask=torch.ones_like(given),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([frames, other]),
        second_per_grids=torch.tensor([seconds]),
    )
    assert film is not None
    runs = [((4, 6), (0,), (), False), ((4, 6), film.moments, film.pieces, film.shares_marks)]
    found = mrope_positions(np.isin(tokens, [image, video]), runs, merge=2, timed=True)
    assert found.tolist() == theirs[:, 0].tolist()


@pytest.mark.parametrize(("name", "moments"), [("omni", (0, 25, 50)), ("omni3-moe", (0, 13, 26))])
def test_text_follows_the_last_moment_of_a_silent_video(name: str, moments: tuple[int, ...]) -> None:
    model = tiny(name).model
    video, start = model.config.video_token_id, model.config.vision_start_token_id
    tokens = [1, start, *[video] * 18, 3, 4]
    given = torch.tensor([tokens])
    theirs, _ = model.get_rope_index(
        given,
        video_grid_thw=torch.tensor([[3, 4, 6]]),
        attention_mask=torch.ones_like(given),
        second_per_grids=torch.tensor([1.0]),
    )
    runs = [((4, 6), moments, (), False)]
    assert mrope_positions(np.array(tokens) == video, runs, merge=2, timed=True).tolist() == theirs[:, 0].tolist()


def test_a_short_sound_does_not_depend_on_its_neighbours(
    single: Single, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers pads all chunks to the longest of a batch, which the convolutions of Qwen3-Omni see. So many chunks
    as are in memory together do not change what is heard either.
    """
    folder = hf.save(tiny("omni3-moe"), tmp_path / "hf")
    config = hf.config_for(folder)
    engine = hf.engine_for(config, folder, single)
    samples = hf.samples_of(config, [[(12,)], [(117,)]], seed=3)
    batches = [hf.batch_of_rows(config, [[each] for each in given]) for given in (samples[:1], samples)]
    (alone,), (beside,) = (engine.schedule.logits([batch]) for batch in batches)
    assert difference(beside[:1], alone, "logits") < 1e-6
    monkeypatch.setattr("megavlm.model.audio._AT_ONCE", 1)
    (apart,) = engine.schedule.logits(batches[1:])
    assert difference(apart, beside, "logits") < 1e-6


def test_files_are_read_at_16_khz(tmp_path: Path) -> None:
    """Two channels at 48 kHz, of which one is silent; the samples of a file at 16 kHz come back as they are."""
    given = (tone(4800) * 32767).astype(np.int16)
    write_wav(tmp_path / "same.wav", given[:, None], RATE)
    write_wav(tmp_path / "other.wav", np.stack([given, 0 * given], axis=1), 3 * RATE)
    assert np.array_equal(clips.sound(tmp_path / "same.wav", longest=RATE), given / np.float32(32768))
    other = clips.sound(tmp_path / "other.wav", longest=RATE)
    assert len(other) == pytest.approx(1600, abs=20)
    assert np.abs(other).max() == pytest.approx(0.2, rel=0.2)
    assert len(clips.sound(tmp_path / "same.wav", longest=1000)) == 1000


@pytest.mark.parametrize(("suffix", "codec", "loudness"), [("flac", "flac", 0.5), ("mp3", "libmp3lame", 0.475)])
def test_compressed_files_sound_as_they_did(suffix: str, codec: str, loudness: float, tmp_path: Path) -> None:
    """One second in two channels at 48 kHz. LAME lowers what it encodes to 0.95."""
    given = (0.5 * np.sin(np.arange(3 * RATE) * 2 * np.pi * 440 / (3 * RATE)) * 32767).astype(np.int16)
    path = tmp_path / f"sound.{suffix}"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=3 * RATE, layout="stereo")
        frame = av.AudioFrame.from_ndarray(np.repeat(given, 2)[None], format="s16", layout="stereo")
        frame.sample_rate = 3 * RATE
        for packet in (packet for each in (frame, None) for packet in stream.encode(each)):
            container.mux(packet)
    ours = clips.sound(path, longest=2 * RATE)
    assert len(ours) == RATE
    power = np.abs(np.fft.rfft(ours[1000:13800], RATE))
    assert int(power.argmax()) == 440
    assert np.sqrt(2) * ours[1000:13800].std() == pytest.approx(loudness, abs=2e-4)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(BadSample, match="cannot be decoded"):
        clips.sound(path, longest=RATE)


TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'audio' %}\
AUDIO{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# What stands before an image, for it, and behind it; the same of a sound; for a video.
MARKS = {
    "omni": "<|vision_bos|> <|IMAGE|> <|vision_eos|> <|audio_bos|> <|AUDIO|> <|audio_eos|> <|VIDEO|>".split(),
    "omni3-moe": (
        "<|vision_start|> <|image_pad|> <|vision_end|> <|audio_start|> <|audio_pad|> <|audio_end|> <|video_pad|>"
    ).split(),
}
TOWERS = {"omni": {"patch_size": 14, "window_size": 56}, "omni3-moe": {"patch_size": 14}}
TALK = ("What is in the picture? ", "Is it blue? ", "A cat and a dog.")


IMAGES = Qwen2VLImageProcessorPil(patch_size=14, size=PIXELS)
HEARD = [(tone(n, seed=n) * 32767).astype(np.int16) for n in (5000, 17_333)]
SEEN = Image.fromarray(picture(60, 90))
Omni = tuple[Path, Any, Any]


@pytest.fixture(scope="module", params=MARKS)
def omni(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Omni:
    """The folder of a tiny model, the model and its tokenizer; beside the folder a.png, 0.wav and 1.wav."""
    name, root = request.param, tmp_path_factory.mktemp("omni")
    marks, padded = MARKS[name], name == "omni"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks]),
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
    before_image, image_mark, _, before_sound, sound_mark, _, video_mark = marks
    known, number = tokenizer.get_vocab(), "token_index" if padded else "token_id"
    theirs = tiny(
        name,
        vision=TOWERS[name],
        text={"vocab_size": len(tokenizer) + 3},
        **{f"image_{number}": known[image_mark], f"video_{number}": known[video_mark]},
        **{f"audio_{number}": known[sound_mark], "audio_start_token_id": known[before_sound]},
        vision_start_token_id=known[before_image],
    )
    folder = hf.save(theirs, root / "hf")
    tokenizer.save_pretrained(folder)
    template = TEMPLATE.replace("IMAGE", "".join(marks[:3])).replace("AUDIO", "".join(marks[3:6]))
    (folder / "chat_template.jinja").write_text(template)
    extractor = transformers.WhisperFeatureExtractor(feature_size=12, chunk_length=SECONDS)
    (folder / "preprocessor_config.json").write_text(json.dumps({**extractor.to_dict(), **IMAGES.to_dict()}))
    SEEN.save(root / "a.png")
    for number, each in enumerate(HEARD):
        write_wav(root / f"{number}.wav", each[:, None], RATE)
    return folder, theirs, tokenizer


def inputs_of_transformers(
    folder: Path, tokenizer: Any, *parts: str | int | Image.Image, answer: str = ""
) -> dict[str, torch.Tensor]:
    """A question of texts, an image and numbers of HEARD, as Transformers' processors make it an input of its model."""
    padded = hf.family_in(folder) == "qwen2_5_omni"
    before_image, image_mark, behind_image, before_sound, sound_mark, behind_sound, _ = MARKS[
        "omni" if padded else "omni3-moe"
    ]
    mels = [whisper(HEARD[each] / np.float32(32768), padded=padded, bins=12) for each in parts if isinstance(each, int)]
    lengths = torch.tensor([len(each) for each in mels])
    counts = iter(((lengths - 1) // 2 + 1 - 2) // 2 + 1 if padded else _get_feat_extract_output_lengths(lengths))
    pixels: dict[str, Any] = {}
    text = "<|im_start|>user\n"
    for part in parts:
        if isinstance(part, str):
            text += part
        elif isinstance(part, int):
            text += before_sound + sound_mark * int(next(counts)) + behind_sound
        else:
            pixels = dict(IMAGES(images=[part], return_tensors="pt"))
            text += before_image + image_mark * int(pixels["image_grid_thw"].prod() // 4) + behind_image
    ended = f"{answer}<|im_end|>\n" if answer else ""
    given = tokenizer(f"{text}<|im_end|>\n<|im_start|>assistant\n{ended}", return_tensors="pt")
    return {
        **{"input_ids": given["input_ids"], "attention_mask": given["attention_mask"], **pixels},
        "input_features": torch.nn.utils.rnn.pad_sequence(mels, batch_first=True).mT,
        "feature_attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
    }


def test_a_record_gives_the_logits_that_transformers_gives(omni: Omni, single: Single, tmp_path: Path) -> None:
    """A sound, an image and another sound in one question; Transformers' positions, mel features and pixels."""
    folder, theirs, tokenizer = omni
    question = f"<audio>{TALK[0]}<image>{TALK[1]}<audio>"
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": TALK[2]}]
    record = {"messages": said, "images": ["a.png"], "audios": ["0.wav", "1.wav"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")

    config = hf.config_for(folder, seq_length=200)
    records = DatasetConfig(path=str(tmp_path / "train.jsonl"), image_root=str(folder.parent))
    config = replace(config, data=DataConfig(datasets=(records,)))
    source = FilesSource(config)
    (encoded,) = source.encode(0).samples
    sample = source.load(Segment(0, encoded))
    batch = collate([[sample]], CollateSpec.of(config, source, seq_length=200))
    (logits,) = hf.engine_for(config, folder, single).schedule.logits([batch])

    inputs = inputs_of_transformers(folder, tokenizer, 0, TALK[0], SEEN, TALK[1], 1, answer=TALK[2])
    assert inputs["input_ids"][0].tolist() == sample.tokens.tolist()
    with torch.no_grad():
        expected = theirs(**inputs, use_cache=False).logits
    hold(hf.family_in(folder), "record", difference(logits[:, : len(sample)], expected, "logits"))


def test_frames_whose_times_are_no_whole_steps_are_refused() -> None:
    """Thirteen steps a second, of which Transformers keeps fractions."""
    reader = {"image_processor_type": "Qwen2VLImageProcessor", "feature_extractor_type": "WhisperFeatureExtractor"}
    sizes = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
    model = published_model("qwen3_omni_30b_a3b")
    videos = processor_from({**reader, **sizes}, model, model_type="qwen3_omni_moe").video
    assert videos is not None
    clip = Clip(64, 96, tuple(number / 10 for number in range(40)), 10.0)
    film = videos.layout(clip, Budget(fps=2)).film
    assert film is not None
    assert film.moments == (0, 13, 26, 39)
    with pytest.raises(BadSample, match="times of 4 frames a second are no whole"):
        videos.layout(clip, Budget(fps=4))


def write_talk(path: Path, samples: np.ndarray, *, frames: int) -> None:
    """Write a video of a frame a second, with samples [n] of 16 bits at 16 kHz if there are any."""
    with av.open(str(path), "w", format="matroska") as file:
        film = file.add_stream("libx264", rate=1)
        film.height, film.width, film.pix_fmt = 60, 90, "yuv420p"
        voice = file.add_stream("pcm_s16le", rate=RATE, layout="mono") if len(samples) else None
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(60, 90, seed=number), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 1)
            file.mux(film.encode(frame))
        file.mux(film.encode(None))
        if voice is not None:
            spoken = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
            spoken.sample_rate = RATE
            file.mux([*voice.encode(spoken), *voice.encode(None)])


@pytest.mark.parametrize("heard", [True, False])
def test_a_video_with_its_sound_gives_the_logits_of_transformers(
    omni: Omni, single: Single, tmp_path: Path, heard: bool
) -> None:
    """Frames of two seconds each, and two seconds of sound with them; or no sound."""
    folder, theirs, _ = omni
    samples = (tone(SECONDS * RATE) * 32767).astype(np.int16)
    write_talk(tmp_path / "it.mkv", samples[: len(samples) * heard], frames=4)
    said = [{"role": "user", "content": f"<video>{TALK[0]}"}, {"role": "assistant", "content": TALK[2]}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": said, "videos": ["it.mkv"]}) + "\n")
    config = hf.config_for(folder, seq_length=640)
    records = (DatasetConfig(path=str(tmp_path / "train.jsonl")),)
    data = DataConfig(datasets=records, video_fps=1.0, video_max_tokens=10**6, video_sound=True)
    config = replace(config, data=data)
    source = FilesSource(config)
    (encoded,) = source.encode(0).samples
    sample = source.load(Segment(0, encoded))
    batch = collate([[sample]], CollateSpec.of(config, source, seq_length=len(sample)))
    (logits,) = hf.engine_for(config, folder, single).schedule.logits([batch])
    given = family_of(HfFolder(folder).settings).inputs(batch, config.model)
    ours = given.pop("position_ids")
    grids = given["video_grid_thw"]
    given["video_grid_thw"] = torch.tensor([[2, *grids[0, 1:]]])
    seconds = {"video_second_per_grid": torch.tensor([2.0]), "use_audio_in_video": heard}
    mask = torch.ones_like(given["input_ids"])
    lengths = {"audio_seqlens": torch.tensor([200])} if heard else {}
    expected, _ = theirs.model.get_rope_index(
        given["input_ids"],
        **{"video_grid_thw": given["video_grid_thw"], "attention_mask": mask, "use_audio_in_video": heard},
        **{"second_per_grids": torch.tensor([2.0]), **lengths},
    )
    assert ours.tolist() == expected.tolist()
    assert heard == (batch.sounds.frames == (200,)), "the sound of the file"
    with torch.no_grad():
        logits_of_theirs = theirs(**given, **seconds, attention_mask=mask, use_cache=False).logits
    hold(hf.family_in(folder), "record", difference(logits[:, : len(sample)], logits_of_theirs, "logits"))


def test_answers_to_sounds_are_those_of_transformers(omni: Omni, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The prompts are of an image and two sounds, and of a sound alone; chat and evaluate answer both."""
    folder, theirs, tokenizer = omni
    root, short = folder.parent, ["--max-new-tokens", "6", "--device", "cpu"]
    assistant = Assistant.load(folder, DataConfig(), device=torch.device("cpu"))
    assert CollateSpec.of(assistant.model.config, assistant.source).feature_tokens == assistant.source.feature_tokens

    def answer(*parts: str | int | Image.Image) -> str:
        options = transformers.GenerationConfig(
            **{"max_new_tokens": 6, "do_sample": False, "eos_token_id": list(assistant.ends)},
            suppress_tokens=list(assistant.source.feature_tokens),
        )
        inputs = inputs_of_transformers(folder, tokenizer, *parts)
        made = theirs.generate(**inputs, generation_config=options)[0, inputs["input_ids"].shape[1] :]
        return str(tokenizer.decode(made, skip_special_tokens=True)).strip()

    sounds = [str(root / f"{number}.wav") for number in range(2)]
    asked = ["--image", str(root / "a.png"), "--audio", sounds[0], "--audio", sounds[1], "--prompt", TALK[0].strip()]
    assert chat.main([str(folder), *asked, *short]) == 0
    first = answer(SEEN, 0, 1, TALK[0].strip())
    assert capsys.readouterr().out == f"{first}\n"
    second = answer(1, TALK[0].strip())
    assert first != second, "the model hears its prompt"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/audio {sounds[1]}\n{TALK[0]}\n/audio {root / 'a.png'}\n/quit\n"))
    assert chat.main([str(folder), *short]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{second}\n"
    assert "(1.1 s, with the next message)" in printed.err
    assert "a.png: the sound cannot be decoded" in printed.err
    said, both = {"question": TALK[0].strip(), "answers": [second]}, {"audios": ["0.wav", "1.wav"], "image": "a.png"}
    lines = [{"audio": "1.wav", **said}, {**both, **said}, {"audio": "0.wav", **said}]
    (tmp_path / "task.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    task = f"{tmp_path / 'task.jsonl'},image_root={root}"
    assert evaluate.main([str(folder), "--task", task, "--out", str(tmp_path / "out"), *short]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())["tasks"]["task"]["answers"]
    assert [each["answer"] for each in results] == [second, first, answer(0, TALK[0].strip())]
    assert (tmp_path / "out/failures.html").read_text().count('alt="64×') == 3
