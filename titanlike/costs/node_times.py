"""How long one recorded node takes on a device, alone: forward and backward."""

from __future__ import annotations

import copy
import statistics
import time
from itertools import pairwise

import torch
from torch import Tensor, nn

from titanlike.costs.node_cost import Call, module_of, random_like
from titanlike.costs.node_operators import Deferring
from titanlike.device.accelerator import kept_rng, synchronize
from titanlike.graph.recording import Node

Times = tuple[float, float, float]  # seconds: forward, backward, weight gradients that wait for it


def node_times(
    node: Node, model: nn.Module, device: torch.device, deferring: Deferring, repeats: int = 15
) -> Times:
    """Medians, of random values; weights have gradients already, as in most microbatches."""
    module = module_of(node, model)
    if module is not None:
        module = copy.deepcopy(module).to_empty(device=device)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(0, 0.02)
            for buffer in module.buffers():
                buffer.fill_(1 if buffer.is_floating_point() else 0)
    found: list[Times] = []
    with (
        kept_rng(device),
        deferring(nn.Module() if module is None else module) as wait,
    ):
        call = Call(node, module, device, lambda tensor: random_like(tensor, device))
        for _ in range(2 + repeats):
            arguments = call.arguments()
            moments = [now(device)]
            results = call.forward(arguments)
            moments.append(now(device))
            ones: list[Tensor] = [torch.ones_like(result) for result in results]
            moments.append(now(device))
            if results:
                torch.autograd.backward(results, ones)
            moments.append(now(device))
            wait()
            moments.append(now(device))
            forward, _, inputs, weights = (b - a for a, b in pairwise(moments))
            found.append((forward, inputs, weights))
            for tensor in call.inputs:
                tensor.grad = None
    first, second, third = zip(*found[2:], strict=True)
    return statistics.median(first), statistics.median(second), statistics.median(third)


def now(device: torch.device) -> float:
    """Of one thread of a CPU its own time, which other programs do not lengthen."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    synchronize(device)
    return time.perf_counter()
