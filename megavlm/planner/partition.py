"""Where to cut the layer list, and what to recompute in each chunk: least simulated step time under a memory cap.

A rank r cannot be done before S(r) + m·load(r): its first micro-batch has to come through the chunks before it and the
gradients of its last one have to return (S), and it works m times on its chunks in between. Exact dynamic programming
minimises the largest of these bounds; branch and bound then plays the promising cuts through the simulator, until no
cut is left whose bound is below the best time found (`exact`), or the allowance of simulations is spent. After that, a
descent moves single cuts and changes what single chunks recompute for as long as a step becomes faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from megavlm.arch.scenario import Recompute
from megavlm.arch.schedules import Held, PipelineShape, Timeline, held_at_peaks, simulate
from megavlm.planner.layer_profiles import Array, LayerProfiles, spans


@dataclass(frozen=True)
class Partition:
    """Cuts (indices into the pipeline's own layers, as many as chunks − 1) with each chunk's recomputation."""

    cuts: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    seconds: float  # simulated, of the pipeline alone
    bubble: float
    bound: float  # no partition is faster than this
    exact: bool  # none is faster than `seconds`


def simulate_partition(
    profiles: LayerProfiles,
    shape: PipelineShape,
    cuts: tuple[int, ...],
    recompute: tuple[Recompute, ...],
) -> Timeline:
    """Return the simulated step of one partition."""
    bounds = (0, *cuts, profiles.count)
    chunks = list(zip(bounds, bounds[1:], recompute, strict=False))
    transfer = [float(profiles.transfer[cut]) for cut in cuts] if shape.pp > 1 else []
    durations = profiles.durations(chunks, transfer, shape=shape)
    return simulate(shape, durations)


def _most_kept(held: Held, saved: Any, waiting: Any) -> Any:
    """Return the most bytes that a chunk's micro-batches keep, of what one keeps before and after its backward pass."""
    return reduce(np.maximum, [whole * saved + halves * waiting if halves else whole * saved for whole, halves in held])


@dataclass(frozen=True)
class NoPartition:
    """No partition was found: `bound` is inf if none fits the memory, else a lower bound of every partition's time."""

    bound: float


def best_partition(
    profiles: LayerProfiles,
    shape: PipelineShape,
    *,
    cap: float | Sequence[float] = float("inf"),
    limit: float = float("inf"),
    simulations: int = 200,
    nodes: int = 200_000,
    descent: bool = True,
) -> Partition | NoPartition:
    """Return the fastest partition into `shape.chunks` chunks whose ranks stay below `cap` bytes, all or each its own.

    Partitions slower than `limit` seconds are of no interest. After `simulations` simulations or `nodes` partial
    partitions the search ends, `exact` is False, and the answer is the best found so far, or with `descent` a local
    optimum near it: no cut moved by up to `FAR` layers, and no other recomputation of a chunk, is faster.
    """
    search = _Search(profiles, shape, cap, limit, simulations, nodes)
    bound = search.run()
    if descent and search.best is not None and not search.exhausted:
        search.descend()
    if search.best is None:
        return NoPartition(bound)
    seconds, bubble, cuts, recompute = search.best
    return Partition(cuts, recompute, seconds, bubble, seconds if search.exhausted else bound, search.exhausted)


FAR = 3  # layers


class _Walk(NamedTuple):
    """What is known once some chunks, counted from the first, have been placed."""

    reach: float  # seconds until the next chunk is reached by the first micro-batch and its gradients have returned
    bound: float  # no continuation is faster
    loads: tuple[float, ...]  # seconds of a micro-batch, by rank
    used: tuple[tuple[float, float], ...]  # bytes by rank: kept ones, and the most transient ones


@dataclass
class _Search:
    """A branch-and-bound search, chunk by chunk from the first."""

    profiles: LayerProfiles
    shape: PipelineShape
    cap: float | Sequence[float]
    limit: float
    simulations: int
    nodes: int
    best: tuple[float, float, tuple[int, ...], tuple[Recompute, ...]] | None = None
    exhausted: bool = False
    _nodes: int = 0
    _known: dict[tuple[object, ...], tuple[Array, Array]] = field(default_factory=dict)
    _rest: list[Array] = field(default_factory=list)

    def run(self) -> float:
        """Search, and return a lower bound that holds for every partition."""
        if self.shape.chunks > self.profiles.count:
            return float("inf")
        self._held = held_at_peaks(self.shape)
        self._set_bytes()
        self._passed, self._worked = self._seconds()
        self._rest = self._bounds_of_rests()
        bound = float(self._rest[self.shape.chunks][0])
        if bound < self.limit:
            self.exhausted = self._extend(0, 0, self._start(), (), ())
        return bound if self.best is not None or not self.exhausted else max(bound, self.limit)

    def _seconds(self) -> tuple[list[Array], list[Array]]:
        """[chunks][modes, i, j]: seconds that a micro-batch takes to pass a chunk of layers i … j−1, forward and
        backward, and that the chunk's rank works on one before the last one's gradient leaves it, in the mean.

        They differ by weight gradients that have passes of their own: of m micro-batches those of m − 1 − r come before
        the last backward pass of rank r (`schedules.py`).
        """
        passed, worked, m = [], [], self.shape.micro_batches
        for chunk in range(self.shape.chunks):
            rank = chunk % self.shape.pp
            splits = self.shape.splits_backward and chunk > 0
            early = max(0, m - 1 - rank)
            path, weight = self._of_rank(rank, splits)
            passed.append(path)
            worked.append(path + early / m * weight if splits else path)
        return passed, worked

    def _of_rank(self, rank: int, splits: bool) -> tuple[Array, Array]:
        """[modes, i, j]: seconds of both passes of layers i … j−1 on a rank, without weight gradients that have passes
        of their own if it `splits`, and seconds of those. Ranks with equal devices share the arrays.
        """
        profiles, pp = self.profiles.of_rank(rank), self.shape.pp
        key = (id(profiles), splits)
        if key not in self._known:
            places = np.arange(profiles.count + 1)
            rising = places[None, :] > places[:, None]
            both = [profiles.chunk_seconds(mode, pp=pp, splits=splits) for mode in profiles.modes]
            weights = [profiles.waits(mode) for mode in profiles.modes]
            self._known[key] = np.stack([np.where(rising, each, np.inf) for each in both]), np.stack(weights)
        return self._known[key]

    def _set_bytes(self) -> None:
        """Set the bytes of chunks of layers i … j−1, [modes, i, j], by what their rank holds: those summed over a
        rank's chunks, and transient ones, of which the largest count.
        """
        profiles = self.profiles
        modes, state = profiles.modes.values(), spans(profiles.model_state)
        saved = np.stack([spans(each.saved) for each in modes])
        waiting = np.stack([spans(profiles.prefix(each.waiting)) for each in modes])
        self._transient = np.stack([_largest(each.transient) for each in modes])
        kept = {held: state + _most_kept(held, saved, waiting) for rank in self._held for held in rank}
        self._kept_by = [kept[self._held_by(index)] for index in range(self.shape.chunks)]

    def _bounds_of_rests(self) -> list[Array]:
        """[chunks + 1][layers + 1]: the least bound of layers j … in k chunks, counted from when j is reached.

        Chunks that do not fit their rank alone are left out. With several chunks per rank only the work of one of them
        is known to be on its rank: a weaker bound.
        """
        profiles, m, n = self.profiles, self.shape.micro_batches, self.profiles.count
        rest = [np.where(np.arange(n + 1) == n, 0.0, np.inf)]
        took = np.empty_like(self._transient)  # one buffer: these arrays are most of what a search writes
        for index in reversed(range(self.shape.chunks)):
            np.add(self._passed[index], 2 * profiles.transfer + rest[-1], out=took)
            np.maximum(took, m * self._worked[index], out=took)
            took[self._kept_by[index] + self._transient > self._cap(index % self.shape.pp)] = np.inf
            rest.append(took.min(axis=(0, 2)))
        return rest

    def _held_by(self, index: int) -> Held:
        return self._held[index % self.shape.pp][index // self.shape.pp]

    def _cap(self, rank: int) -> float:
        return self.cap if isinstance(self.cap, float) else self.cap[rank]

    def _choices(self, index: int, start: int, reach: float) -> Iterator[tuple[float, int, int]]:
        """Yield (bound, end, number of the mode) for each choice of chunk `index`, smallest bound first."""
        left, profiles = self.shape.chunks - index - 1, self.profiles
        ends = np.arange(start + 1, profiles.count - left + 1) if left else np.array([profiles.count])
        beyond = 2 * profiles.transfer[ends] + self._rest[left][ends]
        passed, worked = self._passed[index][:, start, ends], self._worked[index][:, start, ends]
        bounds = reach + np.maximum(passed + beyond[None, :], self.shape.micro_batches * worked)
        for flat in np.argsort(bounds, axis=None, kind="stable"):
            mode, place = divmod(int(flat), len(ends))
            if bounds[mode, place] == np.inf:
                return
            yield float(bounds[mode, place]), int(ends[place]), mode

    @property
    def _target(self) -> float:
        """Return the seconds that a partition must be faster than."""
        return self.limit if self.best is None else min(self.limit, self.best[0] * (1 - 1e-12))

    def _extend(self, index: int, start: int, walk: _Walk, cuts: tuple[int, ...], modes: tuple[Recompute, ...]) -> bool:
        """Try every continuation; return False if the allowance ended before all were tried or ruled out."""
        if index == self.shape.chunks:
            self.simulations -= 1
            self._simulate(cuts[:-1], modes)
            return True
        names = list(self.profiles.modes)
        for own, end, mode in self._choices(index, start, walk.reach):
            self._nodes += 1
            if max(own, walk.bound) >= self._target:
                return True  # sorted: what follows is no better
            if (self.best is not None and self.simulations <= 0) or self._nodes > self.nodes:
                return False
            after = self._placed(walk, index, start, end, mode, own)
            if after is not None and not self._extend(index + 1, end, after, (*cuts, end), (*modes, names[mode])):
                return False
        return True

    def _placed(self, walk: _Walk, index: int, start: int, end: int, mode: int, own: float) -> _Walk | None:
        """Return the walk with chunk `index`, whose bound is `own`; None if it does not fit or cannot be faster."""
        rank, round_ = index % self.shape.pp, index // self.shape.pp
        place = (mode, start, end)
        kept, peak = self._kept_by[index].item(place), self._transient.item(place)
        used = (walk.used[rank][0] + kept, max(walk.used[rank][1], peak))
        load = walk.loads[rank] + self._worked[index].item(place)
        # `reach` of a rank's first chunk is what its load comes on top of.
        fill = walk.reach if round_ == 0 else 0.0
        bound = max(walk.bound, own, fill + self.shape.micro_batches * load)
        if sum(used) > self._cap(rank) or bound >= self._target:
            return None
        return _Walk(
            walk.reach + self._passed[index].item(place) + 2 * self.profiles.transfer.item(end),
            bound,
            (*walk.loads[:rank], load, *walk.loads[rank + 1 :]),
            (*walk.used[:rank], used, *walk.used[rank + 1 :]),
        )

    def _simulate(self, cuts: tuple[int, ...], modes: tuple[Recompute, ...]) -> bool:
        """Simulate a partition and keep it if it is the fastest; return whether it is."""
        timeline = simulate_partition(self.profiles, self.shape, cuts, modes)
        if self.best is not None and timeline.seconds >= self.best[0] * (1 - 1e-12):
            return False
        self.best = (timeline.seconds, timeline.bubble, cuts, modes)
        return True

    def descend(self) -> None:
        """Go on from the best partition to faster ones that differ in one cut or in one chunk's recomputation."""
        place = unchanged = 0
        while unchanged < self.shape.chunks:
            unchanged = 0 if self._changed(place) else unchanged + 1
            place = (place + 1) % self.shape.chunks

    def _changed(self, place: int) -> bool:
        """Change chunk `place` and the cut before it while that is faster; return whether anything was."""
        changed = False
        while any(self._fits(*each) and self._simulate(*each) for each in list(self._neighbours(place))):
            changed = True
        return changed

    def _neighbours(self, place: int) -> Iterator[tuple[tuple[int, ...], tuple[Recompute, ...]]]:
        assert self.best is not None
        _, _, cuts, modes = self.best
        for mode in self.profiles.modes:
            if mode != modes[place]:
                yield cuts, (*modes[:place], mode, *modes[place + 1 :])
        bounds = (0, *cuts, self.profiles.count)
        for end in range(place + 1, self.shape.chunks):  # cuts `place` … `end` − 1, counted from 0
            for step in (each for far in range(1, FAR + 1) for each in (-far, far)):
                if bounds[place] < bounds[place + 1] + step and bounds[end] + step < bounds[end + 1]:
                    yield (*cuts[:place], *(cut + step for cut in cuts[place:end]), *cuts[end:]), modes

    def _fits(self, cuts: tuple[int, ...], modes: tuple[Recompute, ...]) -> bool:
        """Return whether a partition fits the memory and its bound is below the best time."""
        bounds, numbers = (0, *cuts, self.profiles.count), list(self.profiles.modes)
        walk = self._start()
        for index, mode in enumerate(modes):
            placed = self._placed(walk, index, bounds[index], bounds[index + 1], numbers.index(mode), 0.0)
            if placed is None:
                return False
            walk = placed
        return True

    def _start(self) -> _Walk:
        return _Walk(0.0, 0.0, (0.0,) * self.shape.pp, ((0.0, 0.0),) * self.shape.pp)


def _largest(values: Array) -> Array:
    """Return [i, j]: the largest value of layers i … j−1; 0 if there is none."""
    size = len(values) + 1
    rows = np.where(np.arange(size)[:, None] < np.arange(size)[None, :], np.concatenate([[0.0], values])[None, :], 0.0)
    return np.maximum.accumulate(rows, axis=1)
