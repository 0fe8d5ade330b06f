"""The clouds' GPU machine types: which GPUs a machine has, and what of the network is between machines. Pure data.

The network is what carries GPU traffic (GPUDirect TCPX, TCPXO and RDMA; EFA; InfiniBand), in Gbit/s per direction and
machine; that of the host is not counted. What share of it NCCL reaches is assumed to be that of other networks.
docs/planner.md says which entries were compared with their publishers' pages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    name: str
    gpu: str  # a profile of `hardware.PROFILES`
    gpus: int
    network_gbit: float  # of all GPUs of a machine
    memory_gb: float  # of the host
    source: str


_GCP = "docs.cloud.google.com/compute/docs/accelerator-optimized-machines and …/gpus/gpu-network-bandwidth"
_AWS = "aws.amazon.com/ec2/instance-types"
_AZURE = "learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated"

_TABLE = (
    Machine("a2-highgpu-8g", "a100-40gb", 8, 100, 680, f"{_GCP}: gVNIC, no GPUDirect"),
    Machine("a2-megagpu-16g", "a100-40gb", 16, 100, 1360, f"{_GCP}: gVNIC, no GPUDirect"),
    Machine("a2-ultragpu-8g", "a100", 8, 100, 1360, f"{_GCP}: gVNIC, no GPUDirect"),
    Machine("a3-highgpu-8g", "h100", 8, 800, 1872, f"{_GCP}: 4 adapters of 200 Gbit/s, GPUDirect-TCPX"),
    Machine("a3-megagpu-8g", "h100", 8, 1600, 1872, f"{_GCP}: 8 adapters of 200 Gbit/s, GPUDirect-TCPXO"),
    Machine("a3-ultragpu-8g", "h200", 8, 3200, 2952, f"{_GCP}: 8 adapters of 400 Gbit/s, RoCE"),
    Machine("a4-highgpu-8g", "b200", 8, 3200, 3968, f"{_GCP}: 8 adapters of 400 Gbit/s, RoCE"),
    Machine("p4d.24xlarge", "a100-40gb", 8, 400, 1152, f"{_AWS}/p4: EFA"),
    Machine("p4de.24xlarge", "a100", 8, 400, 1152, f"{_AWS}/p4: EFA"),
    Machine("p5.48xlarge", "h100", 8, 3200, 2048, f"{_AWS}/p5: EFA"),
    Machine("p5e.48xlarge", "h200", 8, 3200, 2048, f"{_AWS}/p5: EFA"),
    Machine("p5en.48xlarge", "h200", 8, 3200, 2048, f"{_AWS}/p5: EFA"),
    Machine("p6-b200.48xlarge", "b200", 8, 3200, 2048, f"{_AWS}/p6: EFA"),
    Machine("ND96asr_v4", "a100-40gb", 8, 1600, 900, f"{_AZURE}/ndasra100v4-series: 8 × HDR InfiniBand"),
    Machine("ND96amsr_A100_v4", "a100", 8, 1600, 1800, f"{_AZURE}/ndma100v4-series: 8 × HDR InfiniBand"),
    Machine("ND96isr_H100_v5", "h100", 8, 3200, 1900, f"{_AZURE}/ndh100v5-series: 8 × NDR InfiniBand"),
    Machine("ND96isr_H200_v5", "h200", 8, 3200, 1850, f"{_AZURE}/ndh200v5-series: 8 × NDR InfiniBand"),
)
MACHINES: dict[str, Machine] = {machine.name: machine for machine in _TABLE}


def find_machine(name: str) -> Machine | None:
    """Return a machine type, whatever the case of its name and with Azure's `Standard_` or without; None for others."""
    wanted = name.lower().removeprefix("standard_")
    return next((machine for machine in _TABLE if machine.name.lower() == wanted), None)
