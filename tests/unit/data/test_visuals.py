"""Images and videos of records as a model sees them: sizes within a budget, pixels, and the reasons of bad ones."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("av", reason="pip install av (the extra `video`)")

from megavlm.config.schema import AudioConfig, ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.collate import CollateSpec, collate_images
from megavlm.data.types import ImageRef, Sample, SoundRef, VideoRef, Visual
from megavlm.data.visuals import Visuals, seen, stored
from megavlm.families import processor_from
from megavlm.inputs.bad_sample import BadSample, Reason
from megavlm.inputs.patches import LoadedImage
from megavlm.inputs.processor import Processor
from megavlm.inputs.video import Budget
from megavlm.inputs.vision_inputs import vision_input_of
from tests.support.clips import HEIGHT, WIDTH, clip, pixels

MODEL = ModelConfig(
    vision=VisionConfig(patch_size=4, temporal_patch_size=2),
    projector=ProjectorConfig(pixel_shuffle=2),
    image_token=8,
    video_token=9,
    video_steps_per_second=2.0,
)
IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 8 * 8 * 4, "max_pixels": 8 * 8 * 60}
FILM = clip(20, rate=10)


def visuals(processor: Processor | None = None, **budget: float) -> Visuals:
    processor = processor or processor_from(IMAGES, MODEL, model_type="qwen2_5_vl")
    return Visuals(processor, 10**6, Budget(**budget))  # type: ignore[arg-type]


def loaded(given: Visuals, *things: ImageRef | VideoRef) -> list[LoadedImage]:
    return [given.load(things, stored(*each)) for each in enumerate(given.layouts(things))]


def test_a_clip_becomes_groups_of_frames() -> None:
    (video,) = loaded(visuals(), VideoRef(FILM))
    assert video.film.frames == (0, 5, 10, 15)
    assert video.film.seconds == pytest.approx((0, 0.5, 1, 1.5))
    assert video.film.moments == (0, 2)  # a second apart, two steps of M-RoPE each
    assert video.grids == ((12, 20),) * 2
    assert video.pixels.shape == (2 * 12 * 20, 3 * 2 * 16)
    levels = video.pixels.unflatten(1, (3, 2, 16))[[130, 370], 0, :, 0]  # a patch in the middle of each group
    expected = (torch.tensor([[10.0, 30.0], [50.0, 70.0]]) / 255 - 0.48145466) / 0.26862954
    torch.testing.assert_close(levels, expected, atol=0.02, rtol=0)


def test_a_folder_of_frames_is_the_clip_that_it_was(tmp_path: Path) -> None:
    for number in range(4):
        Image.fromarray(pixels(5 * number)).save(tmp_path / f"{number}.png")
    frames = tuple(ImageRef(tmp_path / f"{number}.png") for number in range(4))
    (of_frames,), (of_clip,) = loaded(visuals(), VideoRef(frames)), loaded(visuals(), VideoRef(FILM))
    assert (of_frames.film.moments, of_frames.grids) == (of_clip.film.moments, of_clip.grids)
    torch.testing.assert_close(of_frames.pixels, of_clip.pixels, atol=0.15, rtol=0)  # the clip was compressed


@pytest.mark.parametrize(
    ("tokens", "frames", "most"),
    [(120, 4, 120), (119, 4, 119), (40, 4, 40), (20, 4, 20), (10, 4, 10), (7, 2, 7), (1, 2, 4)],
)
def test_a_budget_shrinks_frames_and_then_takes_fewer(tokens: int, frames: int, most: int) -> None:
    (layout,) = visuals(max_tokens=tokens).layouts([VideoRef(FILM)])
    assert len(layout.film.frames) == frames
    assert layout.features <= most


def test_a_record_bounds_its_images_and_its_part_of_a_video() -> None:
    """As qwen-vl-utils does."""
    usual, small = loaded(visuals(), ImageRef(_png()), ImageRef(_png(), max_pixels=8 * 8 * 10))
    assert (usual.grids, small.grids) == (((12, 20),), ((4, 8),))
    assert len(small.pixels) == 4 * 8
    (video,) = loaded(visuals(), VideoRef(FILM, video_start=0.5, video_end=1.2, max_pixels=8 * 8 * 10))
    assert (video.film.frames, video.grids) == ((5, 7, 9, 11), ((4, 8),) * 2)
    assert video.film.moments == (0, 0)  # 0.4 s apart, which is no whole step
    levels = video.pixels.unflatten(1, (3, 2, 16))[[21, 53], 0].mean(-1) * 0.26862954 + 0.48145466
    torch.testing.assert_close(levels * 255, torch.tensor([[30.0, 38.0], [46.0, 54.0]]), atol=5, rtol=0)


def test_bounds_that_leave_nothing_are_told() -> None:
    cases: dict[str, Visual] = {
        "no frame from 5.0 to None s, and ends at 1.90 s": VideoRef(FILM, video_start=5.0),
        "no frame from 1.0 to 0.5 s": VideoRef(FILM, video_start=1.0, video_end=0.5),
        "leaves images with at least 3904 and at most 3840 pixels": ImageRef(_png(), min_pixels=8 * 8 * 61),
    }
    for says, given in cases.items():
        with pytest.raises(BadSample, match=says):
            visuals().layouts([given])


def test_pixels_of_images_are_repeated_beside_a_video_only() -> None:
    still = ImageRef(_png())
    spec = CollateSpec(
        seq_length=1,
        image_token=8,
        pad_token=0,
        projector=MODEL.projector,
        patch_dim=48,
        video_token=9,
        frames_per_patch=2,
    )
    alone = collate_images([[_sample(*loaded(visuals(), still))]], spec)
    beside = collate_images([[_sample(*loaded(visuals(), still, VideoRef(FILM)))]], spec)
    assert alone.patches.shape == (12 * 20, 48)
    assert beside.patches.shape == (3 * 12 * 20, 96)
    repeated = beside.patches[: 12 * 20].unflatten(1, (3, 2, 16))
    assert torch.equal(repeated[:, :, 0], alone.patches.unflatten(1, (3, 16)))
    assert torch.equal(repeated[:, :, 1], repeated[:, :, 0])


@pytest.mark.parametrize(
    ("given", "says"),
    [(VideoRef(FILM), "models of this family are trained on images alone"), (SoundRef(b""), "family take no audio")],
)
def test_a_model_without_videos_or_sounds_says_so(given: Visual, says: str) -> None:
    model = ModelConfig(vision=MODEL.vision, projector=MODEL.projector)
    with pytest.raises(BadSample, match=says) as raised:
        visuals(processor_from(IMAGES, model, model_type="qwen2_5_vl")).layouts([given])
    assert raised.value.reason is Reason.UNSUPPORTED


def test_a_sound_can_be_sent_to_other_ranks() -> None:
    """A sound can be pickled, as prompts of `--sample-interval` are to be sent to other ranks."""
    model = replace(MODEL, audio=AudioConfig(num_layers=1), audio_token=7)
    given, things = visuals(processor_from(IMAGES, model, model_type="qwen2_5_omni")), [SoundRef(clip(0, sound=True))]
    (layout,) = given.layouts(things)
    sound = given.sound(things, stored(0, layout))
    sent = pickle.loads(pickle.dumps(sound)).mels()
    assert len(sent) == layout.frames
    assert torch.equal(sent, sound.mels())


def test_a_preview_shows_slices_beside_the_whole_image_and_frames_alone() -> None:
    """MiniCPM-V's slices follow a smaller copy of the image, and of each frame."""
    options = {"image_processor_type": "MiniCPMV4_6ImageProcessor", "patch_size": 4, "scale_resolution": 48}
    model = ModelConfig(vision=VisionConfig(patch_size=4), projector=ProjectorConfig(pixel_shuffle=4), video_token=9)
    given = visuals(processor_from(options, model, model_type="minicpmv4_6"), fps=1.0)
    sample = _sample(*loaded(given, ImageRef(_png()), VideoRef(FILM)))
    (cut, copy), (film, frames) = seen(given.processor, sample, 0)[1], seen(given.processor, sample, 1)
    assert cut.shape > copy.shape
    assert [each.shape for each in frames] == [copy.shape] * len(film.frames)
    assert (copy == (255, 0, 0)).all()


