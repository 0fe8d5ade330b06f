"""Simulate groups whose context parallelism follows the micro-batch, against packed rows at one --cp: who is faster?

    python benchmarks/dynamic_context.py [--model qwen2_5_vl_7b …] [--gpu h100] [--gpus 64 …] [--write]

Mixtures of sample lengths with long tails are trained in both ways, in the planner's seconds of the language model.
Both ways choose the best of all layouts of one pipeline stage (TP, recomputation, ZeRO-1 or 2, offloaded activations).
Packed rows are those of `megavlm/arch/packing.py`, as long as the longest sample may be, evened out over replicas by
cost. Dynamic groups give each sample the fewest ranks that hold it, more where it would outlast the step, and pack
short samples for single ranks; groups are aligned, a power of two, and the widest begin. Nothing is measured.
--write puts the table into docs/design/decisions.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import gcd
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tables import with_table

from megavlm.arch.dims import Dims
from megavlm.arch.kinds import is_transformer, saved_bytes
from megavlm.arch.layers import EMBEDDING, LANGUAGE_LAYER, part_of
from megavlm.arch.packing import assign, pack
from megavlm.arch.scenario import Offloaded, Recompute, Scenario, Sharding, scenario_of
from megavlm.arch.tensor_split import language_split
from megavlm.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig, TrainConfig
from megavlm.families import published_model
from megavlm.planner.cost import layer_seconds
from megavlm.planner.hardware import Hardware, profile
from megavlm.planner.host_memory import host_memory
from megavlm.planner.memory import rank_memory

DOCUMENT = Path(__file__).parents[1] / "docs" / "design" / "decisions.md"
STEPS = 2  # batches that are simulated for each mixture
WIDEST = 64  # ranks of a group


@dataclass(frozen=True)
class Lengths:
    """Samples of one source: their share, and a log-normal distribution of their lengths, or between two lengths."""

    share: float
    median: float
    sigma: float = 0.0  # 0: log-uniform between `median` and the mixture's longest
    most: float = float("inf")


@dataclass(frozen=True)
class Mixture:
    """Sources whose samples are drawn by their shares, and cut at `longest` tokens."""

    name: str
    longest: int
    sources: tuple[Lengths, ...]

    def draw(self, tokens: int, seed: int) -> list[int]:
        """Return lengths that add up to about so many tokens."""
        rng, found, total = np.random.default_rng(seed), list[int](), 0
        shares = np.array([source.share for source in self.sources])
        while total < tokens:
            source = self.sources[rng.choice(len(self.sources), p=shares / shares.sum())]
            if source.sigma:
                length = source.median * np.exp(source.sigma * rng.standard_normal())
            else:
                length = np.exp(rng.uniform(np.log(source.median), np.log(min(source.most, self.longest))))
            found.append(int(np.clip(length, 64, min(source.most, self.longest))))
            total += found[-1]
        return found


MIXTURES = (
    Mixture("chats, no tail", 8192, (Lengths(1.0, 1500, 0.8),)),
    Mixture("chats, 2 % documents", 131072, (Lengths(0.98, 1500, 0.8, 16384), Lengths(0.02, 16384))),
    Mixture("images, clips, 2 % films", 131072, (
        Lengths(0.78, 2000, 0.6, 16384), Lengths(0.20, 8192, 0.0, 32768), Lengths(0.02, 65536),
    )),
    Mixture("code: log-normal, σ 2", 131072, (Lengths(1.0, 1000, 2.0),)),
    Mixture("chats, 1 % up to 512k", 524288, (Lengths(0.99, 1500, 0.8, 16384), Lengths(0.01, 16384))),
    Mixture("all 64k to 128k", 131072, (Lengths(1.0, 65536),)),
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """What both ways choose from, beside the number of context-parallel ranks."""

    tp: int
    recompute: Recompute = "none"
    sharding: Sharding = "optimizer"
    offload: tuple[Offloaded, ...] = ()

    @property
    def label(self) -> str:
        zero = 1 if self.sharding == "optimizer" else 2
        return f"TP{self.tp}, recompute {self.recompute}, ZeRO-{zero}" + ", offload" * bool(self.offload)


MODES: tuple[Recompute, ...] = ("none", "full")
SHARDINGS: tuple[Sharding, ...] = ("optimizer", "optimizer_gradients")
OFFLOADS: tuple[tuple[Offloaded, ...], ...] = ((), ("activations",))
LAYOUTS = [
    Layout(tp, mode, sharding, offload)
    for tp, mode, sharding, offload in product((1, 2, 4, 8), MODES, SHARDINGS, OFFLOADS)
]


@dataclass(frozen=True)
class Terms:
    """Seconds [forward, backward] that layers take on the device and on the host, for one number of ranks."""

    device: NDArray[np.float64]  # [2, (once, for a token, for a square of a sample's length)]
    host: NDArray[np.float64]  # [2]
    copy: float = 0.0  # seconds for a token to offload it

    def seconds(self, tokens: int, squares: int) -> NDArray[np.float64]:
        """Return the device's seconds; copies run beside passes as in `planner/cost.py`."""
        forward, backward = self.device @ np.array([1.0, tokens, squares])
        copy = self.copy * tokens
        return np.array([forward, max(backward, copy) + max(0.0, copy - forward)])


