"""Compares layouts under `numerics=exact` with one process, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.sources import Data
from titanlike.core.device.accelerator import deterministic, is_accelerator, one_thread
from titanlike.core.distributed.placement import Slices, pieces
from titanlike.core.launch.rendezvous import barrier
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.dtensor import local
from titanlike.core.training.build import Run, build
from titanlike.core.training.device_batches import to_device
from titanlike.core.training.session import connected
from titanlike.core.training.step import drop_gradients, forward_backward, optimizer_step
from titanlike.proof.comparison import gathered
from titanlike.proof.reference import REFERENCE_TIMEOUT, in_one_process
from titanlike.proof.verification import apart

if TYPE_CHECKING:
    from titanlike.proof.recorder import Recorder

KINDS = ("gradient", "loss", "gradient norm", "weight")  # in the order of a step


@dataclass(frozen=True, order=True)
class Difference:
    """The first bit that differs from one process."""

    step: int
    kind: int  # of KINDS
    place: int  # index of the parameter in the model
    element: tuple[int, ...]
    name: str
    values: tuple[float, float]  # in the layout, in one process

    def __str__(self) -> str:
        where = f" of {self.name}{[*self.element]}" if self.name else ""
        here, there = self.values
        return f"step {self.step}: {KINDS[self.kind]}{where} is {here!r}, in one process {there!r}"


def first_difference(config: Config, data: Data, worker: Worker) -> Difference | None:
    """Train `verify.steps` steps in the layout and in one process; None = all bits are equal.

    Compares each step's loss, norm, gradients and weights. Collective.
    """
    path = worker.run_dir / "bits.pt"
    if worker.rank == 0:
        one = apart(worker, "", 1)
        expected = [
            (step, kind, name, local(value).cpu().clone())
            for step, kind, name, value, _ in computed(in_one_process(config), data, one)
        ]
        torch.save(expected, path)
    barrier(worker, "bits", REFERENCE_TIMEOUT)
    rows = torch.load(path, map_location="cpu", mmap=True)
    refs = {
        (step, kind, name): (index, whole) for index, (step, kind, name, whole) in enumerate(rows)
    }
    differences: list[Difference] = []

    def compare(run: Run) -> None:
        firsts = gathered(min(differences, default=None))
        differences[:] = [difference for difference in firsts if difference is not None]

    layout = apart(worker, "bits")
    for step, kind, name, value, places in computed(config, data, layout, compare):
        index, whole = refs[step, kind, name]
        for here, place in places:
            part, other = local(value)[here].cpu(), whole[place]
            differ = (part.view(torch.int32) != other.view(torch.int32)).nonzero()
            if len(differ):
                inside = tuple(differ[0].tolist())
                element = tuple(s.start + i for s, i in zip(place, inside, strict=True))
                values = part[inside].item(), other[inside].item()
                differences.append(Difference(step, kind, index, element, name, values))
    barrier(worker, "bits compared", REFERENCE_TIMEOUT)
    if worker.rank == 0:
        path.unlink()
    return min(differences, default=None)


def computed(
    config: Config,
    data: Data,
    worker: Worker,
    end: Callable[[Run], object] = lambda run: None,
    recorder: Recorder | None = None,
) -> Iterator[tuple[int, int, str, Tensor, list[tuple[Slices, Slices]]]]:
    """Yield (step, kind, name, this rank's part, its `pieces`) of what steps compute; end: called
    before the mesh is closed."""
    with (
        connected(config, worker) as mesh,
        one_thread(True),
        deterministic(is_accelerator(mesh.device)),
    ):
        run = build(config, mesh, data, more={"recorder": recorder} if recorder else {})
        stream = batches(data.train, config, dp_rank=mesh.dp_rank)
        moved = (to_device(batch, mesh, config) for batch in stream)
        owned = [
            (n, p, [*pieces(p.detach(), s.part(n))])
            for s in run.stage_states
            for n, p in s.parameters()
            if s.owns(n)
        ]
        for step in range(1, config.verify.steps + 1):
            gradients = forward_backward(run, config, step, moved)
            unreached = run.pipeline.unreached()  # filled with zeros, of either sign
            for name, p, places in owned:
                if p.grad is not None and not unreached.get(p, 0):
                    yield step, KINDS.index("gradient"), name, p.grad.detach(), places
            one = [*pieces(gradients.loss.view(1), None)]
            yield step, KINDS.index("loss"), "", gradients.loss.view(1), one
            yield step, KINDS.index("gradient norm"), "", gradients.norm.view(1), one
            optimizer_step(run, config, step, gradients.norm)
            drop_gradients(run)
            for name, p, places in owned:
                yield step, KINDS.index("weight"), name, p.detach(), places
        end(run)
