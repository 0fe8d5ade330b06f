from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavlm.arch.tensor_split import HeadSplit, Part, head_split, mlp_share, share_of, share_runs
from megavlm.command_line.parsing import parse
from megavlm.rules.check import check


@st.composite
def splits(draw: st.DrawFn) -> HeadSplit:
    groups, per_group = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return head_split(groups * per_group, groups, draw(st.integers(1, 12)), draw(st.integers(1, 12)))


def rows(part: Part) -> dict[int, int]:
    """The model's row of each row of a rank."""
    found = {run.local + at: run.real + at for run in part.runs for at in range(run.count)}
    assert len(found) == sum(run.count for run in part.runs), "rows of a rank are in one run each"
    return found


@given(splits())
def test_ranks_hold_each_row_of_the_model_once(split: HeadSplit) -> None:
    weights = {
        split.local_rows: split.qkv_part,
        split.local_heads * split.width: lambda rank: split.query_part(rank, axis=1),
        split.slots * split.part_width: split.key_part,
    }
    for own, part_of in weights.items():
        parts = [part_of(rank) for rank in range(split.tp)]
        assert sorted(row for part in parts for row in rows(part).values()) == list(range(parts[0].size))
        assert all(0 <= local < own for part in parts for local in rows(part))


@given(splits())
def test_query_heads_meet_their_keys(split: HeadSplit) -> None:
    """Query head i attends to key/value head i // (heads / groups), all of whose channels arrive in their order."""
    for rank in range(split.tp):
        slots, exchange = split.slots_of(rank), split.exchange(rank)
        arriving = [
            (split.slots_of(source)[number].group, split.slots_of(source)[number].piece)
            for source in range(split.tp)
            for number in split.exchange(source).sends[rank]
        ]
        assert exchange.receives == tuple(len(split.exchange(source).sends[rank]) for source in range(split.tp))
        for number, slot in enumerate(slots):
            heads = range(slot.first, slot.first + slot.count)
            assert all(head // split.per_group == slot.group for head in heads)
            if split.copies > 1:
                assert [arriving[at] for at in exchange.places[number]] == [
                    (slot.group, piece) for piece in range(split.copies)
                ]
            local = rows(split.query_part(rank, axis=0))
            real = {number * split.queries + at: head for at, head in enumerate(heads)}
            for at in range(number * split.queries, (number + 1) * split.queries):
                found = {local.get(at * split.width + channel) for channel in range(split.width)}
                expected = {real[at] * split.width + c for c in range(split.width)} if at in real else {None}
                assert found == expected
                padded = at in split.padded_heads(rank)
                assert padded == (at not in real and split.copies > 1)


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "slots", "queries", "copies", "is_even"),
    [
        (28, 4, 8, 1, 4, 2, False),  # Qwen2.5-VL-7B: 32 heads where 28 are
        (28, 4, 4, 1, 7, 1, True),
        (12, 2, 8, 1, 2, 4, False),
        (24, 6, 4, 3, 2, 2, False),  # no padding: a rank has one and a half groups
        (25, 25, 8, 4, 1, 1, False),  # InternViT-6B
        (28, 4, 32, 1, 1, 7, False),  # Qwen2.5-VL-7B: four ranks have padding alone
    ],
)
def test_splits(heads: int, groups: int, tp: int, slots: int, queries: int, copies: int, is_even: bool) -> None:
    split = head_split(heads, groups, 128, tp)
    assert (split.slots, split.queries, split.copies, split.is_even) == (slots, queries, copies, is_even)


def test_an_even_split_is_one_run() -> None:
    split = head_split(32, 8, 128, 4)
    assert [len(part.runs) for part in (split.qkv_part(3), split.query_part(3, axis=1), split.key_part(3))] == [1, 1, 1]
    assert split.received == 0


@given(st.integers(1, 600), st.integers(1, 12), st.integers(1, 3), st.sampled_from([share_of, mlp_share]))
def test_widths_are_divided_once(size: int, tp: int, blocks: int, share: Callable[[int, int], int]) -> None:
    parts = [Part(0, blocks * size, share_runs(size, tp, rank, blocks=blocks, share=share)) for rank in range(tp)]
    assert sorted(row for part in parts for row in rows(part).values()) == list(range(blocks * size))
    assert all(local < blocks * share(size, tp) for part in parts for local in rows(part))


@pytest.mark.parametrize(
    ("width", "tp", "share"),
    [
        (3420, 1, 3424),  # Qwen2.5-VL
        (3420, 8, 432),
        (3420, 32, 107),  # 112 would leave the last rank padding alone
        (4304, 4, 1088),  # SigLIP-so400m
        (60, 2, 30),  # too narrow
    ],
)
def test_shares_of_mlps(width: int, tp: int, share: int) -> None:
    assert mlp_share(width, tp) == share


@pytest.mark.parametrize("recipe", ["", "--recipe demo"])
def test_tp_8_and_pp_2_is_a_layout_of_the_default_model(recipe: str) -> None:
    check(parse(f"{recipe} --tp 8 --pp 2".split()), world=16)
