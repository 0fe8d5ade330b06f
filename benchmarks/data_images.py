"""Compare images per second on one core, from JPEG bytes and from pixels to patches, with Transformers' processors.

    .venv/bin/python benchmarks/data_images.py [--quick] [--repeats N]

Both sides take turns in one process and one thread; Transformers uses its PIL backends, which return pixels or patches
as their models need them. Times are processor time, figures are medians, ratios are medians of ratios of neighbouring
turns. Images are crops of scikit-learn's two photographs, enlarged to common sizes. megavlm is measured with Pillow's
resizing and with `fast`. `off` is the largest difference in grey levels between the two, and the share
of values that differ by more than one; that ours equals Transformers' is held by `tests/parity/test_processors.py`.
Appends to `benchmarks/records/data_images.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from PIL import Image, ImageOps
from record import append, circumstances
from sklearn.datasets import load_sample_images

from megavlm.config.schema import ModelConfig, ProjectorConfig, VisionConfig
from megavlm.data.decode import decode
from megavlm.families import processor_from
from megavlm.inputs.processor import Processor

SIZES = ((480, 640), (768, 1024), (1080, 1920))  # height, width
# module, class, options; side of a patch; how many patches a side become one feature
FAMILIES: dict[str, tuple[str, str, dict[str, Any], int, int]] = {
    "LLaVA-1.5": (
        "llava.image_processing_pil_llava",
        "LlavaImageProcessorPil",
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        14,
        1,
    ),
    "SigLIP-384": (
        "siglip.image_processing_pil_siglip",
        "SiglipImageProcessorPil",
        {"size": {"height": 384, "width": 384}},
        14,
        1,
    ),
    "LLaVA-OneVision": (
        "llava_onevision.image_processing_pil_llava_onevision",
        "LlavaOnevisionImageProcessorPil",
        {},
        14,
        1,
    ),
    "InternVL3": (
        "got_ocr2.image_processing_pil_got_ocr2",
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 448, "width": 448}, "crop_to_patches": True},
        14,
        2,
    ),
    "Qwen2.5-VL": (
        "qwen2_vl.image_processing_pil_qwen2_vl",
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        14,
        2,
    ),
    "SmolVLM": (
        "smolvlm.image_processing_pil_smolvlm",
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        16,
        4,
    ),
}
SIDES = ("ours", "fast", "theirs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one size, three repeats, nothing recorded")
    arguments = parser.parse_args()
    record: dict[str, Any] = {**circumstances(), "arguments": vars(arguments)}
    repeats, sizes = (3, SIZES[:1]) if arguments.quick else (arguments.repeats, SIZES)
    record["results"] = table(sizes, repeats=repeats)
    if not arguments.quick:
        append("data_images", record)


def table(sizes: Sequence[tuple[int, int]], *, repeats: int) -> list[dict[str, Any]]:
    """Measure and print every family with images of these sizes."""
    torch.set_num_threads(1)
    results = []
    print("images/s and core; × is ours (fast) over Transformers'")
    print(f"{'family':16} {'image':>10}   {'JPEG → patches':>34}   {'pixels → patches':>34}   off")
    for family in FAMILIES:
        for size in sizes:
            results.append({"family": family, "size": size, **measure(family, size, repeats)})
            print(line(results[-1]), flush=True)
    for scope in ("jpeg", "pixels"):
        for side in ("ours", "fast"):
            ratios = [result[scope][f"{side}_ratio"] for result in results]
            print(f"{scope}, {side}: × {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")
    return results


def measure(family: str, size: tuple[int, int], repeats: int) -> dict[str, Any]:
    module, name, options, patch, merge = FAMILIES[family]
    theirs = getattr(importlib.import_module(f"transformers.models.{module}"), name)(**options)
    tiles = 9 if "OneVision" in family else None
    projector = ProjectorConfig(pixel_shuffle=merge, anyres_max_tiles=tiles)
    config = ModelConfig(vision=VisionConfig(patch_size=patch), projector=projector)
    given = json.loads(theirs.to_json_string())
    ours, fast = processor_from(given, config), processor_from(given, config, fast=True)
    jpeg = photograph(*size)
    image = ImageOps.exif_transpose(Image.open(BytesIO(jpeg)))
    pixels = decode(jpeg)

    def their_decode() -> Any:
        return theirs(ImageOps.exif_transpose(Image.open(BytesIO(jpeg))).convert("RGB"), return_tensors="pt")

    from_jpeg = (
        lambda: ours.tiles(decode(jpeg)),
        lambda: fast.tiles(decode(jpeg)),
        their_decode,
    )
    from_pixels = (lambda: ours.tiles(pixels), lambda: fast.tiles(pixels), lambda: theirs(image, return_tensors="pt"))
    return {
        "jpeg": compare(from_jpeg, repeats),
        "pixels": compare(from_pixels, repeats),
        "off": differences(ours, fast, pixels),
    }


def photograph(height: int, width: int) -> bytes:
    """Return a photograph as a JPEG of quality 90."""
    image = Image.fromarray(load_sample_images().images[height % 2])
    file = BytesIO()
    ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def compare(sides: tuple[Callable[[], Any], ...], repeats: int) -> dict[str, float]:
    """Return each side's throughput in images per second, and its ratio to the last side's."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(repeats + 1):
        for side, times in zip(sides, seconds, strict=True):
            start = time.process_time()
            side()
            if turn:  # the first one warms up
                times.append(time.process_time() - start)
    rates = {name: 1 / statistics.median(times) for name, times in zip(SIDES, seconds, strict=True)}
    ratios = {
        f"{name}_ratio": statistics.median(last / own for own, last in zip(times, seconds[-1], strict=True))
        for name, times in zip(SIDES[:-1], seconds, strict=False)
    }
    return rates | ratios


def differences(ours: Processor, fast: Processor, pixels: np.ndarray) -> dict[str, float]:
    """Return how far `fast` is from Pillow's pixels, which are the default (tests/parity/test_processors.py)."""
    pairs = zip(ours.views(pixels), fast.views(pixels), strict=True)
    levels = np.concatenate([np.abs(one.astype(int) - other).ravel() for one, other in pairs])
    return {"fast": int(levels.max()), "share_over_one": float((levels > 1).mean())}


def line(result: dict[str, Any]) -> str:
    def scope(name: str) -> str:
        rates = result[name]
        return (
            f"{rates['ours']:7.1f} ({rates['fast']:7.1f}) {rates['theirs']:6.1f} "
            f"× {rates['ours_ratio']:.2f} ({rates['fast_ratio']:.2f})"
        )

    size, off = "×".join(map(str, result["size"])), result["off"]
    return (
        f"{result['family']:16} {size:>10}   {scope('jpeg'):>34}   {scope('pixels'):>34}   "
        f"{off['fast']} ({off['share_over_one']:.0e})"
    )


if __name__ == "__main__":
    main()
