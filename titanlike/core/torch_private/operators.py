"""Operators of torch's dispatcher, and base classes from torch's private modules."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, _higher_order_ops
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode

from titanlike.core.torch_private.tensors import tensors_in

__all__ = ["BatchNorm", "InstanceNorm", "OpOverload", "TorchDispatchMode"]
__all__ += ["arguments_of", "decomposed", "operator_names", "scaled_grouped_mm"]
__all__ += ["try_scaled_grouped_mm", "written_by"]

_REGISTERED_LATE = ("torch.nn.attention.varlen",)  # these register operators when imported


def operator_names() -> set[str]:
    """Names of operators without overloads, as "aten.mm", those of imported libraries included."""
    for module in _REGISTERED_LATE:
        importlib.import_module(module)
    qualified = torch._C._dispatch_get_all_op_names()  # "aten::mm.out"
    names = {name.split(".")[0].replace("::", ".") for name in qualified}
    return names | set(_higher_order_ops)


def arguments_of(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator call's arguments by their names in its schema."""
    names = (argument.name for argument in operator._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written_by(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call changes in place."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    values = arguments_of(operator, args, kwargs)
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(values.get(argument.name))


def decomposed(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a composite operator by its decomposition, else NotImplemented.

    Symptom without it: a TorchDispatchMode in inference mode sees aten.linear, not its matmul.
    Test: `test_fences.py::test_a_dispatch_mode_in_inference_mode_sees_whole_operators`.
    """
    return operator.decompose(*args, **kwargs)


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply groups of rows of `a`, or of its columns and rows of `b`, in float8; scales: by which
    rows of `a` and columns of `b` were multiplied; ends: of each group.

    Until 2.14 the public function, torch.nn.functional.scaled_grouped_mm, has no meta kernel: a
    compiled block cannot call it. Test: `test_fences.py::test_the_public_scaled_grouped_product_has_no_meta_kernel`.
    """
    of_a, of_b = scales[0].reciprocal(), scales[1].reciprocal()
    multiply: Any = torch._scaled_grouped_mm
    return multiply(a, b, of_a, of_b, ends, out_dtype=dtype, use_fast_accum=True)


def try_scaled_grouped_mm(device: str) -> None:
    """Multiply two groups both ways. Raises, or ends the process, where there is no kernel."""
    ones = torch.ones(32, 32, device=device).to(torch.float8_e4m3fn)
    matrices = torch.stack([ones, ones])
    ends = torch.tensor([16, 32], dtype=torch.int32, device=device)
    for b, of_a, of_b in ((matrices.mT, 32, (2, 32)), (ones.t(), 64, 64)):
        scales = torch.ones(of_a, device=device), torch.ones(of_b, device=device)
        result = scaled_grouped_mm(ones, b, scales, ends, torch.bfloat16)
        summed = 32 if b.dim() == 3 else 16
        assert result.is_meta or bool((result == summed).all()), "wrong results"
