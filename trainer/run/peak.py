"""Operations per second that GPUs could do at most, by their makers' data sheets."""

import re

import torch

_BF16 = {
    r"B200": 2250e12,
    r"H200 NVL|H100 NVL": 835.5e12,
    r"H100 PCIe": 756e12,
    r"H200|H100|GH200": 989.4e12,
    r"A100|A800": 312e12,
    r"L40S": 362e12,
    r"L4": 121e12,
    r"A40": 149.7e12,
    r"A10": 125e12,
    r"RTX A6000": 154.8e12,
    r"RTX 4090": 165.2e12,
    r"RTX 3090": 71e12,
    r"MI300X": 1307.4e12,
}
"""Dense products in bf16 with sums in fp32, by a pattern of the device's name: NVIDIA's and AMD's data sheets, which
give twice as many for NVIDIA's sparse ones."""


def peak_flops(name: str) -> float | None:
    """Return the peak of a GPU by torch's name for it, such as ``NVIDIA H100 80GB HBM3``; None if it is not known."""
    return next((peak for pattern, peak in _BF16.items() if re.search(rf"\b({pattern})\b", name)), None)


def peak_of(device: torch.device, mixed_precision: str) -> float | None:
    """Return the peak of a device in bf16; None for a CPU, and where products are not in bf16."""
    if device.type != "cuda" or mixed_precision != "bf16":
        return None
    return peak_flops(torch.cuda.get_device_name(device))
