"""Weights that a receiver gets from a run, at any layout, are byte for byte those of the run's export."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

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
from tests.support.pool import Pool, Pools
from tests.support.predictors import with_predictor
from tests.support.tiny_models import FAMILIES, SINGLE, square
from tests.support.training import train_composed

RUN = "--precision bf16 --seq-length 48 --gbs 4 --lr 1e-2 --lr-warmup-iters 0 --train-iters 2 --no-tensorboard"
LORA = "--freeze projector --lora-rank 2 --lora-targets language vision --lora-alpha 8"
BUCKET = 20_000  # bytes, so that there are several
ROOT = Path(__file__).parents[2]
VLLM = ROOT / "build/vllm"


def train_and(send: Callable[[Any], None], argv: list[str], run_dir: str) -> None:
    """Train, then call `send` with the run, before its process groups are destroyed."""
    closing = loop.close

    def close(run: Any, error: BaseException | None = None) -> None:
        if error is None:
            send(run)
        closing(run, error)

    with patch.object(loop, "close", close):
        train_composed(argv, run_dir)


def train_and_send(argv: list[str], run_dir: str, port: int, adapters: bool) -> None:
    """Send the weights as SGLang takes them: names, types and shapes of a bucket, then a broadcast of each tensor."""
    train_and(partial(_send, port=port, adapters=adapters), argv, run_dir)


def _send(run: Any, port: int, adapters: bool) -> None:
    weights = Weights(run.engine.trained(), run.config, run.run_dir, adapters=adapters, bucket_bytes=BUCKET)
    described = [(meta.name, str(meta.dtype), list(meta.shape)) for meta in weights.metadata()]
    every, rest = {name for name, *_ in described}, set(weights._beside(weights._exported()))
    parts = ("language",), ("vision", "projector")  # audio encoders are of these two
    words, others = (
        {meta.name for meta in Weights(run.engine.trained(), run.config, run.run_dir, parts=each).metadata()}
        for each in parts
    )
    assert adapters or (words and not words & others and words | others | rest == every)
    assert adapters or not any("vis" in name or "audio_tower" in name for name in words)
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
        slow("qwen3-vl-moe", 2, f"--ep 2 {LORA} --lora-targets experts language", "merge-lora"),
        slow("qwen3.5", 2, "--tp 2 --set model.language.mtp_layers=1", "export"),
        slow("gemma3", 2, "--tp 2 --placement colocated", "export"),
        *(slow(name, 4, f"--tp 2 --pp 2{' --precision fp32' * ('moe' in name)}", "export") for name in SINGLE),
    ],
)
def test_a_receiver_gets_what_an_export_has(
    pools: Pools, tmp_path: Path, family: str, world: int, flags: str, command: str
) -> None:
    theirs = FAMILIES[family][0]()
    folder = hf.save(with_predictor(theirs) if "mtp_layers" in flags else theirs, tmp_path / "hf")
    argv = f"{RUN} {flags} --init-from {folder} --image-sizes {square(family)}".split()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run, out, alone = str(tmp_path / "run"), str(tmp_path / "received"), command == "export-lora"
    with ThreadPoolExecutor() as threads:
        other = threads.submit(pools(1).run, receive, store.port, out)
        pools(world).run(train_and_send, argv, run, store.port, alone)
        other.result()
    assert convert.main([command, run, str(tmp_path / "out")]) == 0
    exported = compared(Path(out), tmp_path / "out")
    before = load_file(folder / "model.safetensors")
    assert alone or not all(torch.equal(value, before[name]) for name, value in exported.items()), "nothing was trained"


def compared(received_file: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of an exported folder, which have to be those of the file."""
    received, exported = load_file(received_file), dict[str, torch.Tensor]()
    for file in folder.glob("*.safetensors"):
        exported |= load_file(file)
    assert received.keys() == exported.keys()
    for name, value in exported.items():
        assert received[name].dtype == value.dtype, name
        assert torch.equal(received[name].view(torch.uint8), value.view(torch.uint8)), name
    return exported


