"""Base classes that torch keeps in private modules."""

from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BatchNorm", "InstanceNorm", "OpOverload", "TorchDispatchMode"]
