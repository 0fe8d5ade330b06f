"""Choose the device of this process, and patch megatron-core for it before anything imports megatron-core.

`backend.patches` holds the few patches that every device needs, `backend.cpu` and `backend.gloo` those that a CPU run
adds. No other package patches modules of torch or megatron-core.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from megavlm.errors import UserError

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # the name that all versions of torch read


@dataclass(frozen=True)
class Backend:
    device: torch.device
    communication: str  # torch.distributed backend: "nccl" or "gloo"
    name: str  # for people: "NVIDIA H100 80GB HBM3", "CPU"

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"


def activate(*, launches_in_order: bool = False) -> Backend:
    """Pick CUDA where there is a device, else make megatron-core run on CPU.

    `launches_in_order` lets a GPU begin kernels of all streams in the order of their launch, unless the environment
    says how (`CUDA_DEVICE_MAX_CONNECTIONS`): before Blackwell, tensor-parallel communication overlaps only so.
    Memory of a GPU is taken in segments that grow, unless the environment says how (`PYTORCH_ALLOC_CONF`): sizes differ
    in every micro-batch, and would tear holes into fixed ones. A process that sees one device takes it. Raises
    UserError where processes see several, and too few.
    """
    if not {"PYTORCH_ALLOC_CONF", _ALLOCATOR} & os.environ.keys():
        os.environ[_ALLOCATOR] = "expandable_segments:True"
    if launches_in_order:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # CUDA reads it once, when it starts
    if torch.cuda.is_available():
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
        from megavlm.backend import installed, patches

        installed.loading_error()  # before megatron-core tries
        with installed.without(*installed.UNUSED_BY_MEGATRON_CORE):
            patches.install()
        return Backend(device=device, communication="nccl", name=torch.cuda.get_device_name(device))
    from megavlm.backend import cpu, gloo

    cpu.install()
    gloo.install()
    return Backend(device=torch.device("cpu"), communication="gloo", name="CPU")
