"""Operations per second that GPUs could do at most, by their makers' data sheets."""

import re

import torch

_BF16 = {
    r"B200": 2250e12,  # HGX B200, 1,000 W: 4,500 sparse
    r"H200 NVL|H100 NVL": 835.5e12,  # 1,671 sparse
    r"H100 PCIe": 756e12,  # 1,513 sparse
    r"H200|H100|GH200": 989.4e12,  # 1,979 sparse
    r"A100|A800": 312e12,
    r"L40S": 362e12,
    r"L4": 121e12,  # 242 sparse
    r"A40": 149.7e12,
    r"A10": 125e12,
    r"RTX A6000": 154.8e12,  # 309.7 sparse, of the GA102 whitepaper
    r"RTX 4090": 165.2e12,  # with sums in fp32, of the Ada whitepaper; twice as many with sums in fp16
    r"RTX 3090": 71e12,  # likewise, of the GA102 whitepaper
    r"MI300X": 1307.4e12,
}
"""Dense products in bf16 with sums in fp32, by a pattern of the device's name.

Compared with the tables of the makers' data sheets (nvidia.com, amd.com) and of NVIDIA's GA102 and Ada whitepapers, as
others copy them. NVIDIA's sheets mostly print the rate of sparse products alone, which is twice this one.
"""
_LESS = re.compile(r"\b(MIG|Laptop|Max-Q|Ti|D)\b")
"""Marks in the name of a part of a GPU, and of a different GPU that shares the rest of its name with one above."""


def peak_flops(name: str) -> float | None:
    """Return the peak of a GPU by torch's name for it, such as ``NVIDIA H100 80GB HBM3``; None if it is not known."""
    if _LESS.search(name):
        return None
    return next((peak for pattern, peak in _BF16.items() if re.search(rf"\b({pattern})\b", name)), None)


def peak_of(device: torch.device, mixed_precision: str) -> float | None:
    """Return the peak of a device in bf16; None for a CPU, and where products are not in bf16."""
    if device.type != "cuda" or mixed_precision != "bf16":
        return None
    return peak_flops(torch.cuda.get_device_name(device))