def test_a_preview_shows_each_frame_of_a_chunk() -> None:
    options = {"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 4, "max_patches": 60}
    vision = VisionConfig(patch_size=4, position_embedding="learned_rope2d")
    model = ModelConfig(vision=vision, projector=ProjectorConfig(pixel_shuffle=2))
    given = visuals(processor_from(options, model, model_type="kimi_k25"), fps=3.0)
    (video,) = loaded(given, VideoRef(FILM))
    assert video.grids == ((6, 10, 4), (6, 10, 2))
    film, frames = seen(given.processor, _sample(video), 0)
    levels = [frame[12, 20].mean() for frame in frames]
    assert len(frames) == len(film.frames) == 6
    assert levels == sorted(set(levels)), "each frame is brighter than the one before"


def test_a_preview_shows_channels_of_arrays() -> None:
    processor = processor_from(IMAGES, MODEL, model_type="qwen2_5_vl")
    several = replace(processor, vision_input=vision_input_of("array", 13), mean=(0.0,) * 13, std=(1.0,) * 13)
    image = LoadedImage(((2, 3),), torch.arange(6 * 13 * 16).view(6, -1) / 1.0)
    (picture,) = seen(several, _sample(image), 0)[1]
    assert (picture.shape, picture.min(), picture.max()) == ((8, 12, 3), 0, 255)


def _sample(*images: LoadedImage) -> Sample:
    return Sample(np.array([1]), np.array([False]), images)


def _png() -> bytes:
    import io

    memory = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT), "red").save(memory, format="PNG")
    return memory.getvalue()
