"""Which weights are matrices between hidden states, and which of their rows are one matrix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.backend import activate

BACKEND = activate()  # before the modules below import megatron-core

from megavlm.arch.kind import Band, hidden_weight  # noqa: E402
from megavlm.arch.kinds import hidden_weight_of  # noqa: E402
from megavlm.inference.single_process import full_model, single_process_groups  # noqa: E402
from megavlm.parallel.groups import Groups  # noqa: E402
from tests.support.flags import MODELS, resolved  # noqa: E402
from tests.support.hf import unpadded_shapes  # noqa: E402
from tests.support.training import SMALL  # noqa: E402

EXPERTS = (
    "--num-experts 4 --set model.experts.ffn_hidden_size=24 model.experts.dense_layers=[0] "
    "model.experts.shared_ffn_hidden_size=32"
)
# Tokens, pixels, a vector of one row, adapters, learned queries and positions, filters of single channels.
NO_MATRICES = "conv1d. embedding. output.linear patch_embed. gate_weight .lora. queries latents positions conv2".split()


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
