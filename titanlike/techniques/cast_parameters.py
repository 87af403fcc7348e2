"""bf16 on ranks without sharding: parameters are cast once a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from titanlike.core.distributed.transform import Transform
from titanlike.core.torch_private.autograd import accumulate_into
from titanlike.core.torch_private.tensors import copy_values


class CastParameters(Transform):
    """Casts parameters once a step, without FSDP's hooks.

    Within a step the stage's modules hold copies in the compute dtype; outside of it the fp32
    parameters, which optimizers and checkpoints use. Each backward adds its bf16 gradients to the
    fp32 parameters' in one kernel; autograd would cast them to fp32 first. Results equal FSDP's
    mixed precision: both compute in bf16 and accumulate microbatches in fp32. Only a gradient that
    autograd has in fp32, as a norm weight's, is not rounded to bf16 on its way.
    """

    def __init__(self, dtype: torch.dtype, accumulates: bool = True) -> None:
        """accumulates: False = the copies keep their gradients, which a caller takes."""
        self._dtype, self._accumulates = dtype, accumulates
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._copies: dict[nn.Parameter, nn.Parameter] = {}

    def on_weights(self, stage: nn.Module) -> None:
        for module in stage.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if not parameter.is_floating_point():
                    continue
                self._places.append((module, name, parameter))
                if parameter not in self._copies:
                    copy = nn.Parameter(parameter.detach().to(self._dtype), parameter.requires_grad)
                    if parameter.requires_grad:
                        copy.grad_dtype = None  # any
                        if self._accumulates:
                            accumulate_into(parameter, copy)
                    self._copies[parameter] = copy

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A context in which the stages compute with copies of the parameters' current values."""
        with torch.no_grad():
            copy_values([*self._copies.values()], [*self._copies])
        for module, name, parameter in self._places:
            _set(module, name, self._copies[parameter])
        try:
            yield
        finally:
            for module, name, parameter in self._places:
                _set(module, name, parameter)


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:  # such as nn.LSTM, which keeps a list of its weights
        setattr(module, name, parameter)
