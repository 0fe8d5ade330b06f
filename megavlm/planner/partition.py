"""Search for the pipeline cuts of the layer list with the least simulated step time under a memory cap.

A rank r cannot finish before S(r) + m·load(r): its first micro-batch passes the earlier chunks and the gradients of its
last one return through them (S), and the rank works on m micro-batches in between. Exact dynamic programming minimises
the largest of these bounds. Branch and bound then simulates promising cuts until no other cut has a bound below the
best time found (`exact`), or the limit of simulations is reached. After that, a descent moves runs of neighbouring
cuts for as long as a step becomes faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from megavlm.arch.schedules import Held, PipelineShape, Timeline, held_at_peaks, simulate
from megavlm.planner.layer_profiles import Array, LayerProfiles, spans

FAR = 3  # layers by which the descent moves a cut at most
Cuts = tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """Pipeline cuts with their step time. `cuts` are chunks − 1 indices into the pipeline's own layers."""

    cuts: Cuts
    seconds: float  # simulated, of the pipeline alone
    bound: float  # no partition is faster than this
    exact: bool  # none is faster than `seconds`


def simulate_partition(profiles: LayerProfiles, shape: PipelineShape, cuts: Cuts) -> Timeline:
    """Return the simulated step of one partition."""
    bounds = (0, *cuts, profiles.count)
    transfer = [float(profiles.transfer[cut]) for cut in cuts] if shape.pp > 1 else []
    return simulate(shape, profiles.durations(list(pairwise(bounds)), transfer, shape=shape))


def best_partition(
    profiles: LayerProfiles,
    shape: PipelineShape,
    *,
    caps: Sequence[float] = (),
    limit: float = float("inf"),
    simulations: int = 200,
) -> Partition | float:
    """Return the fastest partition into `shape.chunks` chunks. If none is found, return a lower bound of the seconds of
    all partitions: infinite if none fits the memory.
    `caps` are the bytes that each pipeline rank may use; empty: no limit. Partitions slower than `limit` seconds are
    skipped. After `simulations` simulations, or about 250 times as many partial partitions, the search ends with
    `exact` False. The answer is then a local optimum near the best partition so far: no move of a run of cuts by up to
    `FAR` layers is faster. With one simulation the answer is the first partition that fits.
    """
    search = _Search(profiles, shape, caps or (float("inf"),) * shape.pp, limit, simulations)
    bound = search.run()
    if simulations > 1 and search.best is not None and not search.exhausted:
        search.descend()
    if search.best is None:
        return bound
    seconds, cuts = search.best
    return Partition(cuts, seconds, seconds if search.exhausted else bound, search.exhausted)


class _Walk(NamedTuple):
    """State of the search after the first chunks have been placed."""

    reach: float  # seconds until the next chunk is reached by the first micro-batch and its gradients have returned
    bound: float  # no continuation is faster
    loads: tuple[float, ...]  # seconds of a micro-batch, by rank
    used: tuple[tuple[float, float], ...]  # bytes by rank: kept ones, and the most transient ones


