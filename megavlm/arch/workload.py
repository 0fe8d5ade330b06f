"""`Workload`: tokens and patches of a pass, and the sums of squared lengths that set attention's FLOPs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megavlm.arch.image_tokens import Grid, features_of, tokens_per_grid, windows_of
from megavlm.config.derived import has_vision, tower_merge, usual_side
from megavlm.config.schema import Config, ModelConfig, VisionConfig

# Fields of a workload that are of images and sounds.
OF_ENCODERS = ("patches", "patch_squares", "window_squares", "features", "frames", "frame_squares", "sounds")
USUAL_FRAMES = 1000  # mel frames of a sample's sound, where nothing says how many: ten seconds


@dataclass(frozen=True)
class Workload:
    """Tokens and patches of a pass, and the sums of squared lengths that set attention's FLOPs."""

    patches: int  # all images' patches (class tokens included)
    patch_squares: int  # Σ over images of patches²
    window_squares: int  # Σ over their windows of patches²; used if the tower has windows
    features: int  # outputs of the projector, before the tiles of an image are merged
    tokens: int  # language positions that are not padding
    token_squares: int  # Σ over samples of length²
    sliding_squares: int  # the same with a sliding window; used if the language model has one
    trained_tokens: int  # positions that have a loss: the output layer runs for these alone
    frames: int = 0  # positions of the audio encoder, each of two or eight mel frames
    frame_squares: int = 0  # Σ over windows of sounds of positions²
    sounds: int = 0  # features of sounds


def times(work: Workload, samples: int) -> Workload:
    """Return a workload multiplied by a number of samples."""
    return Workload(**{name: value * samples for name, value in vars(work).items()})


def of_context_part(work: Workload, ranks: int, *, images: int = 0) -> Workload:
    """Return the share of one of `ranks` context-parallel ranks: its positions and its part of attention.

    `images` equal images are spread over the ranks, of which the busiest has ⌈images / ranks⌉; 0: they are not spread.
    """
    if images:
        own = -(-images // ranks)
        names = ("patches", "patch_squares", "window_squares", "features")
        work = replace(work, **{name: getattr(work, name) * own // images for name in names})
    return replace(
        work,
        tokens=work.tokens // ranks,
        token_squares=work.token_squares // ranks,
        sliding_squares=work.sliding_squares // ranks,
        trained_tokens=work.trained_tokens // ranks,
    )


def of_merged(work: Workload, vision: VisionConfig) -> Workload:
    """Return the workload of layers after the tower's merger."""
    block = tower_merge(vision) ** 2
    return replace(work, patches=work.patches // block, patch_squares=work.patch_squares // block**2)


def image_workload(grids: Sequence[Grid], model: ModelConfig) -> Workload:
    """Return the workload of images with these grids of patches, without text."""
    lengths = [math.prod(grid) + model.vision.class_token for grid in grids]
    window = window_patches(model)
    return Workload(
        patches=sum(lengths),
        patch_squares=sum(length * length for length in lengths),
        window_squares=sum(window_squares(grid, window) for grid in grids) if window else 0,
        features=sum(tokens_per_grid(grid, model.projector) for grid in grids),
        tokens=0,
        token_squares=0,
        sliding_squares=0,
        trained_tokens=0,
    )


def sound_work(frames: Sequence[int], model: ModelConfig) -> dict[str, int]:
    """Return the fields of a workload that sounds of so many mel frames have."""
    windows = [length for each in frames for length in windows_of(each, model.audio)]
    squares, features = sum(length**2 for length in windows), (features_of(each, model.audio) for each in frames)
    return {"frames": sum(windows), "frame_squares": squares, "sounds": sum(features)}


def typical_workload(config: Config) -> Workload:
    """Return the workload of one sample with the configured lengths and image sizes.

    All of its tokens count as trained: which tokens are trained is known only when data are read, and memory must
    suffice for all.
    """
    vision, data, images = config.model.vision, config.data, typical_images(config)
    sides = data.image_sizes or (usual_side(config.model),)
    grids = [(side // vision.patch_size,) * 2 for side in sides]
    if config.model.projector.anyres_max_tiles is not None:  # a base tile, and a grid of tiles if it is the only image
        tiles = [1 + (side // vision.image_size) ** 2 * (images == 1) for side in sides]
        grids = [(vision.image_size // vision.patch_size,) * 2] * sum(tiles)
    counts = [rows * columns for rows, columns in grids]
    window = window_patches(config.model)
    tokens = config.train.seq_length
    sounds = data.sound_frames or (USUAL_FRAMES * (config.model.audio.num_layers > 0),)
    return Workload(
        patches=images * sum(counts) // len(sides),
        patch_squares=images * sum(count**2 for count in counts) // len(sides),
        window_squares=images * sum(window_squares(grid, window) for grid in grids) // len(sides) if window else 0,
        features=images * sum(tokens_per_grid(grid, config.model.projector) for grid in grids) // len(sides),
        tokens=tokens,
        token_squares=tokens**2,
        sliding_squares=sliding_squares(tokens, config.model.language.window_size),
        trained_tokens=tokens,
        **{name: count // len(sounds) for name, count in sound_work(sounds, config.model).items()},
    )


def typical_images(config: Config) -> int:
    """Return the number of images of a typical sample."""
    if not has_vision(config.model):
        return 0
    counts = config.data.images_per_sample
    return max(1, round(sum(counts) / len(counts))) if counts else 1


def window_patches(model: ModelConfig) -> int:
    """Return the side of the tower's windows in patches, rounded down to whole features; 0 if it has no windows.

    In a tower that merges patches, the windows are the blocks that it merges.
    """
    if model.vision.merger_layer is not None:
        return tower_merge(model.vision)
    if model.vision.window_size is None:
        return 0
    merged = model.projector.pixel_shuffle
    return model.vision.window_size // (model.vision.patch_size * merged) * merged


def attends_in_windows(vision: VisionConfig, layer: int) -> bool:
    """Return whether vision layer `layer` attends inside windows only."""
    return vision.window_size is not None and layer not in vision.full_attention_layers


def sliding_squares(length: int, window: int | None) -> int:
    """Return twice the number of scores of sliding-window attention, in place of length²; 0 without a window.

    Token i attends to min(i, W) tokens. The sum is l²/2 − (l − W)²/2 where l > W, as triangles: Σ i over all of them
    less Σ (i − W) over those after the first W.
    """
    return 0 if window is None else length**2 - max(0, length - window) ** 2


def window_squares(grid: Grid, side: int) -> int:
    """Return Σ patches² over the windows of an image. A window has r·c patches, so the sum is Σr² · Σc²."""

    def squares(length: int) -> int:
        return length // side * side**2 + (length % side) ** 2

    return squares(grid[0]) * squares(grid[1])
