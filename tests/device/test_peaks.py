"""The peak that MFU is a share of, by the name that the driver gives a device."""

from __future__ import annotations

import pytest

from titanlike.core.device.accelerator import bf16_peak


@pytest.mark.parametrize(
    "name,tera",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        # others, whose names contain those
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("Tesla V100-SXM2-16GB", None),  # has no bf16
        ("Quadro RTX 6000", None),
    ],
)
def test_the_peak_of_a_device(name: str, tera: float | None) -> None:
    assert bf16_peak(name) == (None if tera is None else pytest.approx(tera * 1e12))
