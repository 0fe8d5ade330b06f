"""The GPU machines of Vertex AI: type, accelerator and how many of them.

Sources: https://cloud.google.com/vertex-ai/docs/training/configure-compute and, for the names of accelerators,
https://cloud.google.com/vertex-ai/docs/reference/rest/v1/MachineSpec

docs/clusters.md says what of this was compared with these pages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A machine type, whose accelerators are part of it: Vertex AI takes no other number of them."""

    name: str
    accelerator: str
    count: int
    profiles: tuple[str, ...] = ("ethernet",)  # of launch/profiles, that fit its network
    only_queued: bool = False  # there is none on demand: --strategy SPOT or FLEX_START

    @property
    def series(self) -> str:
        return self.name.partition("-")[0]


def _series(pattern: str, accelerator: str, counts: tuple[int, ...]) -> list[Machine]:
    return [Machine(pattern.format(count), accelerator, count) for count in counts]


_ALL = (
    *_series("a2-highgpu-{}g", "NVIDIA_TESLA_A100", (1, 2, 4, 8)),
    Machine("a2-megagpu-16g", "NVIDIA_TESLA_A100", 16),
    *_series("a2-ultragpu-{}g", "NVIDIA_A100_80GB", (1, 2, 4, 8)),
    *(Machine(f"a3-highgpu-{count}g", "NVIDIA_H100_80GB", count, only_queued=True) for count in (1, 2, 4)),
    Machine("a3-highgpu-8g", "NVIDIA_H100_80GB", 8, ("gcp-tcpx", "ethernet")),
    Machine("a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB", 8, ("gcp-tcpxo", "ethernet")),
    Machine("a3-ultragpu-8g", "NVIDIA_H200_141GB", 8, ("gcp-rdma", "ethernet")),
    Machine("a4-highgpu-8g", "NVIDIA_B200", 8, ("gcp-rdma", "ethernet")),
    *(Machine(f"g2-standard-{cores}", "NVIDIA_L4", 1) for cores in (4, 8, 12, 16, 32)),
    *(Machine(f"g2-standard-{cores}", "NVIDIA_L4", count) for cores, count in ((24, 2), (48, 4), (96, 8))),
    *(Machine(f"g4-standard-{48 * count}", "NVIDIA_RTX_PRO_6000", count) for count in (1, 2, 4, 8)),
)
MACHINES = {machine.name: machine for machine in _ALL}

# https://cloud.google.com/vertex-ai/docs/training/schedule-jobs-dws: L4, A100, H100, H200 and B200.
FLEX_START_SERIES = ("g2", "a2", "a3", "a4")

REDUCER = "n1-highcpu-16"
REDUCER_IMAGE = "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
# Gbit/s out of a machine: https://cloud.google.com/compute/docs/gpus and .../general-purpose-machines#n1_machines
REDUCER_BANDWIDTH = 32
BANDWIDTH = {8: 100, 16: 100, 4: 50, 2: 32, 1: 24}  # of A2 machines, by number of GPUs
