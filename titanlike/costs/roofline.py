"""How long operators take on a device: the longer of computing and of reading and writing.

A matrix product reaches a share of the peak that grows with each of its three sizes, and half of it
at `hardware.matmul_half`. The shares of `hardware` are of all devices and models alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from titanlike.config.hardware import Hardware
from titanlike.config.schema import Config, Float8Precision
from titanlike.costs.node_operators import ATTENTION, NodeOperators, Operator, Operators

# Of what operators that are no products read and write, and of their launches, compiled code leaves
# so much: a chain of them becomes one kernel.
_FUSED_BYTES, _FUSED_LAUNCHES = 0.6, 0.25

# To multiply in float8, an operand is read for its largest value, and written in a byte
_CAST_BYTES = 5
_CAST_BYTES_COMPILED = 2  # its values are read where they are made


@dataclass(frozen=True)
class Seconds:
    """Of some operators: device, of it in products and attention, and how many are launched."""

    device: float = 0.0
    products: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        device, products = self.device + other.device, self.products + other.products
        return Seconds(device, products, self.launches + other.launches)


@dataclass(frozen=True)
class Roofline:
    """A device, and what of a config decides how fast it computes."""

    hardware: Hardware
    compiled: bool = False  # blocks are
    tf32: bool = False
    float8: bool = False  # products of blocks are
    float8_weights: bool = True  # and those that give weight gradients

    @classmethod
    def of(cls, config: Config, hardware: Hardware) -> Roofline:
        precision = config.precision
        float8 = isinstance(precision, Float8Precision)
        weights = isinstance(precision, Float8Precision) and (
            precision.recipe != "rowwise_with_gw_hp"
        )
        return cls(hardware, config.compile, config.matmul_precision != "highest", float8, weights)

    def seconds(
        self,
        operators: Operators,
        block: bool,
        *,
        weights: bool = False,
        without: Sequence[str] = (),
    ) -> Seconds:
        """block: of a block; weights: gradients of weights; without: patterns of operators whose
        results are there already."""
        total = Seconds()
        for operator, count in operators.items():
            if without and any(fnmatchcase(operator.name, pattern) for pattern in without):
                continue
            one = self._one(operator, block, weights)
            total += Seconds(count * one.device, count * one.products, count * one.launches)
        return total

    def attention(self, operators: Operators) -> float:
        """Seconds of fused attention among them."""
        found = {operator: n for operator, n in operators.items() if operator.name == ATTENTION}
        return self.seconds(found, True).device

    def again(self, node: NodeOperators, save: Sequence[str]) -> Seconds:
        """Of a forward that runs again in the backward, but for the operators `save`."""
        return self.seconds(node.forward, True, without=save)

    def _one(self, operator: Operator, block: bool, weights: bool) -> Seconds:
        device = self.hardware
        memory = operator.bytes / (device.memory_bandwidth * device.memory_efficiency)
        if operator.name == ATTENTION:
            reached = self._peak(operator) * device.attention_efficiency
            seconds = max(operator.flops / reached, memory) + device.kernel_seconds
            return Seconds(seconds, seconds, 1)
        if operator.flops:
            float8 = self.float8 and block and operator.sizes is not None
            if float8 and (self.float8_weights or not weights):
                seconds = self._float8(operator)
            else:
                reached = self._peak(operator) * self._share(operator)
                seconds = max(operator.flops / reached, memory)
            seconds += device.kernel_seconds
            return Seconds(seconds, seconds, 1)
        if self.compiled and block:
            kernels = _FUSED_LAUNCHES * device.kernel_seconds
            return Seconds(_FUSED_BYTES * memory + kernels, 0.0, _FUSED_LAUNCHES)
        return Seconds(memory + device.kernel_seconds, 0.0, 1)

    def _float8(self, operator: Operator) -> float:
        device = self.hardware
        assert operator.sizes is not None
        rows, columns, summed = operator.sizes
        each = _CAST_BYTES_COMPILED if self.compiled else _CAST_BYTES
        cast = each * (rows + columns) * summed
        seconds = operator.flops / (device.fp8_flops * self._share(operator))
        return seconds + cast / (device.memory_bandwidth * device.memory_efficiency)

    def _peak(self, operator: Operator) -> float:
        if operator.itemsize <= 2:
            return self.hardware.bf16_flops
        return self.hardware.tf32_flops if self.tf32 else self.hardware.fp32_flops

    def _share(self, operator: Operator) -> float:
        share, half = self.hardware.matmul_efficiency, self.hardware.matmul_half
        for size in operator.sizes or ():
            share *= size / (size + half)
        return share
