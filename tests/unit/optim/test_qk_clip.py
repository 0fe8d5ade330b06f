"""The factors of QK-Clip bring each head's largest logit to the threshold, and touch nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megavlm.arch.tensor_split import LatentHead, head_split
from megavlm.config.schema import OptimizerConfig
from megavlm.optim.qk_clip import clipped_layers, projection_factors, row_factors
from tests.support.flags import resolved

WIDTH = 3


def factors(largest: list[float], groups: int) -> tuple[torch.Tensor, ...]:
    """The factors of queries [groups, heads of each], keys [groups] and values [groups] at a threshold of 10."""
    split = head_split(len(largest), groups, WIDTH, 1)
    rows = row_factors(torch.tensor(largest, dtype=torch.float64), split, OptimizerConfig(qk_clip_threshold=10.0))
    rows = rows.view(groups, -1, WIDTH)
    assert torch.equal(rows, rows[:, :, :1].expand_as(rows)), "one factor for all channels of a head"
    return rows[:, :-2, 0], rows[:, -2, 0], rows[:, -1, 0]


@pytest.mark.parametrize("groups", [6, 3, 2, 1])
def test_each_logit_ends_at_the_threshold(groups: int):
    largest = [40.0, 12.0, 10.0, 9.0, 90.0, 30.0]
    query, key, value = factors(largest, groups)
    after = torch.tensor(largest).view(groups, -1) * query * key[:, None]
    assert after.flatten().tolist() == pytest.approx([min(each, 10.0) for each in largest])
    assert value.tolist() == [1.0] * groups
    assert float(query.max()) <= 1
    assert float(key.max()) <= 1


def test_a_head_with_its_own_key_shares_the_factor_evenly():
    query, key, _ = factors([40.0, 5.0], 2)
    assert query.flatten().tolist() == [0.5, 1.0]
    assert key.tolist() == [0.5, 1.0]


def test_a_shared_key_stays_while_one_of_its_heads_needs_it():
    query, key, _ = factors([40.0, 5.0, 40.0, 90.0], 2)
    assert key.tolist() == [1.0, 0.5]
    assert query[0].tolist() == [0.25, 1.0]


def test_no_logit_and_one_that_is_no_number_change_nothing():
    query, key, _ = factors([0.0, float("nan")], 2)
    assert query.flatten().tolist() == [1.0, 1.0]
    assert key.tolist() == [1.0, 1.0]


def test_what_gates_the_output_stays_as_it_is() -> None:
    split = replace(head_split(4, 2, WIDTH, 1), gated=True)
    options = OptimizerConfig(qk_clip_threshold=10.0)
    largest = torch.tensor([40.0, 10.0, 5.0, 20.0], dtype=torch.float64)
    rows = row_factors(largest, split, options).view(2, 6, WIDTH)[:, :, 0]  # query, gate, query, gate, key, value
    plain = row_factors(largest, replace(split, gated=False), options).view(2, 4, WIDTH)[:, :, 0]
    assert torch.equal(rows[:, [0, 2, 4, 5]], plain)
    assert torch.equal(rows[:, [1, 3]], torch.ones(2, 2, dtype=torch.float64))


def test_a_part_of_the_key_that_all_heads_share_leaves_its_factor_to_the_queries() -> None:
    split = replace(head_split(2, 2, 5, 1), latent=LatentHead(still=3, turning=2, value=4))
    largest = torch.tensor([40.0, 5.0], dtype=torch.float64)
    found = projection_factors(largest, split, OptimizerConfig(qk_clip_threshold=10.0))
    assert found["linear_q_up_proj"].tolist() == [0.5] * 3 + [0.25] * 2 + [1.0] * 5
    assert found["linear_kv_up_proj"].tolist() == [0.5] * 3 + [1.0] * 11


def test_layers_of_linear_attention_are_left_out() -> None:
    config = resolved(["--qk-clip", "--set", "model.language.linear_attention_layers=[0,2]"])
    assert [name for name in clipped_layers(config) if name.startswith("language")] == [
        "language.layers.1",
        "language.layers.3",
    ]
