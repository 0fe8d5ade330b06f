"""Measure steps of two data-parallel processes over a slow link: gradients and weights as they are, and as codes.

    sudo python benchmarks/links.py [--quick]        # Linux, with `ip` and `tc` (iproute2)

Each process has a network namespace of its own, as a machine has, and a pair of virtual interfaces between them lets
through so many bits a second (a token bucket in either direction). The processes train the same model through the
program's own path, with its defaults: what overlaps there overlaps here. `megabytes` is what the interface of rank 0
has sent in a step, with headers and acknowledgements; `seconds` is the median of steps after the first.
Appends to `benchmarks/records/links.jsonl`, unless `--quick`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import append, circumstances

WORLD = 2
MODEL = (
    "--global-batch-size 4 --micro-batch-size 2 --seq-length 64 --no-tensorboard --no-save --train-iters 100 "
    "--precision bf16 --set model.vision.num_layers=2 "
    "model.vision.hidden_size=64 model.vision.ffn_hidden_size=128 model.vision.num_attention_heads=4 "
    "model.vision.image_size=16 model.vision.patch_size=4 model.projector.pixel_shuffle=2 "
    "model.language.num_layers=4 model.language.hidden_size=256 model.language.ffn_hidden_size=768 "
    "model.language.num_attention_heads=4 model.language.vocab_size=8192 --images-per-sample 1"
)
SIDES = {
    "exact": "",
    "gradients bf16": "--compress-gradients bf16",
    "gradients int8": "--compress-gradients int8",
    "gradients and weights int8": "--compress-gradients int8 --compress-weights int8",
    "gradients and weights fp8": "--compress-gradients fp8 --compress-weights fp8",
    "ZeRO-3, exact": "--data-parallel-sharding full",
    "ZeRO-3, gradients and weights int8": "--data-parallel-sharding full --compress-gradients int8 "
    "--compress-weights int8",
}
RATES = {"1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
ADDRESS = "10.97.0.{}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one rate and two steps; no record")
    parser.add_argument("--rank", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    count = 2 if given.quick else 6
    if given.rank:
        print(json.dumps(steps(given.rank[1:], int(given.rank[0]))))
        return
    record: dict[str, Any] = {**circumstances(), "link": "network namespaces", "rates": {}}
    for name, rate in list(RATES.items())[: 1 if given.quick else None]:
        record["rates"][name] = {}
        with link(rate) as spaces:
            for side, flags in SIDES.items():
                found = measured(spaces, flags, count)
                record["parameters"] = found.pop("parameters")
                record["rates"][name][side] = found
                print(f"{name}, {side}: {found['megabytes']:.2f} MB and {found['seconds']:.2f} s a step", flush=True)
    if not given.quick:
        append("links", record)


@contextlib.contextmanager
def link(rate: str) -> Iterator[list[str]]:
    """Give two network namespaces, each with the interface `wire`, between which a token bucket passes this rate."""
    spaces = [f"megavlm-{os.getpid()}-{rank}" for rank in range(WORLD)]
    try:
        for space in spaces:
            _run(f"ip netns add {space}")
        _run(f"ip link add wire netns {spaces[0]} type veth peer name wire netns {spaces[1]}")
        for rank, space in enumerate(spaces):
            _run(f"ip -n {space} addr add {ADDRESS.format(rank + 1)}/24 dev wire")
            _run(f"ip -n {space} link set wire up")
            _run(f"ip -n {space} link set lo up")
            # The bucket holds several of the largest packets that the kernel builds (64 KiB), or it would pass none.
            _run(f"tc -n {space} qdisc add dev wire root tbf rate {rate} burst 256kb latency 100ms")
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)


def _run(command: str) -> None:
    try:
        subprocess.run(command.split(), check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}: run as root, on Linux with iproute2")


def measured(spaces: Sequence[str], flags: str, count: int) -> dict[str, Any]:
    """Return the megabytes and seconds of a step, and the number of parameters, as rank 0 has them."""
    common = {"MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": "29500", "WORLD_SIZE": str(WORLD), "LOCAL_RANK": "0"}
    common |= {"GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, __file__, "--rank", str(count), *MODEL.split(), *flags.split(), "--run-dir", folder]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", space, *argv],
                env=os.environ | common | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, space in enumerate(spaces)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("\n".join(said))
    return dict(json.loads(said[0].splitlines()[-1]))


def steps(argv: Sequence[str], count: int) -> dict[str, Any]:
    """Train as one of the ranks."""
    from megavlm import backend

    chosen = backend.activate()  # before anything imports megatron-core
    from megavlm.command_line.parsing import parse
    from megavlm.rules.check import check
    from megavlm.train.build import build
    from megavlm.train.loop import close

    config = parse(argv)
    check(config, world=WORLD)
    with contextlib.redirect_stdout(io.StringIO()):
        run = build(config, chosen)
    seconds, before = list[float](), 0
    for number in range(1 + count):
        if number == 1:
            before = _sent()
        batches = run.data_loader.next_step().batches
        dist.barrier()
        began = time.perf_counter()
        run.engine.train_step(batches)
        seconds.append(time.perf_counter() - began)
    megabytes = (_sent() - before) / count / 1e6
    parameters = sum(p.numel() for chunk in run.engine.chunks for p in chunk.parameters())
    with contextlib.redirect_stdout(io.StringIO()):
        close(run)
    return {"megabytes": megabytes, "seconds": statistics.median(seconds[1:]), "parameters": parameters}


def _sent() -> int:
    return int(Path("/sys/class/net/wire/statistics/tx_bytes").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
