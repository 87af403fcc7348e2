"""The most FLOP/s that a device can do, by its name."""

from __future__ import annotations

import re

import torch

from titanlike.device import accelerator

# Dense bf16 matrix products with fp32 sums, FLOP/s, by words of the device's name. Vendors' data
# sheets often print twice as much, for matrices of which half is zero.
_BF16_PEAK = {
    # NVIDIA Blackwell and Blackwell Ultra: HGX B200 and HGX B300 data sheets (36 PFLOP/s sparse for 8
    # GPUs), GB200 NVL72 and GB300 NVL72 data sheets (360 PFLOP/s sparse for 72)
    "B200": 2.25e15,
    "B300": 2.25e15,
    "GB200": 2.5e15,
    "GB300": 2.5e15,
    # NVIDIA Hopper: H100 data sheet (sparse: SXM 1,979, PCIe 1,513, NVL 1,671), H200 data sheet
    # (1,979; NVL 1,671), GH200 data sheet (1,979); H800 has the H100's cores; H20 has 148 dense
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "H800": 989e12,
    "H800 PCIe": 756e12,
    "H20": 148e12,
    # NVIDIA Ampere: A100, A10, A30, A40 data sheets, RTX A6000 data sheet (309.7 sparse); A800 has the
    # A100's cores
    "A100": 312e12,
    "A800": 312e12,
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "RTX A6000": 154.8e12,
    # NVIDIA Ada: L4 (242 sparse), L40 (362 sparse), L40S (733 sparse) data sheets; Ada architecture
    # whitepapers (728.5 sparse for RTX 6000 Ada, 330.3 sparse for RTX 4090)
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "RTX 6000 Ada": 364.2e12,
    "RTX 4090": 165.2e12,
    # NVIDIA RTX Blackwell architecture whitepaper (419 sparse), GA102 whitepaper (142 sparse)
    "RTX 5090": 209.5e12,
    "RTX 3090": 71e12,
    # AMD Instinct product pages: MI250X is two devices of 191.5
    "MI250X": 191.5e12,
    "MI300X": 1307.4e12,
    "MI325X": 1307.4e12,
    "MI355X": 2.5e15,
}
# of a slice of a GPU, or of another one that has the same words in its name
_OTHER = re.compile(r"\b(MIG|Laptop|Max-Q|Mobile|RTX 4090 D|RTX 5090 D|RTX 3090 Ti)\b")


def bf16_peak(name: str) -> float | None:
    """Of a device by its name, by the longest entry whose words it contains; None = not known."""
    if _OTHER.search(name):
        return None
    known = [entry for entry in _BF16_PEAK if re.search(rf"\b{entry}\b", name)]
    return _BF16_PEAK[max(known, key=len)] if known else None


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s of one device in matrix products, None where it is not known.

    Of float8 that of bf16, in which part of the model computes: so runs in both can be compared, and
    float8 may come to more than 1.
    """
    if not accelerator.is_accelerator(device) or precision == "fp32":
        return None
    return bf16_peak(accelerator.name(device))
