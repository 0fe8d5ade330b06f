"""Compare frames per second on one core, from a clip to patches, with Transformers' video processor of Qwen2.5-VL.

    python benchmarks/video.py [--quick] [--repeats N]

Both sides decode the same file with PyAV, take the same frames (two of each second) and make the same patches; they
take turns in one process and one thread. Ours includes all that a run does with a clip: its packets are read for the
times of its frames, and its first frame is decoded for its size. Times are processor time, figures are medians, ratios
are medians of ratios of neighbouring turns. `pixels` begins with the decoded frames. `off` is the largest difference
between the two sides' patches. Clips are moving crops of scikit-learn's two photographs with a cut each three seconds,
encoded by x264 with its defaults. Where torchvision is missing, Transformers has the few functions that it needs from
`tests/support/stand_in_packages`. Appends to `benchmarks/records/video.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support" / "stand_in_packages"))  # behind the real one

import av
import numpy as np
import torch
from PIL import Image
from record import append, circumstances
from sklearn.datasets import load_sample_images

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data import clips
from megavlm.data.types import VideoRef
from megavlm.data.visuals import Visuals, stored
from megavlm.families import processor_from
from megavlm.inputs.layout import Film, Layout
from megavlm.inputs.video import Budget

CLIPS = ((360, 640, 20), (720, 1280, 10), (1080, 1920, 5))  # height, width, seconds
RATE, FPS = 30, 2.0
ANY = 2**26
_CUT = 3  # seconds between two cuts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="the smallest clip, three repeats, nothing recorded")
    arguments = parser.parse_args()
    record: dict[str, Any] = {**circumstances(), "av": av.__version__, "arguments": vars(arguments)}
    repeats, sizes = (3, CLIPS[:1]) if arguments.quick else (arguments.repeats, CLIPS)
    record["results"] = table(sizes, repeats=repeats)
    if not arguments.quick:
        append("video", record)


def table(sizes: Sequence[tuple[int, int, int]], *, repeats: int) -> list[dict[str, Any]]:
    """Measure and print clips of these sizes."""
    torch.set_num_threads(1)
    results = []
    print("frames/s and core: ours, Transformers', ratio")
    for height, width, seconds in sizes:
        with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
            film(Path(file.name), height, width, seconds)
            results.append({"size": [height, width], "seconds": seconds, **measure(Path(file.name), repeats)})
        print(line(results[-1]), flush=True)
    return results


def measure(file: Path, repeats: int) -> dict[str, Any]:
    visuals, theirs = ours(), their_processor()
    video = VideoRef(file)
    (layout,) = visuals.layouts([video])
    taken, pixels = frames_of(layout, file)
    metadata = their_frames(theirs, file)[1]
    whole: Sides = (lambda: our_patches(visuals, video), lambda: patches_of(theirs, *their_frames(theirs, file)))
    after: Sides = (lambda: patches_of_frames(visuals, layout, pixels), lambda: patches_of(theirs, pixels, metadata))
    mine, their = (side() for side in whole)
    off = float((in_blocks(mine, layout) - their).abs().max())
    return {
        "frames": len(taken),
        "clip": compare(whole, repeats, len(taken)),
        "pixels": compare(after, repeats, len(taken)),
        "off": off,
    }


Sides = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]


def ours() -> Visuals:
    """Return our reader, with the options of Qwen2.5-VL's processors."""
    model = ModelConfig(
        vision=VisionConfig(patch_size=14, temporal_patch_size=2),
        projector=ProjectorConfig(pixel_shuffle=2),
        video_token=151656,
        video_steps_per_second=2.0,
    )
    given = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 12845056}}
    return Visuals(processor_from(given, model, video={}, model_type="qwen2_5_vl"), ANY, Budget(fps=FPS))


def our_patches(visuals: Visuals, video: VideoRef) -> torch.Tensor:
    """Return the patches of a clip as a worker makes them: its layout first, its pixels later."""
    (layout,) = visuals.layouts([video])
    return visuals.load([video], stored(0, layout)).patches()


def patches_of_frames(visuals: Visuals, layout: Layout, pixels: np.ndarray) -> torch.Tensor:
    videos = visuals.processor.video
    assert videos is not None
    rows, columns = layout.tiles[0].grid[:2]
    return videos.patches([videos.frame(each, (rows, columns)) for each in pixels])


def frames_of(layout: Layout, file: Path) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the numbers and the pixels [frames, height, width, 3] of the frames that a layout takes."""
    assert isinstance(layout.film, Film)
    numbers = layout.film.frames
    return numbers, np.stack(list(clips.frames(file, numbers, max_pixels=ANY)))


def their_processor() -> Any:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    return Qwen2VLVideoProcessor(cap_pixels_per_frame=False)


def their_frames(processor: Any, file: Path) -> tuple[Any, Any]:
    from transformers.video_utils import load_video

    frames, metadata = load_video(
        str(file), backend="pyav", sample_indices_fn=partial(processor.sample_frames, fps=FPS)
    )
    return frames, metadata


def patches_of(processor: Any, frames: Any, metadata: Any) -> torch.Tensor:
    made = processor(videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt")
    found: torch.Tensor = made["pixel_values_videos"]
    return found


def in_blocks(patches: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return our row-major patches in Transformers' order: those of one feature follow one another."""
    rows, columns = layout.tiles[0].grid
    blocks = patches.view(len(layout.tiles), rows // 2, 2, columns // 2, 2, -1)
    return blocks.transpose(2, 3).flatten(0, 4)


def film(file: Path, height: int, width: int, seconds: int) -> None:
    """Write a clip in which crops of two photographs move."""
    large = (int(width * 1.2), int(height * 1.2))
    photos = [
        np.asarray(Image.fromarray(photo).resize(large, Image.Resampling.BICUBIC))
        for photo in load_sample_images().images
    ]
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=RATE)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for number in range(seconds * RATE):
            moment, photo = number / RATE, photos[number // (_CUT * RATE) % 2]
            top = round((large[1] - height) * (0.5 + 0.5 * np.sin(moment)))
            left = round((large[0] - width) * (0.5 + 0.5 * np.cos(0.7 * moment)))
            shown = np.ascontiguousarray(photo[top : top + height, left : left + width])
            frame = av.VideoFrame.from_ndarray(shown, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def compare(sides: Sides, repeats: int, frames: int) -> dict[str, float]:
    """Return each side's frames per second of processor time, and the ratio of ours to theirs."""
    seconds: tuple[list[float], list[float]] = [], []
    for turn in range(repeats + 1):
        for side, times in zip(sides, seconds, strict=True):
            start = time.process_time()
            side()
            if turn:  # the first one warms up
                times.append(time.process_time() - start)
    mine, their = (frames / statistics.median(times) for times in seconds)
    ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
    return {"ours": mine, "theirs": their, "ratio": ratio}


def line(result: dict[str, Any]) -> str:
    def scope(name: str) -> str:
        return f"{result[name]['ours']:7.1f} {result[name]['theirs']:7.1f} × {result[name]['ratio']:.2f}"

    size = "×".join(map(str, result["size"]))
    return (
        f"{size:>10}, {result['frames']} frames   clip → patches {scope('clip')}   pixels → patches {scope('pixels')}"
        f"   off {result['off']:.1e}"
    )


if __name__ == "__main__":
    main()
