"""The operators that torch's dispatcher knows."""

from __future__ import annotations

import torch
from torch._ops import _higher_order_ops


def operator_names() -> set[str]:
    """Without overloads, as "aten.mm"; those of imported libraries as well."""
    qualified = torch._C._dispatch_get_all_op_names()  # "aten::mm.out"
    names = {name.split(".")[0].replace("::", ".") for name in qualified}
    return names | set(_higher_order_ops)