class Wire:
    """What vLLM's engines take for a communicator of NCCL: what one end broadcasts, the other end receives."""

    def __init__(self, sent: queue.Queue[torch.Tensor], receives: bool) -> None:
        self._sent, self._receives = sent, receives

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        assert src == 0
        if self._receives:
            came = self._sent.get(timeout=60)
            assert (came.shape, came.dtype) == (tensor.shape, tensor.dtype)  # NCCL itself would not notice
            tensor.copy_(came)
        else:
            self._sent.put(tensor.clone())


def transfer(argv: list[str], run_dir: str, out: str, packed: bool) -> None:
    """Send the weights by vLLM's engines; rank 0 runs the sender's and the receiver's."""
    train_and(partial(_transfer, out=out, packed=packed), argv, run_dir)


def _transfer(run: Any, out: str, packed: bool) -> None:
    sys.path.append(str(VLLM))
    from vllm.distributed.weight_transfer import nccl_engine as engines
    from vllm.distributed.weight_transfer import packed_tensor

    text = (ROOT / "docs/after-training.md").read_text().split("```python\n")
    names: dict[str, Any] = {"weights": Weights(run.engine.trained(), run.config, run.run_dir, bucket_bytes=BUCKET)}
    exec(next(block for block in text if "WeightSource" in block.split("```")[0]).split("```")[0], names)
    received: dict[str, torch.Tensor] = {}
    model = MagicMock()  # clones what it is given, since NCCL's buffers are used again
    model.load_weights = lambda found: received.update((name, each.clone()) for name, each in found)
    config: Any = SimpleNamespace(parallel_config=None, model_config=None)
    worker = engines.NCCLWeightTransferEngine(config, config, torch.device("cpu"), model)
    sent = queue.Queue[torch.Tensor]()
    client = SimpleNamespace(
        init_weight_transfer_engine=lambda info: worker.init_transfer_engine(worker.parse_init_info(info)),
        start_weight_update=lambda: None,
        update_weights=lambda info: worker.receive_weights(worker.parse_update_info(info)),
        finish_weight_update=lambda: None,
    )
    with contextlib.ExitStack() as patches:
        # A check of speculative models, whose module imports all of vLLM.
        unused = SimpleNamespace(disable_mtp_completeness_check=contextlib.nullcontext)
        patches.enter_context(patch.dict(sys.modules, {"vllm.model_executor.model_loader.mtp_validation": unused}))
        for owner, name, value in (
            (engines, "open_trainer_endpoint", lambda info: Wire(sent, False)),
            (engines, "worker_init_process_group", lambda info, parallel: Wire(sent, True)),
            (packed_tensor, "_get_streams", lambda device, number: [MagicMock()] * number),
            (torch.cuda, "current_stream", lambda: None),
            (torch.cuda, "stream", contextlib.nullcontext),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.accelerator, "current_stream", MagicMock()),
            (torch, "Event", MagicMock()),
            (torch.Tensor, "record_stream", lambda self, stream: None),
        ):
            patches.enter_context(patch.object(owner, name, value))
        info = engines.NCCLTrainerInitInfo("", 1, 2, packed, 3 * BUCKET, rank=dist.get_rank())
        engine = engines.NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=names["source"])
        for _ in range(2):  # the second time without a description
            received.clear()
            engine.send_weights()
    if dist.get_rank() == 0:
        save_file(received, out)


@pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed: make vllm-tools")
@pytest.mark.parametrize(
    ("family", "flags", "packed"),
    [
        slow("qwen3-vl", "--tp 2", True),
        slow("internvl-moe", "--pp 2", False),
        slow("gemma3", "--data-parallel-sharding full", True),
    ],
)
def test_engines_of_vllm_take_the_weights(tmp_path: Path, family: str, flags: str, packed: bool) -> None:
    folder = hf.save(FAMILIES[family][0](), tmp_path / "hf")
    argv = f"{RUN} {flags} --init-from {folder} --image-sizes {square(family)}".split()
    run, out = str(tmp_path / "run"), tmp_path / "received"
    pool = Pool(2)  # of its own: vLLM changes what other tests would find
    try:
        pool.run(transfer, argv, run, str(out), packed)
    finally:
        pool.close()
    assert convert.main(["export", run, str(tmp_path / "out")]) == 0
    compared(out, tmp_path / "out")
