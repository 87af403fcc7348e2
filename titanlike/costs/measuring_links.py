"""What local ranks exchange with each other: messages, collectives, and FSDP's gathers and reductions.

All ranks measure at the same time; the numbers are keys of `config.hardware.Hardware`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titanlike.device import accelerator
from titanlike.device.accelerator import synchronize

_MESSAGE, _LARGE = 1 << 22, 1 << 26  # bytes, of a CPU and of devices with links of their own
_WIDTH, _LAYERS, _ROWS = 1024, 4, 32  # of a model whose products take less than its parameters' way
_REPEATS = 15
_TIMES = 8  # there and back in a row


def link_numbers(device: torch.device, rank: int, ranks: int) -> dict[str, float]:
    """Bytes/s and seconds of messages and collectives. Collective over the default group.

    A CPU's ranks have no other links than these, and send what FSDP exchanges in between. Of devices the
    network's numbers stay as they are known, and what FSDP exchanges is as other collectives, on a stream of
    its own.
    """
    wall, on_cpu = Clock(device), not accelerator.is_accelerator(device)
    size = (_MESSAGE if on_cpu else _LARGE) // 4 // ranks * ranks
    large, one = (torch.ones(n, device=device) for n in (size, 1))

    def there_and_back(tensor: Tensor) -> Callable[[], None]:
        def run() -> None:
            for sender in (0, 1) * _TIMES if rank < 2 else ():
                (dist.send if rank == sender else dist.recv)(tensor, 1 - rank)

        return run

    latency = wall.median(there_and_back(one)) / (2 * _TIMES)
    seconds = wall.median(there_and_back(large)) / (2 * _TIMES) - latency
    bandwidth = 4 * size / max(1e-9, seconds)
    part = large[: size // ranks].clone()
    both = (
        wall.median(lambda: dist.all_gather_into_tensor(large, part)),
        wall.median(lambda: dist.reduce_scatter_tensor(part, large)),
    )
    sent = 4 * size * (ranks - 1) / ranks
    found = {
        "node_bandwidth": bandwidth,
        "node_latency": latency,
        "collective_bandwidth": sent / (sum(both) / 2),
    }
    if on_cpu:
        gathered, reduced = _sharded(wall, device, ranks)
        found |= {"gather_bandwidth": gathered, "reduce_bandwidth": reduced}
    agreed = torch.tensor([*found.values()], dtype=torch.float64)
    dist.broadcast(agreed, 0)
    found = dict(zip(found, agreed.tolist(), strict=True))
    if on_cpu:
        found["network_bandwidth"] = found["node_bandwidth"]
        found["network_latency"] = found["node_latency"]
    return {**found, "link_efficiency": 1.0}


def _forward_and_backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _sharded(wall: Clock, device: torch.device, ranks: int) -> tuple[float, float]:
    """Bytes/s that a rank sends while FSDP gathers parameters, and reduces gradients, with its copies
    and hooks."""
    plain, sharded = (
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))).to(device)
        for _ in range(2)
    )
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(sharded, mesh=mesh)
    x = torch.ones(_ROWS, _WIDTH, device=device)
    seconds = []
    for model in (plain, sharded):
        forward = wall.median(partial(model, x))
        both = wall.median(partial(_forward_and_backward, model, x))
        seconds.append((forward, both))
    (forward, both), (gathers, all_of_it) = seconds
    gathered = max(1e-6, gathers - forward)
    reduced = max(1e-6, all_of_it - both - 2 * gathered)
    sent = 4 * _LAYERS * _WIDTH**2 * (ranks - 1) / ranks
    return sent / gathered, sent / reduced


class Clock:
    """Of the wall: others' work and what a rank waits for are a part of an exchange."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def median(self, function: Callable[[], object]) -> float:
        """Seconds, all ranks begin together."""
        times = []
        for _ in range(2 + _REPEATS):
            dist.barrier()
            synchronize(self._device)
            begin = time.perf_counter()
            function()
            synchronize(self._device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[2:])
