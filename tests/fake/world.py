"""One rank of a world of processes that are not there, over NCCL that is not there: tensors must be on the device."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch.distributed as dist

from megavlm.parallel import rendezvous


def pretend() -> None:
    """Let `init_process_group("nccl")` work, and objects travel nowhere."""
    original = dist.init_process_group

    def init(backend: str, *, timeout: Any, **kwargs: Any) -> None:
        assert backend == "nccl", f"a run on CUDA devices communicates by {backend}"
        assert kwargs.get("device_id") is None, "NCCL would connect every group at once, with all ranks of the world"
        kwargs.setdefault("rank", int(os.environ["RANK"]))
        kwargs.setdefault("world_size", int(os.environ["WORLD_SIZE"]))
        kwargs["store"] = dist.HashStore()
        original("cuda:fake", timeout=timeout, **kwargs)

    new_group = dist.new_group

    def group_of(ranks: Any, *, backend: str | None = None, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake" if backend == "gloo" else backend, **kwargs)  # gloo would wait for all

    dist.init_process_group, dist.new_group = init, group_of
    # torch's fake store keeps nothing, and the watchdog writes to the one of the rendezvous.
    dist.rendezvous = lambda *_, **__: iter(
        [(dist.HashStore(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))]
    )
    dist.Store.wait = lambda self, *_: None  # rank 0 says nothing
    rendezvous.agree = lambda *_, **__: "alone"
    rendezvous.refuse_shared_devices = lambda *_, **__: None
    dist.is_torchelastic_launched = lambda: True
    dist.get_backend = lambda group=None: "nccl"
    dist.broadcast_object_list = lambda object_list, src=None, group=None, **_: None
    dist.all_gather_object = _all_gather_object
    dist.gather_object = _gather_object
    dist.barrier = lambda group=None, **_: None


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        _all_gather_object(object_gather_list, obj)


def enter(rank: int, size: int) -> None:
    """Be this rank from now on."""
    if dist.is_initialized():
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()
        dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", TORCHELASTIC_RUN_ID="none")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # nobody connects
