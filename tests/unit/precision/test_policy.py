"""Which layers run in FP8, and what vision sequences are padded to."""

from __future__ import annotations

import pytest
import torch

from megavlm.arch.layers import layer_names
from megavlm.command_line.parsing import parse
from megavlm.config.derived import layer_precision, sequence_multiple
from megavlm.model.vision import VisionLayout

FP8 = "--precision bf16 --fp8 hybrid"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", ""),
        (FP8, "language.layers.0 language.layers.1 language.layers.2 language.layers.3"),
        (f"{FP8} --first-last-layers-bf16", "language.layers.1 language.layers.2"),
        (
            f"{FP8} --first-last-layers-bf16 --set precision.num_layers_at_start_in_bf16=0 "
            "precision.num_layers_at_end_in_bf16=3",
            "language.layers.0",
        ),
        # The tower's last layer that runs is its third.
        (f"{FP8} --first-last-layers-bf16 --fp8-parts vision --set model.vision.feature_layer=-2", "vision.layers.1"),
    ],
)
def test_only_transformer_layers_of_the_parts_run_in_fp8(argv: str, expected: str) -> None:
    config = parse(argv.split())
    names = [*layer_names(config.model), "deepstack.0"]
    assert " ".join(name for name in names if layer_precision(name, config) == "fp8") == expected


@pytest.mark.parametrize(
    ("argv", "tp", "multiple"),
    [
        ("", 1, 1),
        ("--tp 2", 2, 2),
        (FP8, 1, 1),
        (f"{FP8} --fp8-parts vision --tp 2", 2, 32),
        (f"{FP8} --fp8-parts vision --tp 2 --no-sp", 2, 16),
        (f"{FP8} --fp8-parts vision --fp8-recipe mxfp8", 1, 32),
    ],
)
def test_vision_is_padded_to_what_fp8_and_sharding_need(argv: str, tp: int, multiple: int) -> None:
    assert sequence_multiple("vision", parse(argv.split()), tp=tp) == multiple


@pytest.mark.parametrize(
    ("argv", "tp", "multiple"),
    [("--tp 2", 2, 2), (FP8, 1, 16), (f"{FP8} --tp 2", 2, 32), (f"{FP8} --fp8-parts vision --tp 2", 2, 2)],
)
def test_so_are_sequences_of_tokens(argv: str, tp: int, multiple: int) -> None:
    assert sequence_multiple("language", parse(argv.split()), tp=tp) == multiple


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("grids", [(), ((4, 4),), ((8, 4), (6, 10)), ((4, 6), (2, 2), (12, 4))])
def test_packed_images_have_whole_multiples_of_tokens(grids: tuple[tuple[int, int], ...], window: int) -> None:
    multiple = sequence_multiple("vision", parse(f"{FP8} --fp8-parts vision --tp 2".split()), tp=2)
    layout = VisionLayout.of(grids, class_token=not window, multiple=multiple, blank=(2, 2), window=window)
    assert layout.bounds[-1] == sum(layout.lengths) + layout.padding
    assert layout.bounds[-1] % 32 == 0
    if window:
        assert layout.window_bounds[-1] == layout.bounds[-1]
    assert len(layout.coordinates(torch.device("cpu"))) == layout.bounds[-1]
