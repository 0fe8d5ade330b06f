"""What is replaced in megatron-core on every device, against what it replaces, and what it sees of a CPU."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import random as mcore_random
from megatron.core.utils import local_multi_tensor_l2_norm

from megavlm import backend
from megavlm.backend import installed, patches
from megavlm.errors import UserError


def test_the_norm_is_megatron_cores() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(5, 7), torch.randn(3), torch.zeros(4)]
    found, _ = patches.norm(0, None, [gradients], False)
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert found.shape == (1,)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert clip_grads.l2_norm_impl is patches.norm
    assert clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm


def test_casts_of_flat_parts_write_no_transposed_copy() -> None:
    """The module as Transformer Engine has it: names are looked up at each call, and the class is asked for, too."""

    class Quantizer:
        def __init__(self, scale: float, *, rowwise: bool = True, columnwise: bool = True) -> None:
            self.usage = (rowwise, columnwise)

    casts = ModuleType("utils")
    vars(casts).update(Float8Quantizer=Quantizer)
    exec("def cast(scale):\n    return Float8Quantizer(scale=scale).usage", vars(casts))
    assert casts.cast(1.0) == (True, True)
    for _ in range(2):
        casts.cast = patches.without_transposes(casts, casts.cast)
        assert casts.cast(1.0) == (True, False)
    assert casts.Float8Quantizer is Quantizer, "which `cast_master_weights_to_fp8` compares with"


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"4 processes on this machine see 2 CUDA devices.*--nproc-per-node 2"):
        backend.activate()


def test_a_torch_for_other_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(UserError, match="built for AMD's GPUs"):
        backend.activate()


@pytest.mark.parametrize(("visible", "index"), [(1, 0), (4, 3)])
def test_a_process_takes_the_one_device_that_it_sees(visible: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    for name, answer in (("is_available", True), ("device_count", visible), ("get_device_name", "a device")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(installed, "loading_error", lambda: "")
    monkeypatch.setattr(backend.patches, "install", lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert backend.activate().device == torch.device("cuda", index)
    assert taken == [torch.device("cuda", index)]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Transformer Engine as before anybody asked for it; the CPU backend's answer comes back afterwards."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("transformer_engine")}
    installed.loading_error.cache_clear()
    yield
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    sys.modules.update(hidden)
    installed.loading_error.cache_clear()


def test_transformer_engine_that_cannot_be_loaded_counts_as_none(forgotten, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed.loading_error() == "", "it is not installed"
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pytorch" / "__init__.py").write_text("raise RuntimeError('libcudnn.so.9: not found\\nmore')")
    installed.loading_error.cache_clear()
    assert installed.loading_error() == "RuntimeError: libcudnn.so.9: not found"
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine")


def test_modules_are_absent_in_a_context_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker imports later what megatron-core is kept from."""
    (tmp_path / "tried_by_others.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    with installed.without("tried_by_others", "json"):
        with pytest.raises(ImportError):
            importlib.import_module("tried_by_others")
        assert importlib.import_module("json") is sys.modules["json"], "it was loaded before"
    assert importlib.import_module("tried_by_others").VALUE == 1
    assert not set(installed.UNUSED_BY_MEGATRON_CORE) & {name for name, each in sys.modules.items() if each is None}


def test_segments_of_memory_grow_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    backend.activate()
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    backend.activate()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("32", "32")])
def test_launches_are_ordered_unless_the_environment_says_otherwise(monkeypatch, before, after):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", before)
    backend.activate()
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == before
    backend.activate(queues=1)
    assert os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS") == after
    backend.activate(queues=32)
    assert os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS") == "32"


def test_a_gpu_records_collectives_and_refuses_one_queue_for_side_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(os, "environ", {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_FR_BUFFER_SIZE": "9"})
    with pytest.raises(UserError, match="CUDA_DEVICE_MAX_CONNECTIONS=1 lets the streams"):
        backend.activate(queues=32)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "9"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_recomputation_draws_the_same_dropout():
    """megatron-core restores "CUDA" generator states around recomputation: on CPU that is the default generator."""
    mcore_random.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    x = torch.ones(1000, requires_grad=True)

    def noisy(value):
        with mcore_random.get_cuda_rng_tracker().fork():
            value = F.dropout(value, 0.5)
        return F.dropout(value, 0.5)

    out = mcore_random.checkpoint(noisy, False, x)
    torch.randn(3)  # other numbers drawn between forward and backward
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())  # the gradient of dropout is its own mask times its scale


def test_megatron_sees_a_cpu_and_we_see_torch_as_it_is():
    import megatron.core.pipeline_parallel.schedules as schedules

    assert schedules.torch.zeros([], device="cuda").device.type == "cpu"
    assert schedules.torch.cuda.current_device() == "cpu"
    assert schedules.torch.Tensor is torch.Tensor
    assert not torch.cuda.is_available()
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"  # the one lie that reaches everybody: optimizers ask
    assert torch.ones(1).type(torch.int32).dtype is torch.int32
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
