"""What data sheets and published measurements say of NVIDIA's GPUs; `hardware.py` derives profiles from it. Pure data.

Products: the "maximum achievable matmul FLOPS" of S. Bekman's ML Engineering book for bf16. H200 has H100's
arithmetic. Cards that the book does not have are assumed to reach the share of their peak that A100 PCIe (for L40S)
or H100 SXM (for H100 PCIe and NVL) reaches. Attention: FlashAttention-2 (Dao 2023) on A100, FlashAttention-3 (Shah et
al. 2024) on Hopper, head width 128; on B200 Hopper's shares of the peak, and on cards the same share of products,
both assumed.

Memory, links and peaks: NVIDIA's data sheets; network: 200 Gbit/s per GPU on DGX A100, 400 on DGX H100, H200 and
B200. Hosts are those of the DGX systems, 2 TB each (A100 40GB: 1 TB): two EPYC 7742 with 8 channels of DDR4-3200; two
Xeon 8480C or 8570 with 8 of DDR5, which two modules per channel slow to 4400. A bus of its own for each GPU is
assumed; where two share a switch's link to the processor, each has half. PCIe cards reach one another over that bus,
since a bridge joins two of them at most; their network is assumed: an adapter of 200 Gbit/s (L40S: 100) for each.
"""

from __future__ import annotations

from dataclasses import dataclass

# GB/s per direction. PCI Express 4.0 and 5.0: 16 lanes of 16 and 32 GT/s, 128 of 130 bits data (PCI-SIG); NVLink-C2C:
# 900 GB/s in both directions together (GH200 data sheet).
_PCIE4, _PCIE5, _C2C = 31.5, 63.0, 450.0


@dataclass(frozen=True)
class DataSheet:
    """TFLOP/s (`products`: of the best square one), gigabytes and GB/s; `nvlink` and `network` are per direction."""

    products: float
    attention: tuple[float, float]  # forward and backward pass
    gigabytes: float
    memory_rate: float
    nvlink: float  # between devices of a node: PCI Express where there is no NVLink
    network: float
    host: tuple[float, float, float]  # of a node the link to each device, and of all together memory rate and gigabytes
    source: str
    devices: int = 8  # of a node


SHEETS: dict[str, DataSheet] = {
    "a100": DataSheet(
        products=271,
        attention=(220, 185),
        gigabytes=80,
        memory_rate=2039,
        nvlink=300,
        network=25,
        host=(_PCIE4, 410, 2048),
        source="A100 80GB SXM data sheet; MAMF 271 TFLOP/s; FlashAttention-2",
    ),
    "a100-40gb": DataSheet(
        products=271,
        attention=(220, 185),
        gigabytes=40,
        memory_rate=1555,
        nvlink=300,
        network=25,
        host=(_PCIE4, 410, 1024),
        source="A100 40GB SXM data sheet; arithmetic as A100 80GB",
    ),
    "a100-pcie": DataSheet(
        products=253,
        attention=(205, 173),
        gigabytes=80,
        memory_rate=1935,
        nvlink=_PCIE4,
        network=25,
        host=(_PCIE4, 410, 1024),
        source="A100 80GB PCIe data sheet; MAMF 253 TFLOP/s; attention, network and host assumed",
    ),
    "h100": DataSheet(
        products=794,
        attention=(600, 500),
        gigabytes=80,
        memory_rate=3350,
        nvlink=450,
        network=50,
        host=(_PCIE5, 563, 2048),
        source="H100 SXM data sheet; MAMF 794 TFLOP/s; FlashAttention-3",
    ),
    "h100-pcie": DataSheet(
        products=607,
        attention=(459, 382),
        gigabytes=80,
        memory_rate=2000,
        nvlink=_PCIE5,
        network=25,
        host=(_PCIE5, 563, 1024),
        source="H100 PCIe data sheet; products and attention assumed at H100 SXM's share of the peak; network assumed",
    ),
    "h100-nvl": DataSheet(
        products=670,
        attention=(507, 422),
        gigabytes=94,
        memory_rate=3900,
        nvlink=_PCIE5,
        network=25,
        host=(_PCIE5, 563, 1024),
        source="H100 NVL data sheet; products and attention assumed at H100 SXM's share of the peak; network assumed",
    ),
    "h200": DataSheet(
        products=794,
        attention=(600, 500),
        gigabytes=141,
        memory_rate=4800,
        nvlink=450,
        network=50,
        host=(_PCIE5, 563, 2048),
        source="H200 SXM data sheet; arithmetic as H100",
    ),
    "b200": DataSheet(
        products=1745,
        attention=(1360, 1140),
        gigabytes=180,
        memory_rate=8000,
        nvlink=900,
        network=50,
        host=(_PCIE5, 563, 2048),
        source="HGX B200 data sheet; MAMF 1745 TFLOP/s; attention assumed at Hopper's share of the peak",
    ),
    "gh200": DataSheet(
        products=794,
        attention=(600, 500),
        gigabytes=96,
        memory_rate=4000,
        nvlink=50,
        network=50,
        host=(_C2C, 384, 480),
        devices=1,
        source="GH200 data sheet (96 GB HBM3, 480 GB LPDDR5X, NVLink-C2C); arithmetic as H100; one GPU per node",
    ),
    "l40s": DataSheet(
        products=297,
        attention=(241, 203),
        gigabytes=48,
        memory_rate=864,
        nvlink=_PCIE4,
        network=12.5,
        host=(_PCIE4, 410, 1024),
        source="L40S data sheet; products and attention assumed at A100 PCIe's share of the peak; network assumed",
    ),
}