class Costs:
    """The planner's seconds and bytes of micro-batches in one layout of a model's language part."""

    def __init__(self, model: ModelConfig, hardware: Hardware, gpus: int, layout: Layout) -> None:
        self.hardware, self.layout, self.ranks = hardware, layout, gpus // layout.tp
        config = Config(
            model=model,
            train=TrainConfig(global_batch_size=gpus, seq_length=2**16),
            data=DataConfig(images_per_sample=(0,)),
            precision=PrecisionConfig(dtype="bf16"),
        )
        parallel = replace(
            config.parallel, tensor_model_parallel_size=layout.tp, data_parallel_sharding=layout.sharding
        )
        config = replace(config, parallel=parallel, execution=replace(config.execution, offload=layout.offload))
        self._scenario = scenario_of(config, Dims(tp=layout.tp, dp=self.ranks), on_gpu=True)
        self.capacity = self._capacity()
        self._terms = cache(self._make_terms)

    def scenario(self, cp: int, tokens: int, squares: int) -> Scenario:
        """Return a rank's part of a micro-batch that `cp` ranks split."""
        heads = language_split(self._scenario.model.language, self.layout.tp).local_heads
        dims = Dims(tp=self.layout.tp, dp=self.ranks // cp, cp=cp, cp_groups=cp // gcd(heads, cp))
        own = -(-tokens // cp)
        work = replace(self._scenario.work, tokens=own, trained_tokens=own, token_squares=squares // cp)
        return replace(self._scenario, dims=dims, work=work)

    def seconds(self, cp: int, tokens: int, squares: int) -> float:
        """Return the seconds of both passes of a micro-batch: the slower of device and host counts in each."""
        layer, others = self._terms(cp)
        layers = self._scenario.model.language.num_layers
        device = layers * layer.seconds(tokens, squares) + others.seconds(tokens, squares)
        return float(np.maximum(device, layers * layer.host + others.host).sum())

    def _make_terms(self, cp: int) -> tuple[Terms, Terms]:
        """Return the terms of a transformer layer and of all others.

        Passes take longer with tokens and squares alone, so that three micro-batches tell them.
        """
        size = 2**16
        names = [name for name in self._scenario.names if part_of(name) == "language" and not is_transformer(name)]
        found = []
        for group in ([f"{LANGUAGE_LAYER}0"], names):
            (none, host), (token, _), (square, _) = (
                self._passes(group, self.scenario(cp, *work)) for work in ((size, 0), (2 * size, 0), (size, size**2))
            )
            each = (token - none) / size
            found.append(Terms(np.stack([none - each * size, each, (square - none) / size**2], axis=1), host))
        saved = saved_bytes(f"{LANGUAGE_LAYER}0", self.scenario(cp, size, 0), self.layout.recompute)
        copy = saved / size / self.hardware.own_host.link.bandwidth * bool(self.layout.offload)
        return replace(found[0], copy=copy), found[1]

    def _passes(self, names: Sequence[str], scenario: Scenario) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the device's seconds, without copies, and the host's of the forward and the backward pass."""
        mode, alone = self.layout.recompute, replace(scenario, offload=())
        each = [layer_seconds(name, alone, self.hardware, mode) for name in names]
        device = [sum(s.forward for s in each), sum(s.backward for s in each)]
        return np.array(device), np.array([sum(s.launch[side] for s in each) for side in (0, 1)])

    def _capacity(self) -> int:
        """Return how many tokens one rank can hold of a micro-batch, by the memory model; 0 if none."""

        def taken(tokens: int) -> tuple[float, float]:
            scenario = self.scenario(1, tokens, tokens)
            skip, bounds = scenario.names.index(EMBEDDING), [0, len(scenario.names)]
            device = rank_memory(scenario, bounds, 0, recompute=self.layout.recompute, skip=skip).total
            return device, host_memory(scenario, bounds, 0, recompute=self.layout.recompute, skip=skip).total

        node = min(self.hardware.devices_per_node, self._scenario.dims.world)
        rooms = (self.hardware.memory, self.hardware.own_host.memory / node)
        held = [
            2**14 + (room - some) / (more - some) * 2**14
            for room, some, more in zip(rooms, taken(2**14), taken(2**15), strict=True)
            if more > some
        ]
        return max(0, int(min(held)))


def of_samples(costs: Costs, cp: int, samples: Sequence[int]) -> float:
    """Return the seconds of a micro-batch of packed samples on `cp` ranks."""
    return costs.seconds(cp, sum(samples), sum(length * length for length in samples))


@cache
def bins(samples: tuple[int, ...], room: int) -> list[tuple[int, ...]]:
    """Return the samples as they are packed into so many tokens."""
    return [tuple(samples[item] for item in items) for items in pack(samples, room)]


def packed_rows(costs: Costs, cp: int, samples: Sequence[int], *, longest: int) -> tuple[float, float]:
    """Return the seconds of a step of packed rows, all split over `cp` ranks, and the largest load over the mean.

    Every replica has equally many rows: some are empty where samples fill too few.
    """
    replicas = costs.ranks // cp
    rows = [list(row) for row in bins(tuple(samples), longest)]
    rows += [[1]] * (-len(rows) % replicas)
    seconds = np.array([of_samples(costs, cp, row) for row in rows])
    loads = [seconds[items].sum() for items in assign(seconds[:, None], replicas)]
    return max(loads), max(loads) / (sum(loads) / replicas)


def dynamic_groups(costs: Costs, samples: Sequence[int]) -> float:
    """Return the seconds of a step whose samples each have a group of their own width, at the best widths and bins."""
    return min(
        _dynamic_step(costs, samples, share=share, least=least)
        for share, least in product((1.0, 0.5), (1, 4, 16))
        if least <= min(costs.ranks, WIDEST)
    )


def _dynamic_step(costs: Costs, samples: Sequence[int], *, share: float, least: int) -> float:
    """Return the seconds where bins take this share of what their ranks hold and long samples have `least` ranks.

    No job may last longer than an even step: it gets twice the ranks until it does not. As groups are aligned and wide
    ones begin, all ranks of a group are free at the same time.
    """
    narrow = [length for length in samples if length <= costs.capacity]
    jobs = [(max(least, width_of(length, costs)), [length]) for length in samples if length > costs.capacity]
    room = max(int(costs.capacity * share), max(narrow, default=1))
    jobs += [(1, list(each)) for each in bins(tuple(narrow), room)]
    while True:
        timed = [(width, of_samples(costs, width, job)) for width, job in jobs]
        even = sum(width * seconds for width, seconds in timed) / costs.ranks
        wider = [
            (min(2 * width, costs.ranks, WIDEST) if seconds > even else width, job)
            for (width, seconds), (_, job) in zip(timed, jobs, strict=True)
        ]
        if wider == jobs:
            return float(loads_of(timed, costs.ranks).max())
        jobs = wider


def width_of(length: int, costs: Costs) -> int:
    """Return the fewest ranks, a power of two, that hold a sample."""
    return 1 << (-(-length // costs.capacity) - 1).bit_length()


def loads_of(jobs: Sequence[tuple[int, float]], ranks: int) -> NDArray[np.float64]:
    """Return the seconds [ranks] that each rank works: jobs (width, seconds) go to the least loaded aligned group."""
    loads = np.zeros(ranks)
    for width, seconds in sorted(jobs, key=lambda job: (-job[0], -job[1])):
        group = int(loads.reshape(-1, width).max(axis=1).argmin())
        loads[group * width : (group + 1) * width] += seconds
    return loads


@dataclass(frozen=True)
class Outcome:
    """The best layouts of both ways for a mixture, and their tokens per second and GPU."""

    fixed: str
    fixed_rate: float
    imbalance: float
    dynamic: str
    dynamic_rate: float
    static_rate: float  # of packed rows in the dynamic way's layout

    @property
    def gain(self) -> float:
        return self.dynamic_rate / self.fixed_rate


def compare(mixture: Mixture, model: ModelConfig, hardware: Hardware, gpus: int, tokens: int) -> Outcome | None:
    """Return the outcome for a mixture with so many tokens a step; None if no layout fits."""
    batches = [mixture.draw(tokens, seed) for seed in range(STEPS)]
    trained = sum(map(sum, batches)) / gpus
    fixed, dynamic = list[tuple[float, str, float, Layout]](), list[tuple[float, Layout]]()
    for layout in LAYOUTS:
        costs = Costs(model, hardware, gpus, layout)
        if not costs.capacity:
            continue
        for cp in (2**power for power in range(costs.ranks.bit_length())):
            if cp <= WIDEST and mixture.longest <= cp * costs.capacity:
                steps = [packed_rows(costs, cp, batch, longest=mixture.longest) for batch in batches]
                total, uneven = sum(step[0] for step in steps), max(step[1] for step in steps)
                fixed.append((trained / total, f"CP{cp} {layout.label}", uneven, layout))
        if mixture.longest <= min(costs.ranks, WIDEST) * costs.capacity:
            dynamic.append((trained / sum(dynamic_groups(costs, batch) for batch in batches), layout))
    if not fixed or not dynamic:
        return None
    best, most = max(fixed, key=lambda each: each[0]), max(dynamic, key=lambda each: each[0])
    static = max(rate for rate, _, _, layout in fixed if layout == most[1])
    return Outcome(best[1], best[0], best[2], most[1].label, most[0], static)


def table(models: Sequence[str], gpu: str, sizes: Sequence[int], tokens: int) -> str:
    """Return a table of mixtures by models and numbers of GPUs, and print each comparison with its layouts."""
    cells: dict[str, dict[str, str]] = {}
    for mixture, name, gpus in product(MIXTURES, models, sizes):
        each = compare(mixture, published_model(name), profile(gpu), gpus, tokens)
        if each is not None:
            column, alike = f"{name}, {gpus} {gpu.upper()}", each.dynamic_rate / each.static_rate
            cells.setdefault(mixture.name, {})[column] = f"{each.gain:.2f} ({alike:.2f})"
            print(
                f"{mixture.name}, {column}: packed rows {each.fixed}, {each.fixed_rate:,.0f} tokens/s/GPU, uneven "
                f"{each.imbalance:.2f}; dynamic {each.dynamic}, {each.dynamic_rate:,.0f} tokens/s/GPU; gain "
                f"{each.gain:.2f}, alike {alike:.2f}",
                flush=True,
            )
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = [f"| mixture | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {name} | {' | '.join(row.get(column, '–') for column in columns)} |" for name, row in cells.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen2_5_vl_7b", "qwen2_5_vl_72b"], help="published models")
    parser.add_argument("--gpu", default="h100", help="a profile of the planner")
    parser.add_argument("--gpus", type=int, nargs="+", default=[64], help="numbers of GPUs")
    parser.add_argument("--tokens", type=int, default=2**22, help="tokens of a step")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = parser.parse_args()
    found = table(options.model, options.gpu, options.gpus, options.tokens)
    print(found)
    if options.write:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(), "simulated", found))


if __name__ == "__main__":
    main()
