"""Kinds of layers, the tokens of images, the matrices of a model, and the parts of a packed row."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.arch.dims import Dims
from megavlm.arch.image_tokens import TileGroup, feature_map, grid_of, smallest_grid, tokens_per_grid, tokens_per_image
from megavlm.arch.kind import Band, LayerKind, hidden_weight
from megavlm.arch.kinds import KINDS, adapter_parameters, hidden_weight_of
from megavlm.arch.layers import (
    AUDIO_EMBED,
    AUDIO_LAYER,
    AUDIO_PROJECTOR,
    DEEPSTACK,
    MTP_INPUT,
    MTP_NORM,
    PART_OF_KIND,
    VISION_MERGER,
    kind_of,
    layer_names,
    name_and_path,
    number_of,
    part_of,
)
from megavlm.arch.packing import assign, imbalance, pack
from megavlm.arch.scenario import scenario_of
from megavlm.backend import activate
from megavlm.config.lora_config import is_adapter
from megavlm.config.schema import Config, ProjectorConfig
from megavlm.errors import UserError
from megavlm.inference.single_process import full_model, single_process_groups
from megavlm.parallel.groups import Groups
from tests.support.flags import MODELS, resolved
from tests.support.hf import unpadded_shapes
from tests.support.training import SMALL


@pytest.mark.parametrize("half", ["megavlm.arch.kinds", "megavlm.model.layer_kinds"])
def test_a_kind_without_an_entry_fails_at_import(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(half)
    with monkeypatch.context() as patch:
        patch.setitem(PART_OF_KIND, "resampler", "projector")
        with pytest.raises(TypeError, match="resampler"):
            importlib.reload(module)
    importlib.reload(module)


def test_a_kind_without_an_answer_cannot_be_made() -> None:
    resampler: Any = type("Resampler", (LayerKind,), {"parameters": lambda self, model, tp: 0})
    with pytest.raises(TypeError, match="saved_bytes"):
        resampler()


def test_every_kind_is_in_the_list_of_layers() -> None:
    names = layer_names(Config().model)
    # Qwen3-VL has the first, MiniCPM-V the second, and models that predict further tokens have the others.
    rest = {DEEPSTACK, VISION_MERGER, MTP_INPUT, MTP_NORM}
    heard = {AUDIO_EMBED, AUDIO_LAYER, AUDIO_PROJECTOR}
    assert {kind_of(name) for name in names} == KINDS.keys() - rest - heard
    hearing = replace(Config().model, audio=replace(Config().model.audio, num_layers=2))
    assert {kind_of(name) for name in layer_names(hearing)} == KINDS.keys() - rest


@pytest.mark.parametrize(
    ("key", "kind", "number", "part"),
    [
        ("vision.layers.13", "vision.layers.", 13, "vision"),
        ("audio.layers.3.mlp.linear_fc1.weight", "audio.layers.", 3, "vision"),
        ("audio.projector.norm.weight", "audio.projector", 0, "projector"),
        ("vision.layers.1.self_attention.linear_qkv.weight", "vision.layers.", 1, "vision"),
        ("vision.norm", "vision.norm", 0, "vision"),
        ("deepstack.2.norm.bias", "deepstack.", 2, "projector"),
        ("projector.image_newline", "projector", 0, "projector"),
        ("language.norm.weight", "language.norm", 0, "language"),
        ("language.mtp.1.projection.weight", "language.mtp.", 1, "language"),
        ("language.mtp_norm.0.weight", "language.mtp_norm.", 0, "language"),
        ("output.linear.weight", "output", 0, "language"),
    ],
)
def test_a_name_says_kind_number_and_part(key: str, kind: str, number: int, part: str) -> None:
    assert (kind_of(key), number_of(key), part_of(key)) == (kind, number, part)


def test_tokens_of_base_tiles_grids_and_newlines() -> None:
    groups = [TileGroup((2, 1), (20, 10)), TileGroup((0, 0), (20, 10))]
    tiled = ProjectorConfig(pixel_shuffle=2, anyres_max_tiles=9)
    assert tokens_per_image([(4, 4)] * 4, groups, tiled) == [4 + 4 * (2 + 1), 4 + 1]
    frames = [TileGroup((0, 0), (20, 10), "frame"), TileGroup((0, 0), (20, 10), "last frame")]
    assert tokens_per_image([(6, 6)] * 2, frames, tiled) == [2 * 2, 2 * 2 + 1]
    assert tokens_per_image([(4, 6)], [], ProjectorConfig(pixel_shuffle=2)) == [6]
    assert tokens_per_image([], [], tiled) == []
    with pytest.raises(AssertionError, match="every tile"):
        tokens_per_image([(4, 4)] * 3, groups, tiled)


def test_an_image_of_which_nothing_would_be_left_is_refused() -> None:
    with pytest.raises(UserError, match=r"8×127 pixels is too narrow for model.projector.anyres_max_tiles 1"):
        feature_map(TileGroup((1, 4), (8, 127)), 3, max_tiles=1)


def test_tokens_of_grids() -> None:
    assert grid_of(28, 42, 14) == (2, 3)
    merging = ProjectorConfig(pixel_shuffle=2)
    assert tokens_per_grid((4, 6), merging) == 6
    assert tokens_per_grid((3, 5), ProjectorConfig()) == 15
    assert tokens_per_grid(smallest_grid(merging), merging) == 1


@pytest.mark.parametrize(("height", "width"), [(30, 28), (28, 30), (0, 28)])
def test_sides_that_do_not_divide_name_the_option(height: int, width: int) -> None:
    with pytest.raises(UserError, match=rf"{height}×{width}.*model.vision.patch_size 14"):
        grid_of(height, width, 14)


def test_grids_that_do_not_merge_name_the_option() -> None:
    with pytest.raises(UserError, match=r"3×4 .*model.projector.pixel_shuffle 2"):
        tokens_per_grid((3, 4), ProjectorConfig(pixel_shuffle=2))


BACKEND = activate()
EXPERTS = (
    "--num-experts 4 --set model.experts.ffn_hidden_size=24 model.experts.dense_layers=[0] "
    "model.experts.shared_ffn_hidden_size=32"
)
# Tokens, pixels, a vector of one row, adapters, learned queries and positions, filters of single channels.
NO_MATRICES = "conv1d. embedding. output.linear _embed. gate_weight .lora. queries latents positions conv2".split()


@pytest.fixture(scope="module")
def alone() -> Groups:
    return single_process_groups(BACKEND)


@pytest.mark.parametrize(
    "flags", [*MODELS.values(), f"{EXPERTS} --set model.experts.shared_gate=true", "--lora-rank 4"]
)
def test_every_matrix_of_a_model_is_declared_in_its_shape(alone: Groups, flags: str) -> None:
    config = resolved([*SMALL, *flags.split()])
    for key, shape in unpadded_shapes(full_model(config, alone, BACKEND), config).items():
        declared = hidden_weight_of(key, config.model)
        if len(shape) < 2 or any(part in key for part in NO_MATRICES):
            assert declared is None, key
            continue
        assert declared is not None, key
        assert shape == (*((declared.experts,) if declared.experts else ()), declared.rows, declared.columns), key


@pytest.mark.parametrize("flags", ["", EXPERTS, *(MODELS[name] for name in ("qwen3.5", "latents", "rich", "audio"))])
def test_adapters_are_counted(alone: Groups, flags: str) -> None:
    targets = "--lora-rank 4 --lora-targets vision language experts q_proj fc2".split()
    config = resolved([*SMALL, *flags.split(), *targets])
    found: Counter[str] = Counter()
    for key, shape in unpadded_shapes(full_model(config, alone, BACKEND), config).items():
        found[name_and_path(key)[0]] += prod(shape) * is_adapter(key)
    layouts = scenario_of(config, Dims()).layouts
    assert found == {name: sum(adapter_parameters(name, each) for each in layouts) for name in found}
    assert found["language.layers.1"] > 0


def test_queries_keys_and_values_are_matrices_apart() -> None:
    model = resolved([*SMALL, "--set", "model.language.num_query_groups=2"]).model
    weight = hidden_weight_of("language.layers.0.self_attention.linear_qkv.weight", model)
    assert weight is not None
    # Two groups: the queries of two heads of 12 channels, then a key and a value.
    rows = [[row for row in range(96) if band.before(row + 1) > band.before(row)] for band in weight.bands]
    assert rows == [[*range(24), *range(48, 72)], [*range(24, 36), *range(72, 84)], [*range(36, 48), *range(84, 96)]]
    assert list(weight.shapes()) == [(48, 48), (24, 48), (24, 48)]


@given(st.data())
def test_runs_are_the_rows_of_a_band_in_order(data: st.DataObject) -> None:
    period = data.draw(st.integers(1, 6))
    first = data.draw(st.integers(0, period - 1))
    band = Band(first, data.draw(st.integers(1, period - first)), period)
    start = data.draw(st.integers(0, 30))
    end = data.draw(st.integers(start, 40))
    runs = list(band.runs(start, end))
    found = [row + period * k + i for row, periods, count in runs for k in range(periods) for i in range(count)]
    assert found == [row for row in range(start, end) if first <= row % period < first + band.count]
    assert len(runs) <= 3
    for row, periods, count in runs:
        assert band.before(row + (periods - 1) * period + count) - band.before(row) == periods * count


def test_experts_are_matrices_each() -> None:
    assert list(hidden_weight(8, 5, 5, experts=3).shapes()) == [(5, 8)] * 6


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 50).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=60))))
def test_every_item_lies_in_one_bin_that_holds_it(given_case: tuple[int, list[int]]) -> None:
    capacity, lengths = given_case
    bins = pack(lengths, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    loads = [sum(lengths[item] for item in items) for items in bins]
    assert all(load <= capacity for load in loads)
    assert [items[0] for items in bins] == sorted(items[0] for items in bins)
    # Any two bins hold more than one could: else they would have been one.
    assert all(a + b > capacity for number, a in enumerate(loads) for b in loads[:number])


def test_a_long_tail_fills_sequences() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.8, 1.0, 2048), 16, 8192).astype(int).tolist()
    assert sum(lengths) / (len(pack(lengths, 8192)) * 8192) > 0.985


@pytest.mark.parametrize("length", [0, 9])
def test_what_no_bin_holds_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        pack([3, length], 8)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_every_item_has_one_rank_and_every_rank_as_many(ranks: int, places: int, seed: int) -> None:
    costs = np.random.default_rng(seed).exponential(size=(ranks * places, 2)) * [1, 100]
    assigned = assign(costs, ranks)
    assert [len(items) for items in assigned] == [places] * ranks
    assert sorted(item for items in assigned for item in items) == list(range(ranks * places))


def test_two_ranks_come_near_the_best_possible() -> None:
    found, best = [], []
    for seed in range(20):
        costs = np.random.default_rng(seed).exponential(size=(8, 1))
        halves = [(half, tuple(set(range(8)) - set(half))) for half in combinations(range(8), 4)]
        best.append(min(imbalance(costs[:, 0], half) for half in halves))
        found.append(imbalance(costs[:, 0], assign(costs, 2)))
    assert np.mean(found) <= np.mean(best) * 1.02


def test_both_kinds_are_balanced() -> None:
    rng = np.random.default_rng(1)
    costs = np.stack([rng.exponential(size=256), rng.exponential(size=256)], axis=1)
    assigned, taken_in_turn = assign(costs, 32), np.arange(256).reshape(32, 8)
    for kind in range(2):
        assert imbalance(costs[:, kind], taken_in_turn) > 1.4
        assert imbalance(costs[:, kind], assigned) < 1.1


def test_nothing_to_balance() -> None:
    assert [len(items) for items in assign(np.zeros((4, 2)), 2)] == [2, 2]
    assert imbalance(np.zeros(4), [[0, 1], [2, 3]]) == 1.0
