"""The simulator: closed forms of the papers, and what must hold of any timeline."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megavlm.planner.timeline import ChunkTimes, Event, Timeline, simulate

SIZES = [(1, 3), (2, 2), (2, 8), (4, 4), (4, 12), (8, 16)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[ChunkTimes], int, int, list[float]]:
    """Uneven chunks and micro-batches on any schedule."""
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved"]))
    pp = draw(st.integers(1, 5))
    vpp = draw(st.integers(1, 3)) if schedule == "interleaved" else 1
    rounds = draw(st.integers(1, 4))
    microbatches = rounds * pp if schedule == "interleaved" else draw(st.integers(1, 9))
    seconds = st.floats(0.1, 5)
    chunks = []
    for _ in range(pp * vpp):
        backward = draw(seconds)
        weight = backward * draw(st.floats(0, 1))
        chunks.append(ChunkTimes(draw(seconds), backward, weight, activation=draw(seconds), send=draw(st.floats(0, 1))))
    scales = draw(st.lists(st.floats(0.2, 3), min_size=microbatches, max_size=microbatches))
    return schedule, chunks, pp, microbatches, scales


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bubble_is_that_of_the_papers(schedule: str, pp: int, microbatches: int) -> None:
    timeline = simulate(schedule, [ChunkTimes(1.0, 2.0)] * pp, pp=pp, microbatches=microbatches)
    assert timeline.bubble == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert timeline.step_time == pytest.approx(3.0 * (microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "microbatches"), [size for size in SIZES if size[1] % size[0] == 0])
@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_interleaving_divides_the_bubble(pp: int, microbatches: int, vpp: int) -> None:
    timeline = simulate("interleaved", [ChunkTimes(1.0, 2.0)] * (pp * vpp), pp=pp, microbatches=microbatches)
    assert timeline.bubble == pytest.approx((pp - 1) / (vpp * microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 4), (4, 12), (8, 16)])
def test_zero_bubble_is_faster_in_the_same_memory(pp: int, microbatches: int) -> None:
    chunks = [ChunkTimes(1.0, 2.0, weight=1.0)] * pp
    plain = simulate("1f1b", chunks, pp=pp, microbatches=microbatches)
    zero = simulate("zb-h1", chunks, pp=pp, microbatches=microbatches)
    assert max(zero.peak_activation) == max(plain.peak_activation) == pp
    # With equal F, B and W, the paper leaves (p − 1)(F + B − W) of 1F1B's (p − 1)(F + B + W).
    assert zero.step_time == pytest.approx(3.0 * microbatches + (pp - 1))


def test_peaks_in_flight() -> None:
    pp, microbatches = 4, 8
    chunks = [ChunkTimes(1.0, 2.0)] * pp
    assert simulate("1f1b", chunks, pp=pp, microbatches=microbatches).peak_activation == (4, 3, 2, 1)
    assert simulate("gpipe", chunks, pp=pp, microbatches=microbatches).peak_activation == (8, 8, 8, 8)
    # Narayanan et al. 2021: 2(p − r − 1) + (v − 1)p forwards of warm-up, and the one before the first backward.
    interleaved = simulate("interleaved", chunks * 2, pp=pp, microbatches=microbatches)
    assert interleaved.peak_activation == tuple(2 * (pp - rank - 1) + pp + 1 for rank in range(pp))


def test_order_of_a_small_interleaved_step() -> None:
    """Two ranks with two chunks each and two micro-batches, as megatron-core runs them on rank 1."""
    timeline = simulate("interleaved", [ChunkTimes(1.0, 2.0)] * 4, pp=2, microbatches=2)
    order = [(event.kind[0], event.chunk, event.microbatch) for event in timeline.events if event.rank == 1]
    assert order == [
        ("f", 1, 0), ("f", 1, 1), ("f", 3, 0), ("b", 3, 0), ("f", 3, 1), ("b", 3, 1), ("b", 1, 0), ("b", 1, 1),
    ]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(cases())
def test_ranks_do_one_thing_at_a_time_and_wait_for_what_they_read(
    case: tuple[str, list[ChunkTimes], int, int, list[float]],
) -> None:
    schedule, chunks, pp, microbatches, scales = case
    timeline = simulate(schedule, chunks, pp=pp, microbatches=microbatches, scales=scales)
    found = {(event.kind, event.chunk, event.microbatch): event for event in timeline.events}
    kinds = ("forward", "backward", "weight") if schedule == "zb-h1" else ("forward", "backward")
    assert len(timeline.events) == len(found) == len(kinds) * len(chunks) * microbatches
    for (kind, chunk, micro), event in found.items():
        assert event.rank == chunk % pp
        times = chunks[chunk]
        apart = times.weight if schedule == "zb-h1" else 0.0
        length = {"forward": times.forward, "backward": times.backward - apart, "weight": apart}[kind]
        assert event.end - event.start == pytest.approx(length * scales[micro], abs=1e-9)
        for source, send in _sources(kind, chunk, len(chunks), chunks):
            assert event.start >= found[*source, micro].end + (send if pp > 1 else 0.0) - 1e-9
    _check_rows(timeline, pp)
    busy = sum(event.end - event.start for event in timeline.events)
    assert timeline.bubble == pytest.approx(1 - busy / (pp * timeline.step_time), abs=1e-9)
    assert timeline.peak_activation == pytest.approx(_peaks(timeline, chunks, scales, pp), rel=1e-9)


def _sources(kind: str, chunk: int, count: int, chunks: list[ChunkTimes]) -> list[tuple[tuple[str, int], float]]:
    if kind == "forward":
        return [(("forward", chunk - 1), chunks[chunk - 1].send)] if chunk else []
    if kind == "weight":
        return [(("backward", chunk), 0.0)]
    after = [(("backward", chunk + 1), chunks[chunk].send)] if chunk < count - 1 else []
    return [*after, (("forward", chunk), 0.0)]


def _check_rows(timeline: Timeline, pp: int) -> None:
    """No overlap on a rank, and no pass that could have started earlier."""
    rows: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        rows[event.rank].append(event)
    assert sorted(rows) == list(range(pp))
    for row in rows.values():
        assert all(left.end <= right.start + 1e-9 for left, right in pairwise(row))
    assert timeline.step_time == max(event.end for event in timeline.events)
    assert min(event.start for event in timeline.events) == 0


def _peaks(timeline: Timeline, chunks: list[ChunkTimes], scales: list[float], pp: int) -> list[float]:
    last = timeline.events[-1].kind if any(event.kind == "weight" for event in timeline.events) else "backward"
    now, peak = [0.0] * pp, [0.0] * pp
    for event in timeline.events:
        size = chunks[event.chunk].activation * scales[event.microbatch]
        now[event.rank] += size * (event.kind == "forward") - size * (event.kind == last)
        peak[event.rank] = max(peak[event.rank], now[event.rank])
    assert now == pytest.approx([0.0] * pp, abs=1e-6)
    return peak


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 2), st.floats(0.1, 4)), min_size=1, max_size=6),
    st.integers(1, 14),
)
def test_bounds_of_uneven_stages(times: list[tuple[float, float]], microbatches: int) -> None:
    """A stage has its own work and the way there and back; none waits longer than if all went in lockstep.

    With one ratio of f to b, lockstep is Σ (f + b) + (m − 1) · max (f + b): reached where the last stage is slowest.
    """
    pp = len(times)
    whole = [forward + backward for forward, backward in times]
    chunks = [ChunkTimes(*pair) for pair in times]
    found = simulate("1f1b", chunks, pp=pp, microbatches=microbatches).step_time
    assert found >= max(sum(whole[:rank]) + microbatches * whole[rank] for rank in range(pp)) - 1e-9
    lockstep = max(forward for forward, _ in times) + max(backward for _, backward in times)
    assert found <= sum(whole) + (microbatches - 1) * lockstep + 1e-9
    if max(whole) == whole[-1]:
        slowest_last = sum(whole) + (microbatches - 1) * whole[-1]
        assert found >= slowest_last - 1e-9


def test_uneven_stages_in_figures() -> None:
    """What comes before the slowest stage adds to its work; what follows hides behind it but for the first gradient."""
    slow, quick = ChunkTimes(2.0, 4.0), ChunkTimes(1.0, 2.0)
    assert simulate("1f1b", [quick, quick, slow], pp=3, microbatches=8).step_time == pytest.approx(6 + 8 * 6)
    assert simulate("1f1b", [quick, slow, quick], pp=3, microbatches=8).step_time == pytest.approx(3 + 1 + 8 * 6)


def test_frozen_parts_at_the_front_wait_for_no_gradient() -> None:
    frozen = [ChunkTimes(1.0, 0.0), ChunkTimes(1.0, 2.0)]
    trained = [ChunkTimes(1.0, 1e-9), ChunkTimes(1.0, 2.0)]
    slow = [ChunkTimes(2.0, 0.0), ChunkTimes(1.0, 2.0)]
    assert simulate("1f1b", frozen, pp=2, microbatches=4).step_time == pytest.approx(1 + 4 * 3)
    assert simulate("1f1b", trained, pp=2, microbatches=4).step_time > 13 - 1e-6
    events = simulate("1f1b", slow, pp=2, microbatches=4).events
    assert [e.end for e in events if e.rank == 0 and e.kind == "forward"] == [2, 4, 6, 8]


def test_sending_delays_the_next_chunk_but_not_the_sender() -> None:
    timeline = simulate("gpipe", [ChunkTimes(1.0, 1.0, send=0.5), ChunkTimes(1.0, 1.0)], pp=2, microbatches=1)
    assert timeline.step_time == pytest.approx(4 + 2 * 0.5)


def test_one_slow_micro_batch_holds_up_the_step() -> None:
    chunks = [ChunkTimes(1.0, 2.0)] * 2
    even = simulate("1f1b", chunks, pp=2, microbatches=4)
    uneven = simulate("1f1b", chunks, pp=2, microbatches=4, scales=[0.5, 0.5, 0.5, 2.5])
    assert uneven.step_time > even.step_time + 1


@pytest.mark.parametrize(("schedule", "vpp", "microbatches"), [("1f1b", 2, 4), ("interleaved", 2, 3), ("zb-h1", 2, 4)])
def test_impossible_shapes_are_refused(schedule: str, vpp: int, microbatches: int) -> None:
    with pytest.raises(AssertionError):
        simulate(schedule, [ChunkTimes(1.0, 2.0)] * (2 * vpp), pp=2, microbatches=microbatches)
