"""precision=mxfp8: a scale per 32 elements along a matmul's summed dimension (OCP microscaling).

Elements are e4m3, scales powers of 2 (e8m0), rounded up as in cuBLAS. Blocks lie along the summed
dimension: features in the forward and the input gradient, tokens in the weight gradient. So a rank
with full blocks rounds as the full matrix does, without communication.

Casts and kernels are torchao's; a device without kernels rounds and multiplies in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchao.float8.config import Float8LinearConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim0
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_dtype, to_mx
from torchao.quantization.quantize_.common import KernelPreference

BLOCK = 32
_E4M3, _ROUNDED = torch.float8_e4m3fn, ScaleCalculationMode.RCEIL


@dataclass(frozen=True)
class BlockConfig(Float8LinearConfig):
    """Which operands of a layer's matmuls are cast in blocks, as `Float8LinearConfig` says."""

    block = BLOCK

    def cast_blocks(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Elements and scales of a matrix, in its layout; dim: the summed dimension."""
        rows = (x if dim == 1 else x.t()).contiguous()
        if missing := -rows.shape[1] % BLOCK:  # `pad` copies, also where it adds nothing
            rows = pad(rows, (0, missing))  # tokens: zeros change no scale
        if self.emulate or x.is_meta:
            scale, data = to_mx(rows, _E4M3, BLOCK, _ROUNDED)
        else:  # torchao's kernels for columns take multiples of 128, or Python 3.10
            data, scale = triton_to_mxfp8_dim0(rows, BLOCK, _ROUNDED.value)
        return (data, scale) if dim == 1 else (data.t(), scale.t())

    def multiply_blocks(
        self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Multiply a, cast along dimension 1, with b, cast along 0."""
        columns = b[0].t(), b[1].t()
        if self.emulate or a[0].is_meta:
            left, right = (to_dtype(*x, _E4M3, BLOCK, torch.float32) for x in (a, columns))
            return torch.mm(left, right.t()).to(dtype)
        options = {"block_size": BLOCK, "kernel_preference": KernelPreference.AUTO}
        left, right = (
            MXTensor.from_qdata_and_scales(*x, torch.bfloat16, **options) for x in (a, columns)
        )
        return torch.mm(left, right.t()).to(dtype)
