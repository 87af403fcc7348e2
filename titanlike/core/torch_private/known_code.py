"""Whether a module runs its torch class's code: no custom forward, parametrization or hook.

titanlike shards, defers or copies torch's layers by what their class computes, which would silently
leave out such code.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def own_code(module: nn.Module, kind: type[nn.Module]) -> str:
    """What makes a module with a weight compute differently from its base class `kind`; "" =
    nothing."""
    cls: Any = type(module)
    if cls.forward is not kind.forward or "forward" in vars(module):
        return f"a forward of its own ({cls.__name__})"
    if cls.__call__ is not nn.Module.__call__:
        return f"a __call__ of its own ({cls.__name__})"
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        made = "that is computed (a parametrization)", f"of class {type(weight).__name__}"
        return f"a weight {made[weight is not None]}"
    return "a hook" if has_hooks(module) else ""


def has_hooks(module: nn.Module) -> bool:
    """Whether calls of the module run hooks, forward or backward."""
    hooks = module._forward_hooks, module._forward_pre_hooks
    return any((*hooks, module._backward_hooks, module._backward_pre_hooks))


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether hooks (`register_hook` and the like) see the parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
