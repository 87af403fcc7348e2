"""The operators that torch's dispatcher knows."""

from __future__ import annotations

import importlib

import torch
from torch._ops import _higher_order_ops

_REGISTERED_LATE = ("torch.nn.attention.varlen",)  # with the first import of these modules


def operator_names() -> set[str]:
    """Without overloads, as "aten.mm"; those of imported libraries as well."""
    for module in _REGISTERED_LATE:
        importlib.import_module(module)
    qualified = torch._C._dispatch_get_all_op_names()  # "aten::mm.out"
    names = {name.split(".")[0].replace("::", ".") for name in qualified}
    return names | set(_higher_order_ops)
