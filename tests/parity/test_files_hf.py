"""The whole way of a user's record: a file with images or a clip beside it, a Hugging Face folder, logits.

Transformers takes the same record through its own processor (template, tokens, pixels) and model, and a clip through
its own decoder, sampling and video processor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megavlm.config.schema import DataConfig, DatasetConfig
from megavlm.data.collate import CollateSpec, collate
from megavlm.data.file_source import FilesSource
from megavlm.data.types import Sample, Segment
from megavlm.families.shared.inputs import unpatchify
from megavlm.inputs.batch import MicroBatch
from megavlm.inputs.video import Clip, VideoProcessor
from tests.support import hf
from tests.support.clips import clip
from tests.support.covering import fast_and_slow, slow
from tests.support.gates import hold
from tests.support.harness import Single, difference
from tests.support.processors import CASES, picture
from tests.support.video_reference import Task, references
from tests.support.whole_models import PROCESSORS, whole_folder

TALK = ("Which is the largest?", "A cat and a dog.", "How many?", "7, it is blue.")


def write_record(folder: Path, sizes: list[tuple[int, int]]) -> tuple[Path, list[Image.Image]]:
    images = [Image.fromarray(picture(*size, seed=seed)) for seed, size in enumerate(sizes)]
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
    said = [("<image>\n" * len(images)) + TALK[0], *TALK[1:]]
    turns = [{"from": ("human", "gpt")[place % 2], "value": value} for place, value in enumerate(said)]
    path = folder / "train.jsonl"
    names = [f"{number}.png" for number in range(len(images))]
    path.write_text(json.dumps({"image": names, "conversations": turns}) + "\n")
    return path, images


@pytest.mark.parametrize(
    ("name", "sizes"),
    # An image among others is only looked at whole by LLaVA-OneVision; to other families it is one more image.
    [
        *((name, [(60, 90)]) for name in CASES),
        *(slow(name, [(60, 90)]) for name in PROCESSORS),
        ("onevision", [(90, 60), (90, 60)]),
        ("qwen2-vl", [(90, 60), (90, 60)]),
    ],
)
def test_a_record_gives_the_logits_that_transformers_gives(name, sizes, single, tmp_path):
    folder, theirs, processor = whole_folder(name, tmp_path)
    path, images = write_record(tmp_path, sizes)

    config = hf.config_for(folder, seq_length=640)
    config = replace(config, data=DataConfig(datasets=(DatasetConfig(path=str(path)),)))
    source = FilesSource(config)
    (encoded,) = source.encode(0).samples
    sample = source.load(Segment(0, encoded))
    batch = collate([[sample]], CollateSpec.of(config, source, seq_length=640))
    (logits,) = hf.engine_for(config, folder, single).schedule.logits([batch])

    pictures = [{"type": "image", "image": image} for image in images]
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": [{"type": "text", "text": text}]}
        for place, text in enumerate(TALK)
    ]
    messages[0]["content"] = [*pictures, *messages[0]["content"]]
    inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == sample.tokens.tolist()
    with torch.no_grad():
        expected = theirs(**inputs, use_cache=False).logits
    hold(hf.family_in(folder), "record", difference(logits[:, : len(sample)], expected, "logits"))


LENGTH = 256
# (frames, frames per second) of clips of which frames are taken; nothing is decoded.
LENGTHS = ((33, 12.0), (7, 10.0), (90, 29.97), (1000, 30.0), (2400, 23.976), (9001, 59.94), (7200, 23.976))
PAIRED = ("qwen", "cosmos", "glm", "exaone", "muse")  # two frames to a patch
UNBOUND = ("onevision", "internvl", "glm", "kimi")  # Transformers takes as many frames as the rate asks for
MESSAGES: list[Any] = [
    {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What happens?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A cat is blue."}]},
]


@dataclass(frozen=True)
class Way:
    """A family's options of videos, and the patches of each group of frames that they give: 33 frames of 100 × 130
    pixels at 12 per second, of which four per second are asked for.
    """

    options: dict[str, Any]
    grids: tuple[tuple[int, ...], ...]
    fps: float = 4.0
    kind: str = ""  # of the processor, if it is not that of the images' case


QWEN2 = {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 14}
QWEN3 = {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 16}
MUSE = {"video_processor_type": "MuseGlimmerVideoProcessor", "patch_size": 14}
GLM = {"video_processor_type": "Glm4vVideoProcessor", "patch_size": 14}
WAYS = {
    **dict.fromkeys(
        ("qwen2-vl", "qwen2.5-vl", "exaone4.5"),
        Way({**QWEN2, "size": {"shortest_edge": 4 * 28**2, "longest_edge": 16 * 28**2}}, ((6, 8),) * 5),
    ),
    # 11 frames, of which the last fills the last pair; bounds are of all frames together
    "qwen3-vl": Way({**QWEN3, "size": {"shortest_edge": 4096, "longest_edge": 100_000}}, ((4, 6),) * 6),
    "glm4v": Way({**GLM, "size": {"shortest_edge": 4096, "longest_edge": 100_000}}, ((4, 6),) * 6),
    "muse": Way({**MUSE, "max_video_frame_tokens": 20}, ((6, 8),) * 5),
    # 28 pixels are patches, and two are none
    "onevision": Way(
        {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": {"height": 30, "width": 30}}, ((2, 2),) * 11
    ),
    "internvl": Way(
        {"video_processor_type": "InternVLVideoProcessor", "size": {"height": 28, "width": 28}}, ((2, 2),) * 11
    ),
    # Its chat template has no videos; frames are resized twice.
    "smolvlm": Way(
        {
            "video_processor_type": "SmolVLMVideoProcessor",
            "max_image_size": {"longest_edge": 32},
            "video_sampling": {"fps": 1, "max_frames": 5, "video_size": {"longest_edge": 96}},
        },
        ((4, 4),) * 5,
    ),
    # Frames of 97 × 126 pixels, padded with black; 11 frames are two chunks of four and one of three.
    "kimi": Way(
        {
            **{"video_processor_type": "Kimi_K25VideoProcessor", "max_patches": 60},
            "size": {"max_height": 15, "max_width": 15},
        },
        ((8, 10, 4), (8, 10, 4), (8, 10, 3)),
    ),
}
# A frame a second of 2.75 seconds, whatever is asked for; each is cut into four.
MINICPM = {"video_processor_type": "MiniCPMV4_6VideoProcessor", "scale_resolution": 60, "patch_size": 4}
SLICED = ("minicpmv-4.6", "minicpmv-4.7")
WAYS |= dict.fromkeys(SLICED, Way({**MINICPM, "max_slice_nums": 4}, ((12, 16),) * 5 * 3, fps=1.0))
# As many frames as the folder says, whatever is asked for, of at most 70 features of 12 × 12 pixels.
GEMMA = ("gemma4", "gemma4-unified")
for name, grid in zip(GEMMA, ((21, 27), (7, 9)), strict=True):
    kind = "Gemma4Unified" if "unified" in name else "Gemma4"
    options = {"video_processor_type": f"{kind}VideoProcessor", "patch_size": 4, "num_frames": 2}
    WAYS[name] = Way(options, (grid,) * 2, fps=math.inf)
# At a rate that follows from the length, whatever is asked for: 16 frames, all but those of the last second.
GLM46 = {**WAYS["glm4v"].options, "video_processor_type": "Glm46VVideoProcessor"}
WAYS["glm4.6v"] = Way(GLM46, ((4, 6),) * 8, fps=math.inf, kind="Glm46VProcessor")
WAYS["glm4v-moe"] = WAYS["glm-ocr"] = WAYS["glm4v"]  # mixtures of experts see as the models without do
WAYS["qwen3-vl-moe"] = WAYS["cosmos3"] = WAYS["qwen3-vl"]


@dataclass(frozen=True)
class Seen:
    """What became of a record with a clip: here, and in Transformers."""

    family: str
    sample: Sample
    batch: MicroBatch
    logits: torch.Tensor
    inputs: dict[str, Any]
    theirs: Any
    video: VideoProcessor


FAST = ("gemma4", "internvl", "kimi", "qwen3-vl")


def cases(names: Iterable[str]) -> list[Any]:
    every = list(names)
    return fast_and_slow([name for name in FAST if name in every], every)


@pytest.fixture(scope="module")
def seen(single: Single, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Seen]:
    """All families that run, because Transformers takes longer to be imported than to be asked."""
    pytest.importorskip("av", reason="pip install av (the extra `video`)")
    root = tmp_path_factory.mktemp("videos")
    shown = [picture(100, 130, seed=number) for number in range(33)]
    (root / "it.mp4").write_bytes(clip(33, rate=12, frames=shown))
    turns = [{"from": "human", "value": "<video>\nWhat happens?"}, {"from": "gpt", "value": "A cat is blue."}]
    (root / "train.jsonl").write_text(json.dumps({"video": "it.mp4", "conversations": turns}))
    items = [item for item in request.session.items if "seen" in getattr(item, "fixturenames", ())]
    names = sorted({item.callspec.params["name"] for item in items if isinstance(item, pytest.Function)})
    made = {}
    for name in names:
        (root / name).mkdir()
        folder, theirs, _ = whole_folder(name, root / name)
        (folder / "video_preprocessor_config.json").write_text(json.dumps(WAYS[name].options))
        made[name] = (folder, theirs)
    film, rate = str(root / "it.mp4"), {"fps": 4.0}
    tasks = (
        Task(PROCESSORS.get(name, name), str(made[name][0]), MESSAGES, film, rate, WAYS[name].kind, LENGTHS)
        for name in names
    )
    inputs = references([*tasks], root)
    return {name: look(*made[name], given, single, WAYS[name].fps) for name, given in zip(names, inputs, strict=True)}


def look(folder: Path, theirs: Any, inputs: dict[str, Any], single: Single, fps: float) -> Seen:
    config = hf.config_for(folder, seq_length=LENGTH)
    datasets = (DatasetConfig(path=str(folder.parents[1] / "train.jsonl")),)
    data = DataConfig(datasets=datasets, video_max_tokens=10**6)
    config = replace(config, data=replace(data, video_fps=fps))
    source = FilesSource(config)
    record = source.encode(0)
    assert not record.skipped
    (encoded,) = record.samples
    sample = source.load(Segment(0, encoded))
    batch = collate([[sample]], CollateSpec.of(config, source, seq_length=LENGTH))
    (logits,) = hf.engine_for(config, folder, single).schedule.logits([batch])
    return Seen(hf.family_in(folder), sample, batch, logits, inputs, theirs, source.processor.video)


@pytest.mark.parametrize("name", cases(WAYS))
def test_a_clip_gives_the_tokens_and_logits_that_transformers_gives(name: str, seen: dict[str, Seen]) -> None:
    ours, tokens = seen[name], seen[name].inputs["input_ids"][0].clone()
    if name == "kimi":  # of whose videos Transformers has a token that is none of the published vocabulary
        config = ours.theirs.config
        config.video_token_id = int(tokens[ours.sample.tokens == config.image_token_id][0])
        tokens[tokens == config.video_token_id] = config.image_token_id
    assert tokens.tolist() == ours.sample.tokens.tolist()
    assert ours.batch.image_sizes.grids == WAYS[name].grids
    with torch.no_grad():
        given = {name: value for name, value in ours.inputs.items() if name != "frames"}
        expected = ours.theirs(**given, use_cache=False).logits
    hold(ours.family, "video_record", difference(ours.logits[:, : len(ours.sample)], expected, "logits"))


@pytest.mark.parametrize("name", cases(name for name in WAYS if name.startswith(PAIRED)))
def test_pairs_of_frames_have_the_pixels_and_positions_of_transformers(name: str, seen: dict[str, Seen]) -> None:
    ours, inputs = seen[name], seen[name].inputs
    assert inputs["video_grid_thw"].tolist() == [[len(WAYS[name].grids), *WAYS[name].grids[0]]]
    (rows, columns), groups = WAYS[name].grids[0], len(WAYS[name].grids)
    blocks = ours.batch.images.patches.view(groups, rows // 2, 2, columns // 2, 2, -1).transpose(2, 3)
    patches = blocks.flatten(0, 4)
    if name == "muse":  # row by row, frame by frame
        patches = ours.batch.images.patches.unflatten(1, (3, 2, -1)).transpose(1, 2).flatten(1)
    torch.testing.assert_close(patches, inputs["pixel_values_videos"], rtol=1e-5, atol=2e-6)
    if name.startswith(("exaone", "muse")):
        assert ours.batch.text.positions.tolist() == [[*range(LENGTH)]], "a position for each token"
        return
    kinds = ("mm_token_type_ids", "video_grid_thw", "second_per_grid_ts")
    asked = {kind: inputs[kind] for kind in kinds if kind in inputs}
    positions, _ = ours.theirs.model.get_rope_index(inputs["input_ids"], **asked)
    assert ours.batch.text.positions[:, 0, : len(ours.sample)].tolist() == positions[:, 0].tolist()
    moments = positions[0, inputs["mm_token_type_ids"] == 2].unique()
    assert len(moments) == groups, "a position in time for each pair"


@pytest.mark.parametrize("name", cases(SLICED))
def test_slices_of_frames_have_the_pixels_and_positions_of_transformers(name: str, seen: dict[str, Seen]) -> None:
    ours, inputs = seen[name], seen[name].inputs
    assert inputs["target_sizes_videos"].tolist() == list(map(list, WAYS[name].grids))
    assert ours.batch.images is not None
    patches = inputs["pixel_values_videos"][0].unflatten(2, (-1, 4)).permute(2, 0, 1, 3).flatten(1)
    torch.testing.assert_close(ours.batch.images.patches, patches, rtol=1e-5, atol=2e-6)
    if name == "minicpmv-4.7":
        asked = {kind: inputs[kind] for kind in ("mm_token_type_ids", "target_sizes_videos")}
        positions, _ = ours.theirs.model.get_rope_index(inputs["input_ids"], **asked)
        assert ours.batch.text.positions[:, 0, : len(ours.sample)].tolist() == positions[:, 0].tolist()


@pytest.mark.parametrize("name", cases(GEMMA))
def test_padded_frames_have_the_pixels_of_transformers(name: str, seen: dict[str, Seen]) -> None:
    ours = seen[name]
    assert ours.batch.images is not None
    mine = ours.batch.images.patches.unflatten(1, (3, -1)).mT.flatten(1).unflatten(0, (2, -1))
    theirs = ours.inputs["pixel_values_videos"][:, : mine.shape[1]]
    torch.testing.assert_close(mine if "unified" in name else mine / 2 + 0.5, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["kimi"])
def test_chunks_of_frames_have_the_pixels_of_transformers(name: str, seen: dict[str, Seen]) -> None:
    ours = seen[name]
    assert ours.inputs["video_grid_thw"].tolist() == [[count, *sides] for *sides, count in WAYS[name].grids]
    assert ours.batch.images is not None
    theirs = ours.inputs["pixel_values_videos"].flatten(1)
    torch.testing.assert_close(ours.batch.images.patches, theirs, rtol=1e-5, atol=2e-6)


APART = (*PAIRED, *SLICED, *GEMMA, "kimi")


@pytest.mark.parametrize("name", cases(name for name in WAYS if not name.startswith(APART)))
def test_frames_have_the_pixels_of_transformers(name: str, seen: dict[str, Seen]) -> None:
    ours, inputs = seen[name], seen[name].inputs
    frames = inputs["pixel_values_videos" if "pixel_values_videos" in inputs else "pixel_values"].flatten(0, -4)
    shown = torch.stack(unpatchify(ours.batch, CASES[name].model.vision))
    torch.testing.assert_close(shown, frames[..., : shown.shape[-2], : shown.shape[-1]], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", cases(WAYS))
def test_frames_are_taken_where_transformers_takes_them(name: str, seen: dict[str, Seen]) -> None:
    ours = seen[name]
    for (count, rate), expected in zip(LENGTHS, ours.inputs["frames"], strict=True):
        clip = Clip(100, 130, tuple(number / rate for number in range(count)), rate)
        budget = replace(ours.video.usual, fps=WAYS[name].fps)
        if name.startswith(UNBOUND):
            budget = replace(budget, max_frames=10**6)
        numbers = ours.video.numbers(clip, budget)
        # Transformers repeats the last frame of an odd number of GLM's here, of others' later.
        assert list(numbers) == list(dict.fromkeys(expected)), f"of {count} frames at {rate} per second"
