"""Base classes that torch names as private, for `isinstance`."""

from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm

__all__ = ["BatchNorm", "InstanceNorm", "OpOverload"]
