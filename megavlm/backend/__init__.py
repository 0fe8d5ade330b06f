"""Choose the device of this process, and patch megatron-core for the device before any other import of megatron-core.

`backend.patches` holds the few patches for every device, `backend.cpu` and `backend.gloo` additional patches for CPU
runs. No other package patches modules of torch or megatron-core.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from megavlm.errors import UserError

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # the name that all versions of torch read
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # CUDA reads it once, when it starts
# After a collective times out, torch writes each rank's last collectives to a file: how many, and whether.
_RECORDED = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


@dataclass(frozen=True)
class Backend:
    device: torch.device
    communication: str  # torch.distributed backend: "nccl" or "gloo"
    name: str  # for people: "NVIDIA H100 80GB HBM3", "CPU"

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"


def activate(*, queues: int | None = None) -> Backend:
    """Use a CUDA device if there is one, else make megatron-core run on CPU; return the backend.

    `queues` is the number of a GPU's hardware queues (`derived.device_queues`), unless the environment sets
    CUDA_DEVICE_MAX_CONNECTIONS. GPU memory is allocated in expandable segments, unless the environment sets
    PYTORCH_ALLOC_CONF: sizes differ in every micro-batch, and would fragment fixed segments. A process that sees one
    device uses that device. Raises UserError if processes see several devices but too few, if side streams would share
    one queue, and on AMD GPUs, which torch also calls CUDA.
    """
    if not {"PYTORCH_ALLOC_CONF", _ALLOCATOR} & os.environ.keys():
        os.environ[_ALLOCATOR] = "expandable_segments:True"
    if queues is not None:
        os.environ.setdefault(_QUEUES, str(queues))
    if torch.cuda.is_available():
        if torch.version.hip is not None:
            raise UserError(
                "this torch is built for AMD's GPUs (ROCm), on which megavlm has never run: use an NVIDIA GPU, or hide "
                "the devices (HIP_VISIBLE_DEVICES=) to run on the CPU"
            )
        for name, value in _RECORDED.items():
            os.environ.setdefault(name, value)
        if queues is not None and queues > 1 and os.environ[_QUEUES] == "1":
            raise UserError(
                f"{_QUEUES}=1 lets the streams of --encode-ahead and of --data-parallel-sharding wait for one another: "
                f"unset it ({queues} is then set)"
            )
        devices, number = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        processes = max(number + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if devices == 1:
            number = 0  # each process may see its own; `start` refuses processes that share one
        elif processes > devices:
            raise UserError(
                f"{processes} processes on this machine see {devices} CUDA devices: start as many "
                f"processes as it has devices (torchrun --nproc-per-node {devices}), and let each see all of them"
            )
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True  # tensor-parallel ranks repeat convolutions, whose weights stay equal
        from megavlm.backend import installed, patches

        installed.loading_error()  # before megatron-core tries
        with installed.without(*installed.UNUSED_BY_MEGATRON_CORE):
            patches.install()
        return Backend(device=device, communication="nccl", name=torch.cuda.get_device_name(device))
    from megavlm.backend import cpu, gloo

    cpu.install()
    gloo.install()
    return Backend(device=torch.device("cpu"), communication="gloo", name="CPU")
