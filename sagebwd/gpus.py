"""GPUs by name: the peak that MFU is measured against, memory and its bandwidth. From NVIDIA's data sheets."""

from __future__ import annotations

from typing import NamedTuple

from sagebwd.errors import UserError


class Spec(NamedTuple):
    """tflops: dense BF16 matrix peak with FP32 sums, 10^12 FLOP/s. bandwidth: 10^12 B/s. memory: GiB, as sold."""

    tflops: float
    bandwidth: float
    memory: int


SPECS = {  # names as nvidia-smi and torch tell them; data sheets that state peaks with sparsity: halved
    "NVIDIA A100-SXM4-40GB": Spec(312, 1.555, 40),
    "NVIDIA A100-SXM4-80GB": Spec(312, 2.039, 80),
    "NVIDIA A100-PCIE-40GB": Spec(312, 1.555, 40),
    "NVIDIA A100 80GB PCIe": Spec(312, 1.935, 80),
    "NVIDIA H100 80GB HBM3": Spec(989.4, 3.35, 80),
    "NVIDIA H100 PCIe": Spec(756, 2.0, 80),
    "NVIDIA H100 NVL": Spec(835, 3.9, 94),
    "NVIDIA H200": Spec(989.4, 4.8, 141),
    "NVIDIA H200 NVL": Spec(835, 4.8, 141),
    "NVIDIA B200": Spec(2250, 8.0, 180),
    "NVIDIA L40S": Spec(362, 0.864, 48),
    "NVIDIA GeForce RTX 4090": Spec(165.2, 1.008, 24),
}
SHORT = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "l40s": "NVIDIA L40S",
    "rtx4090": "NVIDIA GeForce RTX 4090",
}


def spec(name: str) -> Spec | None:
    """Of a GPU by its full name; None: not in the table, so there is no MFU."""
    return SPECS.get(name)


def find(name: str) -> tuple[str, Spec]:
    """Full name and figures of a GPU by its short or full name. UserError: not in the table."""
    full = SHORT.get(name.lower(), name)
    if full not in SPECS:
        raise UserError(f"no figures for the GPU {name!r}: choose from {', '.join(SHORT)}, or {', '.join(SPECS)}")
    return full, SPECS[full]