class _Search:
    """A branch-and-bound search, chunk by chunk from the first."""

    def __init__(
        self, profiles: LayerProfiles, shape: PipelineShape, caps: Sequence[float], limit: float, simulations: int
    ) -> None:
        self.profiles, self.shape, self.caps, self.limit = profiles, shape, caps, limit
        self.best: tuple[float, Cuts] | None = None
        self.exhausted = False
        self._simulations, self._nodes = simulations, 4 * shape.chunks + 250 * simulations

    def run(self) -> float:
        """Search, and return a lower bound that holds for every partition."""
        if self.shape.chunks > self.profiles.count:
            return float("inf")
        self._passed, self._worked = self._seconds()
        self._kept, self._transient = self._bytes()
        self._rest = self._bounds_of_rests()
        bound = float(self._rest[self.shape.chunks][0])
        if bound < self.limit:
            self.exhausted = self._extend(0, 0, self._start(), ())
        return bound if self.best is not None or not self.exhausted else max(bound, self.limit)

    def _seconds(self) -> tuple[list[Array], list[Array]]:
        """Return two lists [chunks][i, j] for chunks of layers i … j−1: seconds of a micro-batch's forward and backward
        pass, and mean seconds per micro-batch that the rank works before the last gradient leaves the chunk.
        They differ by weight gradients with separate passes: those of m − 1 − r of the m micro-batches come before the
        last backward pass of rank r (`schedules.py`).
        """
        passed, worked, m = list[Array](), list[Array](), self.shape.micro_batches
        known: dict[tuple[int, bool], tuple[Array, Array]] = {}  # ranks with equal devices share the arrays
        places = np.arange(self.profiles.count + 1)
        for chunk in range(self.shape.chunks):
            rank = chunk % self.shape.pp
            splits, own = self.shape.splits_backward and chunk > 0, self.profiles.of_rank(rank)
            if (key := (id(own), splits)) not in known:
                seconds = own.chunk_seconds(pp=self.shape.pp, splits=splits)
                known[key] = np.where(places[None, :] > places[:, None], seconds, np.inf), own.waits()
            path, weight = known[key]
            passed.append(path)
            worked.append(path + max(0, m - 1 - rank) / m * weight if splits else path)
        return passed, worked

    def _bytes(self) -> tuple[list[Array], Array]:
        """Return [chunks][i, j]: kept bytes of a chunk of layers i … j−1, which add up over a rank's chunks; and
        [i, j]: transient bytes, of which the largest of a rank's chunks counts.
        """
        profiles, every = self.profiles, held_at_peaks(self.shape)
        state, saved, waiting = (spans(each) for each in (profiles.model_state, profiles.saved, profiles.waiting))
        kept = {held: state + _most_kept(held, saved, waiting) for held in {held for rank in every for held in rank}}
        pp = self.shape.pp
        by_chunk = [kept[every[index % pp][index // pp]] for index in range(self.shape.chunks)]
        return by_chunk, _largest(profiles.transient)

    def _bounds_of_rests(self) -> list[Array]:
        """Return [chunks + 1][layers + 1]: entry [k][j] is the least bound in seconds of layers j … in k chunks,
        counted from when layer j is reached.
        Chunks that do not fit their rank alone are left out. With several chunks per rank, the bound counts the work of
        one chunk per rank, and so is weaker. Every chunk has at least one layer: other j have an infinite bound.
        """
        profiles, chunks, n = self.profiles, self.shape.chunks, self.profiles.count
        rest = [np.where(np.arange(n + 1) == n, 0.0, np.inf)]
        known: dict[tuple[int, int, float], Array] = {}  # chunks of equal work, memory and device share the array
        for index in reversed(range(chunks)):
            worked, kept, cap = self._worked[index], self._kept[index], self.caps[index % self.shape.pp]
            if (key := (id(worked), id(kept), cap)) not in known:
                fits = kept + self._transient <= cap
                known[key] = np.where(fits, self.shape.micro_batches * worked, np.inf)
            last = n - (chunks - index - 1)
            start, end = slice(index, last), slice(index + 1, last + 1)
            beyond = 2 * profiles.transfer[end] + rest[-1][end]
            least = np.full(n + 1, np.inf)
            least[start] = np.maximum(self._passed[index][start, end] + beyond, known[key][start, end]).min(axis=1)
            rest.append(least)
        return rest

    def _choices(self, index: int, start: int, reach: float) -> Iterator[tuple[float, int]]:
        """Yield (bound, end) for each choice of chunk `index`, smallest bound first."""
        left, profiles = self.shape.chunks - index - 1, self.profiles
        ends = np.arange(start + 1, profiles.count - left + 1) if left else np.array([profiles.count])
        beyond = 2 * profiles.transfer[ends] + self._rest[left][ends]
        passed, worked = self._passed[index][start, ends], self._worked[index][start, ends]
        bounds = reach + np.maximum(passed + beyond, self.shape.micro_batches * worked)
        for place in np.argsort(bounds, kind="stable"):
            if bounds[place] == np.inf:
                return
            yield float(bounds[place]), int(ends[place])

    @property
    def _target(self) -> float:
        """Return the seconds that a partition must be faster than."""
        return self.limit if self.best is None else min(self.limit, self.best[0] * (1 - 1e-12))

    def _extend(self, index: int, start: int, walk: _Walk, cuts: Cuts) -> bool:
        """Try every continuation; return False if the search limit was reached before all were tried or ruled out."""
        if index == self.shape.chunks:
            self._simulations -= 1
            self._simulate(cuts[:-1])
            return True
        for own, end in self._choices(index, start, walk.reach):
            self._nodes -= 1
            if max(own, walk.bound) >= self._target:
                return True  # sorted: what follows is no better
            if (self.best is not None and self._simulations <= 0) or self._nodes < 0:
                return False
            after = self._placed(walk, index, start, end, own)
            if after is not None and not self._extend(index + 1, end, after, (*cuts, end)):
                return False
        return True

    def _placed(self, walk: _Walk, index: int, start: int, end: int, own: float) -> _Walk | None:
        """Return the walk after placing chunk `index`, of bound `own`; None if it does not fit or cannot be faster."""
        rank, round_ = index % self.shape.pp, index // self.shape.pp
        kept, peak = self._kept[index].item(start, end), self._transient.item(start, end)
        used = (walk.used[rank][0] + kept, max(walk.used[rank][1], peak))
        load = walk.loads[rank] + self._worked[index].item(start, end)
        # A rank's load adds to the time until its first chunk is reached.
        fill = walk.reach if round_ == 0 else 0.0
        bound = max(walk.bound, own, fill + self.shape.micro_batches * load)
        if sum(used) > self.caps[rank] or bound >= self._target:
            return None
        return _Walk(
            walk.reach + self._passed[index].item(start, end) + 2 * self.profiles.transfer.item(end),
            bound,
            (*walk.loads[:rank], load, *walk.loads[rank + 1 :]),
            (*walk.used[:rank], used, *walk.used[rank + 1 :]),
        )

    def _simulate(self, cuts: Cuts) -> bool:
        """Simulate a partition and keep it if it is the fastest; return whether it is."""
        seconds = simulate_partition(self.profiles, self.shape, cuts).seconds
        if self.best is not None and seconds >= self.best[0] * (1 - 1e-12):
            return False
        self.best = (seconds, cuts)
        return True

    def descend(self) -> None:
        """Improve the best partition by moving runs of neighbouring cuts, until no such move is faster."""
        place = unchanged = 0
        while unchanged < self.shape.chunks - 1:
            faster = any(self._fits(cuts) and self._simulate(cuts) for cuts in list(self._neighbours(place)))
            unchanged = 0 if faster else unchanged + 1
            place = place if faster else (place + 1) % (self.shape.chunks - 1)

    def _neighbours(self, place: int) -> Iterator[Cuts]:
        """Yield the best cuts with each run of cuts that begins at `place` moved by up to `FAR` layers."""
        assert self.best is not None
        cuts = self.best[1]
        bounds = (0, *cuts, self.profiles.count)
        for end in range(place + 1, self.shape.chunks):  # cuts `place` … `end` − 1, counted from 0
            for step in (each for far in range(1, FAR + 1) for each in (-far, far)):
                if bounds[place] < bounds[place + 1] + step and bounds[end] + step < bounds[end + 1]:
                    yield (*cuts[:place], *(cut + step for cut in cuts[place:end]), *cuts[end:])

    def _fits(self, cuts: Cuts) -> bool:
        """Return whether a partition fits the memory and its bound is below the best time."""
        bounds = (0, *cuts, self.profiles.count)
        walk: _Walk | None = self._start()
        for index in range(self.shape.chunks):
            walk = None if walk is None else self._placed(walk, index, bounds[index], bounds[index + 1], 0.0)
        return walk is not None

    def _start(self) -> _Walk:
        return _Walk(0.0, 0.0, (0.0,) * self.shape.pp, ((0.0, 0.0),) * self.shape.pp)


def _most_kept(held: Held, saved: Any, waiting: Any) -> Any:
    """Return the peak bytes of a chunk's micro-batches, from the bytes of one before and after its backward pass."""
    return reduce(np.maximum, [whole * saved + halves * waiting if halves else whole * saved for whole, halves in held])


def _largest(values: Array) -> Array:
    """Return [i, j]: the largest value of layers i … j−1; 0 if there is none."""
    size = len(values) + 1
    rows = np.where(np.arange(size)[:, None] < np.arange(size)[None, :], np.concatenate([[0.0], values])[None, :], 0.0)
    return np.maximum.accumulate(rows, axis=1)
