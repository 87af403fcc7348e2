"""The running statistics that batch norms have after a step on a batch that is not split.

torch's own batch norm computes them: a copy of each module, from before the step, is called once
with the concatenated inputs of all groups of rows.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.torch_private.base_classes import BatchNorm


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """By name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, BatchNorm)}


class WholeBatch:
    """Records all inputs of a model's batch norms from now on."""

    def __init__(self, model: nn.Module) -> None:
        norms = batch_norms(model)
        self._copies = {name: copy.deepcopy(norm) for name, norm in norms.items()}
        self._inputs: dict[tuple[str, int], list[Tensor]] = {}  # by module and call in a forward
        self._calls: Counter[str] = Counter()
        self._handles = [model.register_forward_pre_hook(lambda *_: self._calls.clear())]
        for name, norm in norms.items():
            self._handles.append(norm.register_forward_pre_hook(self._keep(name)))

    def _keep(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            # a copy: an operation after a batch norm may work in place
            inputs = self._inputs.setdefault((name, self._calls[name]), [])
            inputs.append(args[0].detach().clone())
            self._calls[name] += 1

        return hook

    def buffers(self) -> dict[str, Tensor]:
        """The buffers after a step on all inputs, by name. Ends the recording."""
        for handle in self._handles:
            handle.remove()
        for (name, _), inputs in sorted(self._inputs.items()):
            self._copies[name](torch.cat(inputs))
        return {
            f"{name}.{key}": value.detach().cpu().clone()
            for name, norm in self._copies.items()
            for key, value in norm.named_buffers()
        }
