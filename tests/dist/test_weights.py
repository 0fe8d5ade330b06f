"""Weights that a receiver gets from a run, at any layout, are byte for byte those of the run's export."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megavlm.programs import convert
from megavlm.train import loop
from megavlm.weights import Weights, _units
from tests.support import hf
from tests.support.covering import slow
from tests.support.live_bytes import LiveBytes, standing_tensors
from tests.support.pool import Pools
from tests.support.tiny_models import FAMILIES, SINGLE, square
from tests.support.training import train_composed

RUN = "--precision bf16 --seq-length 48 --gbs 4 --lr 1e-2 --lr-warmup-iters 0 --train-iters 2 --no-tensorboard"
LORA = "--freeze projector --lora-rank 2 --lora-targets language vision --lora-alpha 8"
BUCKET = 20_000  # bytes, so that there are several


def train_and_send(argv: list[str], run_dir: str, port: int, adapters: bool) -> None:
    """Train, and send the weights before the run closes, as SGLang takes them: names, types and shapes of a bucket,
    then a broadcast of each tensor.
    """
    closing = loop.close

    def send(run: Any, error: BaseException | None = None) -> None:
        if error is None:
            _send(run, port, adapters)
        closing(run, error)

    with patch.object(loop, "close", send):
        train_composed(argv, run_dir)


def _send(run: Any, port: int, adapters: bool) -> None:
    weights = Weights(run.engine.trained(), run.config, run.run_dir, adapters=adapters, bucket_bytes=BUCKET)
    described = [(meta.name, str(meta.dtype), list(meta.shape)) for meta in weights.metadata()]
    largest = 0 if adapters else max(BUCKET, *(unit.bytes for unit in _units(weights._exported())))
    store, group = None, None
    if dist.get_rank() == 0:
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
        group = dist.ProcessGroupGloo(store, 0, 2, timedelta(minutes=10))
    sent, number = list[Any](), 0
    counter = LiveBytes(standing_tensors(run.engine))
    before = counter.live
    with counter:
        for number, bucket in enumerate(weights.buckets(), 1):
            found = [(name, str(each.dtype), list(each.shape)) for name, each in bucket.items()]
            if store is not None and group is not None:
                store.set(f"bucket{number}", json.dumps(found))
                for each in bucket.values():
                    group.broadcast(each.view(torch.uint8) if each.ndim else each, 0).wait()
            sent += found
            del bucket
    assert sent == described
    if not adapters:
        assert number > 3
        piece = max(unit.bytes for unit in _units(weights._exported()))  # what is cut and rounded on the way
        assert counter.peak - before <= largest + piece, f"{counter.peak - before} bytes, a bucket has {BUCKET}"
    if store is not None:
        store.set(f"bucket{number + 1}", "null")


def receive(port: int, out: str) -> None:
    """Write what comes to the file `out`, in another process."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(minutes=30))
    group = dist.ProcessGroupGloo(store, 1, 2, timedelta(minutes=10))
    found, number = dict[str, torch.Tensor](), 1
    while (bucket := json.loads(store.get(f"bucket{number}"))) is not None:
        for name, dtype, shape in bucket:
            found[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            group.broadcast(found[name].view(torch.uint8) if shape else found[name], 0).wait()
        number += 1
    save_file(found, out)


@pytest.mark.parametrize(
    ("family", "world", "flags", "command"),
    [
        slow("internvl-moe", 2, "--tp 2 --ep 2 --freeze projector", "export"),
        ("qwen3-vl", 2, f"--pp 2 --vpp 2 {LORA}", "merge-lora"),
        slow("qwen3-vl", 4, "--tp 2 --pp 2 --vpp 2", "export"),
        slow("qwen3-vl", 2, "--data-parallel-sharding full --freeze vision", "export"),
        slow("qwen3-vl", 2, f"--data-parallel-sharding full {LORA}", "merge-lora", id="zero3-lora"),
        slow("qwen3-vl", 4, "--tp 2 --data-parallel-sharding none", "export"),
        slow("llava", 4, f"--tp 2 {LORA}", "export-lora"),
        slow("qwen3-vl-moe", 2, "--ep 2", "export"),
        slow("qwen3-vl-moe", 4, "--tp 2 --ep 2 --etp 2 --precision fp32", "export"),
        slow("gemma3", 2, "--tp 2 --placement colocated", "export"),
        *(slow(name, 4, f"--tp 2 --pp 2{' --precision fp32' * ('moe' in name)}", "export") for name in SINGLE),
    ],
)
def test_a_receiver_gets_what_an_export_has(
    pools: Pools, tmp_path: Path, family: str, world: int, flags: str, command: str
) -> None:
    folder = hf.save(FAMILIES[family][0](), tmp_path / "hf")
    argv = f"{RUN} {flags} --init-from {folder} --image-sizes {square(family)}".split()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run, out, alone = str(tmp_path / "run"), str(tmp_path / "received"), command == "export-lora"
    with ThreadPoolExecutor() as threads:
        other = threads.submit(pools(1).run, receive, store.port, out)
        pools(world).run(train_and_send, argv, run, store.port, alone)
        other.result()
    assert convert.main([command, run, str(tmp_path / "out")]) == 0
    received, exported = load_file(out), {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    assert received.keys() == exported.keys()
    for name, value in exported.items():
        assert received[name].dtype == value.dtype, name
        assert torch.equal(received[name].view(torch.uint8), value.view(torch.uint8)), name
    before = load_file(folder / "model.safetensors")
    assert alone or not all(torch.equal(value, before[name]) for name, value in exported.items()), "nothing was trained"
