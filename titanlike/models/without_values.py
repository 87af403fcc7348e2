"""Models on the meta device are constructed without drawing weights, which they have none of.

torch's meta kernels of random numbers are written in Python: they take most of the time of
constructing a model, and import the compiler (half a second) to do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = {
    *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_),
    *(Tensor.normal_, Tensor.uniform_, Tensor.erfinv_),
}


class WithoutValues(TorchFunctionMode):
    """Within it, drawing into a tensor on the meta device returns it as it is."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _DRAWS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return function(*args, **kwargs)
