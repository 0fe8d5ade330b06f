"""Compare images per second on one core, from JPEG bytes and from pixels to patches, with Transformers' processors.

    .venv/bin/python benchmarks/data_images.py [--quick] [--repeats N]

Both sides take turns, each in a process of its own with one thread: megavlm in one like its data workers, which keep
memory that they free, Transformers in one as torch's DataLoader starts it. Transformers uses its PIL backends, which
return pixels or patches as their models need them. Times are processor time, figures are medians, ratios are medians of
ratios of neighbouring turns. Images are crops of scikit-learn's two photographs, enlarged to common sizes. megavlm is
measured with Pillow's resizing and with `fast`. `off` is the largest difference in grey levels between the two, and the
share of values that differ by more than one; that ours are Transformers' is held by `tests/parity/test_processors.py`.
Appends to `benchmarks/records/data_images.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
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
from megavlm.data.workers import keep_freed_memory
from megavlm.families import processor_from
from megavlm.inputs.processor import Processor
from megavlm.inputs.resize import Size

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
    results: list[dict[str, Any]] = []
    print("images/s and core; × is ours (fast) over Transformers'")
    print(f"{'family':16} {'image':>10}   {'JPEG → patches':>34}   {'pixels → patches':>34}   off")
    with sides_in_processes() as ask:
        for family in FAMILIES:
            for size in sizes:
                scopes = {scope: compare(partial(ask, family, size, scope), repeats) for scope in ("jpeg", "pixels")}
                results.append({"family": family, "size": size, **scopes, "off": differences(family, size)})
                print(line(results[-1]), flush=True)
    for scope in ("jpeg", "pixels"):
        for side in ("ours", "fast"):
            ratios = [result[scope][f"{side}_ratio"] for result in results]
            print(f"{scope}, {side}: × {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")
    return results


@contextmanager
def sides_in_processes() -> Iterator[Callable[..., float]]:
    """Yield a function of (family, size, scope, side) that runs the side once and returns its seconds."""
    with ExitStack() as stack:
        start = partial(ProcessPoolExecutor, 1, mp_context=multiprocessing.get_context("spawn"))
        ours, theirs = (stack.enter_context(start(initializer=each)) for each in (keep_freed_memory, None))
        yield lambda *which: (theirs if which[-1] == "theirs" else ours).submit(seconds, *which).result()


def seconds(family: str, size: Size, scope: str, side: str) -> float:
    """Return the processor time of one run of a side."""
    torch.set_num_threads(1)
    run = prepared(family, size)[scope, side]
    start = time.process_time()
    run()
    return time.process_time() - start


@cache
def prepared(family: str, size: Size) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return what each side runs on a photograph of this size, from its JPEG file or from pixels."""
    ours, fast, theirs = processors(family)
    jpeg = photograph(*size)
    image, pixels = ImageOps.exif_transpose(Image.open(BytesIO(jpeg))), decode(jpeg)

    def their_decode() -> Any:
        return theirs(ImageOps.exif_transpose(Image.open(BytesIO(jpeg))).convert("RGB"), return_tensors="pt")

    return {
        ("jpeg", "ours"): lambda: ours.tiles(decode(jpeg)),
        ("jpeg", "fast"): lambda: fast.tiles(decode(jpeg)),
        ("jpeg", "theirs"): their_decode,
        ("pixels", "ours"): lambda: ours.tiles(pixels),
        ("pixels", "fast"): lambda: fast.tiles(pixels),
        ("pixels", "theirs"): lambda: theirs(image, return_tensors="pt"),
    }


@cache
def processors(family: str) -> tuple[Processor, Processor, Any]:
    """Return megavlm's image processor of a family, the same with `fast`, and Transformers'."""
    module, name, options, patch, merge = FAMILIES[family]
    theirs = getattr(importlib.import_module(f"transformers.models.{module}"), name)(**options)
    tiles = 9 if "OneVision" in family else None
    projector = ProjectorConfig(pixel_shuffle=merge, anyres_max_tiles=tiles)
    config = ModelConfig(vision=VisionConfig(patch_size=patch), projector=projector)
    given = json.loads(theirs.to_json_string())
    return processor_from(given, config), processor_from(given, config, fast=True), theirs


def photograph(height: int, width: int) -> bytes:
    """Return a photograph as a JPEG of quality 90."""
    image = Image.fromarray(load_sample_images().images[height % 2])
    file = BytesIO()
    ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def compare(ask: Callable[[str], float], repeats: int) -> dict[str, float]:
    """Return each side's throughput in images per second, and its ratio to the last side's."""
    turns = [[ask(side) for side in SIDES] for _ in range(repeats + 1)][1:]  # the first one warms up
    spent = list(zip(*turns, strict=True))
    rates = {name: 1 / statistics.median(times) for name, times in zip(SIDES, spent, strict=True)}
    ratios = {
        f"{name}_ratio": statistics.median(last / own for own, last in zip(times, spent[-1], strict=True))
        for name, times in zip(SIDES[:-1], spent, strict=False)
    }
    return rates | ratios


def differences(family: str, size: Size) -> dict[str, float]:
    """Return how far `fast` is from Pillow's pixels, which are the default (tests/parity/test_processors.py)."""
    (ours, fast, _), pixels = processors(family), decode(photograph(*size))
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
