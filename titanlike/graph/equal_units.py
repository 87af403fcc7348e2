"""Units that compute the same in the same forward: equal blocks of a model are recorded once.

126 equal blocks on equal arguments give equal results on meta, and a draft of 405B takes half of the
time. Only titanlike's own blocks, made of torch's modules, are taken for equal: they have no other
state than their parameters, while a user's block may count its calls or keep a tensor for the next.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.torch_private.tensors import storage_id, tree_flatten, tree_leaves

_OWN, _TORCHS = "titanlike.models.", "torch.nn.modules."
_AROUND = ("forward", "tp_gathers")  # attributes of modules that say nothing of their own
_PLAIN = (bool, int, float, str, type(None))


def call_key(module: nn.Module, args: Any, kwargs: Any) -> Hashable | None:
    """Equal for calls that give equal results on meta; None where that is not known."""
    if not type(module).__module__.startswith(_OWN):
        return None
    parts: list[Hashable] = [torch.is_grad_enabled()]
    for path, part in module.named_modules():
        styled = is_divided(part)  # and equal for an equal mark, which is among its attributes
        hooks = (part._forward_hooks or part._forward_pre_hooks) and not styled
        if not type(part).__module__.startswith((_OWN, _TORCHS)) or (path and hooks):
            return None
        own = [item for item in vars(part).items() if item[0][0] != "_" and item[0] not in _AROUND]
        around = vars(part).get("forward")
        plain = styled or around is None or getattr(around, "changes_nothing", False)
        replaced = path and not plain
        if replaced or not all(map(_is_plain, own)):
            return None
        # a buffer may be what it keeps for the next call; those of a routed layer change once a step
        if part._buffers and not getattr(type(part), "token_wise", False):
            return None
        held = (*part._parameters.items(), *part._buffers.items())
        weights = [(n, None if p is None else _form(p)) for n, p in held]
        parts.append((path, type(part), tuple(own), tuple(weights)))
    leaves, structure = tree_flatten((args, kwargs))
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return None
    forms = [_form(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return (*parts, str(structure), tuple(forms))


def is_divided(module: nn.Module) -> bool:
    """Whether tensor parallelism has divided a module: its hooks are part of it."""
    return "tp_style" in vars(module)


def is_new(result: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result is one tensor, and no view of an argument."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return isinstance(result, Tensor) and storage_id(result) not in set(map(storage_id, given))


def _is_plain(item: tuple[str, Any]) -> bool:
    value = item[1]
    return isinstance(value, _PLAIN) or (
        isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value)
    )


def _form(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
