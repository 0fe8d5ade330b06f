"""Which layers run in FP8, and what vision sequences are padded to."""

from __future__ import annotations

import pytest

from megavlm.arch.layers import layer_names
from megavlm.command_line.parsing import parse
from megavlm.config.derived import layer_precision, sequence_multiple

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
